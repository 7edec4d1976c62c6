"""Build the image and the chart of the previous minor version (``hack/previous_version.py``), for tests of upgrades.

    python -m hack.images.previous_image            # builds them unless they are there; prints the folder
    python -m hack.images.previous_image --where    # prints the folder only

The folder has ``mmrouter.tar``, which the version's own Dockerfile and build script made, and ``chart``. Their version
is :data:`VERSION`, because the commit has the number of this version, and a node tells images apart by their tags. The
base image is that of ``base_image.py``, or ``MMROUTER_BASE_IMAGE``. Exit status: ``hack/build_once.py``.
"""

import os
import re
import shutil
import sys
from pathlib import Path

from hack import previous_version
from hack.build_once import CANNOT, CannotMakeError, build_once, cache_dir, captured, digest, failed, last_line, main
from hack.images import base_image

VERSION = "0.0.1"
CHART = Path("charts", "mmrouter")
NUMBERED = (Path("pyproject.toml"), CHART / "Chart.yaml")
FIELD = re.compile(r'^(version = "|version: |appVersion: )[\d.]+', re.MULTILINE)
BUILD = str(Path("tests", "tools", "images.py"))  # of that version
FREE_GB = 2


def env_dir() -> Path:
    return cache_dir() / "images" / f"previous-{previous_version.COMMIT}"


def make(folder: Path) -> None:
    """Build image and chart unless they are there. Raises :class:`CannotMakeError`, :class:`FailedError`."""
    if not (base := os.environ.get("MMROUTER_BASE_IMAGE", "")):
        base_image.make(base_image.env_dir())
        base = str(base_image.env_dir() / base_image.ARCHIVE)
    recipe = digest(previous_version.COMMIT, Path(__file__).read_text(), base, base_image.recipe())

    def build(folder: Path) -> None:
        sources = folder / "sources"
        previous_version.unpack(sources)
        for name in NUMBERED:
            (sources / name).write_text(FIELD.sub(rf"\g<1>{VERSION}", (sources / name).read_text()))
        storage = base_image.env_dir().parent / "storage"
        command = [sys.executable, BUILD, f"--export={folder}", f"--storage={storage}", "mmrouter"]
        done = captured(command, cwd=sources, env={**os.environ, "MMROUTER_BASE_IMAGE": base})
        if done.returncode == CANNOT:
            raise CannotMakeError(last_line(done.stderr))
        if done.returncode != 0:
            raise failed("the image of the previous version", done)
        (sources / CHART).rename(folder / "chart")
        shutil.rmtree(sources)

    build_once(folder, recipe, build, what="the previous version's image (once, 2 minutes)", free_gb=FREE_GB)


if __name__ == "__main__":
    sys.exit(main("the previous version's image and chart", env_dir(), make))
