"""The deployment that tests share, which a module may replace by its own, and what tests send to it."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from local.rig import ROOT, Deployment, running
from scenarios import chat, web
from waiting import wait_for

__all__ = ["chat", "web"]


@pytest.fixture(scope="session")
def demo() -> Iterator[Deployment]:
    """Three simulated engines and two frontends, shared by all tests that break nothing."""
    with running(ROOT / "examples" / "demo.yaml") as deployment:
        yield deployment


@pytest.fixture(scope="session")
def breakable() -> Iterator[Deployment]:
    """The same, shared by tests that break it and wait until it is whole again."""
    with running(ROOT / "examples" / "demo.yaml") as deployment:
        yield deployment


@pytest.fixture
def settled(demo: Deployment) -> Deployment:
    wait_for(demo.settled, 60, "every worker is verified on every frontend")
    return demo


@pytest.fixture
def model(demo: Deployment, tmp_path: Path) -> Path:
    """A copy of the routers' model folder, to be changed."""
    folder = next(iter(demo.processes("router").values())).environ()["MMROUTER_MODEL_DIR"]
    return Path(shutil.copytree(folder, tmp_path / "model"))


@pytest.fixture
def other_template(model: Path) -> Path:
    template = model / "chat_template.jinja"
    template.write_text("Hello! " + template.read_text())
    return model
