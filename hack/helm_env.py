"""Make the helm of the chart tests, from its Go module. Prints the folder with the command.

    python hack/helm_env.py            # makes it, or finds it ready; prints the folder
    python hack/helm_env.py --where    # prints the path only, makes nothing

The command lies outside the checkout, in ``helm/VERSION`` of the cache (``vllm_env.py`` says where that is), and is
built under a lock, once: about 80 seconds on 2 cores, 0.1 GB. Go is used where it is found (``kube_env.py``), and never
installed. Exit status as of ``vllm_env.py``.
"""

import shutil
import subprocess
import sys
from pathlib import Path

from kube_env import find_go, install
from vllm_env import CannotMakeError, FailedError, cache_dir, digest, last_line, locked, main, note

VERSION = "4.3.1"
PACKAGE = "helm.sh/helm/v4/cmd/helm"
LINKER_FLAGS = f"-s -w -X helm.sh/helm/v4/internal/version.version=v{VERSION}"
FREE_GB = 3  # 0.1 GB stay; the rest is Go's modules and build cache


def env_dir() -> Path:
    return cache_dir() / "helm" / VERSION


def recipe() -> str:
    """Return a digest of everything that decides what the folder holds."""
    return digest(VERSION, PACKAGE, LINKER_FLAGS)


def make(folder: Path) -> None:
    """Build the command unless it is there. Raises :class:`CannotMakeError`, :class:`FailedError`."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with locked(folder.parent / f"{folder.name}.lock"):
        stamp = folder / "mmrouter-recipe"
        if stamp.is_file() and stamp.read_text() == recipe():
            return
        go = find_go()
        free = shutil.disk_usage(folder.parent).free / 1e9
        if free < FREE_GB:
            raise CannotMakeError(f"{folder.parent} has {free:.1f} GB free, the build of helm needs {FREE_GB}")
        # A half-made folder is never mended: the stamp is written last, and without it everything is made anew.
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        note(f"building helm {VERSION} into {folder} (once, up to 2 minutes)")
        install(go, f"{PACKAGE}@v{VERSION}", LINKER_FLAGS, folder)
        check(folder)
        stamp.write_text(recipe())


def check(folder: Path) -> None:
    """Run the command. Raises :class:`FailedError` when it is not what was asked for."""
    said = subprocess.run(
        [str(folder / "helm"), "version", "--template={{.Version}}"], capture_output=True, text=True, check=False
    )
    if said.stdout.strip() != f"v{VERSION}":
        raise FailedError(f"the built helm calls itself {said.stdout.strip() or last_line(said.stderr)!r}")


if __name__ == "__main__":
    sys.exit(main("the helm of the chart tests", env_dir(), make))
