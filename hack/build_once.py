"""Build something once per machine into the cache: folders, locks, stamps, and the exit statuses of the build tools.

The cache is ``$MMROUTER_CACHE`` (default ``$XDG_CACHE_HOME/mmrouter`` or ``~/.cache/mmrouter``), outside the checkout.
A folder in it carries a stamp with a digest of its recipe, and is built again when the recipe changes. Every tool runs
as ``python -m hack.PACKAGE.TOOL`` from the repository's root, prints the folder (``--where``: without building it) and
ends with one of these statuses:

- 0: built, or found ready.
- 1: the build was tried and failed. The last lines of the failed command are on stderr, a summary is the last of them.
  The same build would have succeeded on this machine before, so callers fail.
- 2: wrong use.
- 3: this machine lacks something that the tool names (a program, a right, disk space, a reachable index), with the
  reason in one line on stderr; callers print it as ``not run: <reason>``.

Runs on the standard library of Python 3.11+: the tools are called before anything else is installed.
"""

import argparse
import errno
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

FAILED, CANNOT = 1, 3
LAST_LINES = 20
UNWRITABLE = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EEXIST, errno.ENOTDIR}
"""Errors that mean that the cache cannot be written on this machine."""
ROOT = Path(__file__).resolve().parents[1]
STAMP = "mmrouter-recipe"


class CannotMakeError(Exception):
    """This machine lacks something that the build needs; the text says what."""


class FailedError(Exception):
    """The build was tried and failed; the text says what failed."""


def cache_dir() -> Path:
    """Return the folder of everything that is built once per machine."""
    if named := os.environ.get("MMROUTER_CACHE"):
        return Path(named).expanduser().resolve()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser().resolve() / "mmrouter"


def digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def interpreter() -> str:
    """Return the interpreter below this one's virtual environment, so that a recipe is the same for every checkout."""
    return os.path.realpath(sys.executable)


def is_stamped(stamp: Path, recipe: str) -> bool:
    return stamp.is_file() and stamp.read_text() == recipe


def build_once(
    folder: Path,
    recipe: str,
    build: Callable[[Path], None],
    *,
    what: str,
    free_gb: float,
    require: Callable[[], object] = lambda: None,
) -> None:
    """Build into a folder under a lock, unless its stamp has this recipe. ``require`` raises :class:`CannotMakeError`
    before an outdated folder is removed. ``what`` names the build and how long it takes. Raises what ``build`` raises,
    too.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with locked(folder.parent / f"{folder.name}.lock"):
        if is_stamped(folder / STAMP, recipe):
            return
        require()
        require_free(folder.parent, free_gb, what)
        # A partial build is never repaired: the stamp is written last, and without it everything is built again.
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        note(f"building {what} into {folder}")
        build(folder)
        (folder / STAMP).write_text(recipe)


def require_free(folder: Path, gigabytes: float, what: str) -> None:
    """Raise :class:`CannotMakeError` where the disk of a folder has less free space than this."""
    free = shutil.disk_usage(folder).free / 1e9
    if free < gigabytes:
        raise CannotMakeError(f"{folder} has {free:.1f} GB free, building {what} needs {gigabytes}")


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock, so that two test runs do not build the same folder at once."""
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
        done = captured(command, env=quiet_env())
    except OSError as error:
        raise FailedError(f"{what} failed: {error}") from error
    if done.returncode != 0:
        raise failed(what, done)
    return done.stdout.strip().rpartition("\n")[2]


def captured(
    command: list[str], *, env: dict[str, str] | None = None, cwd: Path | None = None
) -> "subprocess.CompletedProcess[str]":
    """Run a command with its output captured as text, whatever its exit status."""
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env=env, cwd=cwd, stdin=subprocess.DEVNULL
    )


def failed(what: str, done: "subprocess.CompletedProcess[str]") -> FailedError:
    """Show the last lines of a command that failed, and return the error to raise."""
    output = done.stderr.strip() or done.stdout.strip()
    note("\n".join(output.splitlines()[-LAST_LINES:]))
    return FailedError(f"{what} failed: {last_line(output)}")


def pip_install(python: str, arguments: Iterable[str], what: str) -> None:
    """Install packages beside an interpreter. Raises :class:`FailedError`, and :class:`CannotMakeError` where pip
    reaches no index.

    uv does it where it is installed and succeeds, with a fifth of pip's CPU: it compiles nothing, so that the first
    import of a module does. It copies files, because a link would let a change to one environment change all of them,
    and it looks into all indexes as pip does.
    """
    arguments = list(arguments)
    if uv := shutil.which("uv"):
        ways = ("--quiet", "--link-mode=copy", "--index-strategy=unsafe-best-match", f"--python={python}")
        if captured([uv, "pip", "install", *ways, *arguments], env=quiet_env()).returncode == 0:
            return
    with index_of(python):
        run([python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", *arguments], what)


@contextmanager
def index_of(python: str) -> Iterator[None]:
    """Tell a build that fails from a machine whose pip reaches no index."""
    try:
        yield
    except FailedError as error:
        if why := unreached(python):
            raise CannotMakeError(f"{why}: {error}") from error
        raise


def unreached(python: str) -> str:
    """Return why an interpreter's pip reaches no index, empty where it reaches one.

    Tries to; called after a failure only.
    """
    pip = [python, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps", "--no-cache-dir"]
    with tempfile.TemporaryDirectory(prefix="mmrouter-index-") as folder:
        done = captured([*pip, f"--dest={folder}", "packaging"], env=quiet_env())
    return "" if done.returncode == 0 or "No module named pip" in done.stderr else "pip reaches no index"


def quiet_env() -> dict[str, str]:
    """Return the environment without the calling interpreter's, and with what CPU wheels of engines read at import.
    Python writes bytecode in it: what is built is imported often.
    """
    dropped = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PYTHONDONTWRITEBYTECODE"}
    inherited = {name: value for name, value in os.environ.items() if name not in dropped}
    marks = {"VLLM_TARGET_DEVICE": "cpu", "SGLANG_USE_CPU_ENGINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    return inherited | marks


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")]
    return (errors or lines or ["no message"])[-1][:300]


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(what: str, folder: Path, make: Callable[[Path], None]) -> int:
    """Run the command line of a tool that builds a folder of the cache; return the exit status. ``make`` raises
    :class:`CannotMakeError` and :class:`FailedError`.
    """
    parser = argparse.ArgumentParser(description=f"Build {what} and print its folder.")
    parser.add_argument("--where", action="store_true", help="print the folder and build nothing")
    if not parser.parse_args().where and (status := status_of(partial(make, folder))):
        return status
    print(folder)
    return 0


def status_of(act: Callable[[], None]) -> int:
    """Call a function, print why it could not do its work, and return the exit status."""
    try:
        act()
    except CannotMakeError as error:
        note(str(error))
        return CANNOT
    except FailedError as error:
        note(str(error))
        return FAILED
    except OSError as error:
        if error.errno in UNWRITABLE:
            note(f"cannot write {error.filename or 'the cache'}: {error.strerror}")
            return CANNOT
        note(f"{type(error).__name__}: {error}")
        return FAILED
    return 0
