"""Take the packages of the previous minor version out of the history of this checkout, for tests of upgrades.

    python -m hack.previous_version            # writes them unless they exist; prints the folder
    python -m hack.previous_version --where    # prints the folder only

The folder ``previous/COMMIT`` of the cache has one folder per package, as an installation has, and ``crds``. It runs on
this version's dependencies. Nothing has been released yet: :data:`COMMIT` stands for the previous minor version, and is
the last one before the packages got their present names. Exit status: ``hack/build_once.py``; a shallow clone, which
lacks that commit, ends with 3.
"""

import io
import shutil
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

from hack.build_once import ROOT, CannotMakeError, FailedError, build_once, cache_dir, digest, last_line, main

COMMIT = "1eb19ce"
FREE_GB = 0.1
CRDS = "crds"


def env_dir() -> Path:
    return cache_dir() / "previous" / COMMIT


def make(folder: Path) -> None:
    """Write the packages unless they are there. Raises :class:`CannotMakeError`, :class:`FailedError`."""
    recipe = digest(COMMIT, Path(__file__).read_text())
    build_once(folder, recipe, extract, what=f"the packages of {COMMIT} (once, a second)", free_gb=FREE_GB)


def extract(folder: Path) -> None:
    """Write the packages that a wheel of the commit would have, and its CRDs. Raises as :func:`unpack`."""
    sources = folder / "sources"
    unpack(sources)
    project = tomllib.loads((sources / "pyproject.toml").read_text())
    for package in (*project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"], CRDS):
        (sources / package).rename(folder / Path(package).name)
    shutil.rmtree(sources)


def unpack(sources: Path) -> None:
    """Write the files of the commit. Raises :class:`CannotMakeError`, :class:`FailedError`."""
    if git("cat-file", "-e", f"{COMMIT}^{{commit}}").returncode != 0:
        raise CannotMakeError(
            f"the history of this checkout lacks the commit {COMMIT}, as that of a shallow clone does"
        )
    done = git("archive", COMMIT)
    if done.returncode != 0:
        raise FailedError(f"git archive: {last_line(done.stderr.decode())}")
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as content:
        content.extractall(sources, filter="data")


def git(*arguments: str) -> "subprocess.CompletedProcess[bytes]":
    return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, check=False)


if __name__ == "__main__":
    sys.exit(main("the packages of the previous version", env_dir(), make))
