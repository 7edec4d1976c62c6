"""Make what reads the workflow of continuous integration: actionlint and kind, from Go modules. Prints their folder.

    python hack/workflow_env.py            # makes it, or finds it ready; prints the folder with the commands
    python hack/workflow_env.py --where    # prints the path only, makes nothing

The commands lie outside the checkout, in ``workflow`` of the cache (``vllm_env.py`` says where that is), and are built
under a lock, once: about 20 seconds on 2 cores, 20 MB. Go is used where it is found (``kube_env.py``), and never
installed. Exit status as of ``vllm_env.py``.
"""

import shutil
import sys
from pathlib import Path

from kube_env import find_go, install
from vllm_env import CannotMakeError, cache_dir, digest, locked, main, note

PACKAGES = ("github.com/rhysd/actionlint/cmd/actionlint@v1.7.12", "sigs.k8s.io/kind@v0.33.0")
FREE_GB = 1  # 0.02 GB stay; the rest is Go's modules and build cache


def env_dir() -> Path:
    # With the recipe in its name: a checkout with another one may be running its tests from its own folder.
    return cache_dir() / "workflow" / recipe()[:8]


def recipe() -> str:
    """Return a digest of everything that decides what the folder holds."""
    return digest(*PACKAGES)


def make(folder: Path) -> None:
    """Build the commands unless they are there. Raises :class:`CannotMakeError`, :class:`FailedError`."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with locked(folder.parent / f"{folder.name}.lock"):
        stamp = folder / "mmrouter-recipe"
        if stamp.is_file() and stamp.read_text() == recipe():
            return
        go = find_go()
        free = shutil.disk_usage(folder.parent).free / 1e9
        if free < FREE_GB:
            raise CannotMakeError(f"{folder.parent} has {free:.1f} GB free, the build of kind needs {FREE_GB}")
        # A half-made folder is never mended: the stamp is written last, and without it everything is made anew.
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        note(f"building actionlint and kind into {folder} (once, up to a minute)")
        for package in PACKAGES:
            install(go, package, "-s -w", folder)
        stamp.write_text(recipe())


if __name__ == "__main__":
    sys.exit(main("actionlint and kind", env_dir(), make))
