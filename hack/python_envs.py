"""Find other Python releases on this machine, and build the environment of requirements.lock for each.

    python -m hack.python_envs 3.13    # builds the environment, or finds it ready; prints its folder

An interpreter is taken from ``PATH``, from pyenv, or from uv. The environment lies in ``python`` of the cache; the
build takes about a minute. Exit status: ``hack/build_once.py``.
"""

import os
import shutil
import sys
from functools import partial
from pathlib import Path

from hack.build_once import ROOT, CannotMakeError, build_once, cache_dir, captured, digest, pip_install, run, status_of

RELEASES = ("3.11", "3.12", "3.13", "3.14")
"""Releases that the project supports: the deployables' ``requires-python`` and up."""
LOCK = ROOT / "requirements.lock"
FREE_GB = 1


def find_python(release: str) -> str:
    """Return an interpreter of a release, ``3.12``. Raises :class:`CannotMakeError`."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    candidates = [f"python{release}", *sorted(map(str, pyenv.glob(f"{release}.*/bin/python{release}")))]
    if uv := shutil.which("uv"):
        candidates.append(captured([uv, "python", "find", "--offline", release]).stdout.strip())
    code = "import sys, venv; print(*sys.version_info[:2], sep='.')"
    for candidate in candidates:
        program = shutil.which(candidate) if candidate else None
        if program and captured([program, "-c", code]).stdout.strip() == release:
            return program
    raise CannotMakeError(f"no python{release}")


def env_dir(release: str) -> Path:
    return cache_dir() / "python" / f"{release}-{digest(LOCK.read_text())[:8]}"


def make(release: str) -> Path:
    """Return the folder of a release's environment, Raises :class:`CannotMakeError`, :class:`FailedError`."""
    python = find_python(release)
    folder = env_dir(release)
    recipe = digest(LOCK.read_text(), python)
    build_once(folder, recipe, partial(build, python), what=f"Python {release}'s environment", free_gb=FREE_GB)
    return folder


def build(python: str, folder: Path) -> None:
    run([python, "-m", "venv", str(folder)], "python -m venv")
    wanted = ("--require-hashes", f"--requirement={LOCK}")
    pip_install(str(folder / "bin" / "python"), wanted, "pip install of requirements.lock")


if __name__ == "__main__":
    sys.exit(status_of(lambda: print(make(sys.argv[1]))))
