"""Build what tests need with the tools of ``hack/``, and skip or fail a test by the tool's exit status."""

import os
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

import pytest

from hack.build_once import CANNOT, LAST_LINES
from mmrouter_cli.local.envoy import find_envoy
from mmrouter_cli.local.folders import LocalError

ROOT = Path(__file__).resolve().parents[1]
Record = Callable[[str, Any], None]
"""The fixture ``record`` (``conftest.py``)."""
NEEDS = "needs"
"""Property of a test in the JUnit report: it needs what its level is about (a cluster, a real engine)."""


class NotMadeError(Exception):
    """A tool failed. ``status``: its exit status; the text: the last lines of its captured output."""

    def __init__(self, tool: str, status: int, output: str) -> None:
        super().__init__("\n".join(output.strip().splitlines()[-LAST_LINES:]) or f"{tool}: exit status {status}")
        self.status = status


def run_tool(tool: str, *arguments: str, live: bool = False, **env: str) -> str:
    """Run a tool of ``hack/``, ``engines.vllm_env``, and return what it printed. Raises :class:`NotMadeError`.

    ``live``: its messages are shown as they come, and are not part of the error.
    """
    command = [sys.executable, "-m", f"hack.{tool}", *arguments]
    stderr = None if live else subprocess.PIPE
    done = subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=stderr, text=True, env={**os.environ, **env}
    )
    if done.returncode != 0:
        raise NotMadeError(tool, done.returncode, done.stderr or "")
    return done.stdout.strip()


def run_tool_or_skip(tool: str, *arguments: str, **env: str) -> str:
    """Run a tool for a test: skip the test where the machine lacks something, fail it where the tool fails."""
    try:
        return run_tool(tool, *arguments, **env)
    except NotMadeError as error:
        if error.status == CANNOT:
            pytest.skip(f"not run: {str(error).splitlines()[-1]}")
        pytest.fail(f"{tool} failed:\n{error}", pytrace=False)


def go_programs(name: str) -> Path:
    """Return the folder of a set of Go programs (``hack/cluster/go_programs.py``); skips the test without it."""
    return Path(run_tool_or_skip("cluster.go_programs", name))


def envoy_program() -> str:
    """Return Envoy's program; skips the test without it."""
    try:
        return find_envoy()
    except LocalError as error:
        pytest.skip(f"not run: {error}")


def status_of(prepare: Callable[[], None]) -> int:
    """Return the exit status of a script that prepares tests: 1 when a build was tried and failed.

    What this machine cannot build is no failure here: the tests skip with the reason.
    """
    try:
        prepare()
    except NotMadeError as error:
        return 0 if error.status == CANNOT else 1
    return 0


def build_images(folder: Path, run: Callable[..., str]) -> list[Path]:
    """Build the project's images from this checkout into a folder and return their archives.

    ``run``: :func:`run_tool` or :func:`run_tool_or_skip`.
    """
    base = os.environ.get("MMROUTER_BASE_IMAGE") or str(Path(run("images.base_image"), "base.tar"))
    storage = Path(run("images.base_image", "--where")).parent / "storage"
    options = (f"--export={folder}", f"--storage={storage}")
    lines = run("images.build_images", *options, MMROUTER_BASE_IMAGE=base).splitlines()
    return [Path(line.split()[1]) for line in lines]


def shared_images() -> Path | None:
    """Return where a run keeps the images' archives for all its processes; ``None``: each pytest builds its own."""
    folder = os.environ.get("MMROUTER_RUN_FOLDER")
    return Path(folder, "images") if folder else None


def name_needs(items: Iterable[pytest.Item], fixtures: Collection[str]) -> None:
    """Mark each test that uses one of the fixtures as one that needs what its level is about."""
    for item in items:
        if not set(fixtures).isdisjoint(getattr(item, "fixturenames", ())):
            item.user_properties.append((NEEDS, "yes"))
