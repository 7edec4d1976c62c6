"""What the tests have made for them by the tools: programs, images; and which tests need that."""

import os
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

import pytest

from hack.vllm_env import CANNOT, LAST_LINES

TOOLS = Path(__file__).resolve().parents[1] / "hack"
NEEDS = "needs"
"""Property of a test in a report: what the level is about, which the test cannot do without."""


class NotMadeError(Exception):
    """A tool made nothing. ``status``: its exit status; the text: the last lines that it said, where they were kept."""

    def __init__(self, script: str, status: int, said: str) -> None:
        super().__init__("\n".join(said.strip().splitlines()[-LAST_LINES:]) or f"{script}: exit status {status}")
        self.status = status


def made(script: str, *arguments: str, live: bool = False, **env: str) -> str:
    """Run one of the tools and return what it printed. Raises :class:`NotMadeError`.

    ``live``: what it says meanwhile is shown as it comes, and is not in the error.
    """
    command = [sys.executable, str(TOOLS / script), *arguments]
    stderr = None if live else subprocess.PIPE
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=stderr, text=True, env={**os.environ, **env})
    if done.returncode != 0:
        raise NotMadeError(script, done.returncode, done.stderr or "")
    return done.stdout.strip()


def made_by(script: str, *arguments: str, **env: str) -> str:
    """Run one of the tools for a test: a machine that lacks something skips it, a tool that fails fails it."""
    try:
        return made(script, *arguments, **env)
    except NotMadeError as error:
        if error.status == CANNOT:
            pytest.skip(f"not run: {str(error).splitlines()[-1]}")
        pytest.fail(f"{script} failed:\n{error}", pytrace=False)


def status_of(making: Callable[[], None]) -> int:
    """Return the exit status of a script that makes what tests need: 1 when something that was tried failed.

    What this machine cannot make is no failure: the tests say of themselves that they are not run, and why.
    """
    try:
        making()
    except NotMadeError as error:
        return 0 if error.status == CANNOT else 1
    return 0


def build_images(folder: Path, make: Callable[..., str]) -> list[Path]:
    """Build the project's images from this checkout into a folder and return their archives.

    ``make``: :func:`made` or what stands for it, which raises its errors.
    """
    base = os.environ.get("MMROUTER_BASE_IMAGE") or str(Path(make("base_image.py"), "base.tar"))
    storage = Path(make("base_image.py", "--where")).parent / "storage"
    lines = make("images.py", f"--export={folder}", f"--storage={storage}", MMROUTER_BASE_IMAGE=base).splitlines()
    return [Path(line.split()[1]) for line in lines]


def prepared() -> Path | None:
    """Where the archives of the images are put for all tests of a run; ``None``: each run of pytest makes its own."""
    folder = os.environ.get("MMROUTER_RUN_FOLDER")
    return Path(folder, "images") if folder else None


def name_needs(items: Iterable[pytest.Item], fixtures: Collection[str]) -> None:
    """Have the report say of each test that takes one of the fixtures that it needs what its level is about."""
    for item in items:
        if not set(fixtures).isdisjoint(getattr(item, "fixturenames", ())):
            item.user_properties.append((NEEDS, "yes"))
