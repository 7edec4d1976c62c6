"""Deployments that tests share."""

from collections.abc import Iterator

import pytest
from local.rig import ROOT, Deployment, running


@pytest.fixture(scope="session")
def demo() -> Iterator[Deployment]:
    """Three simulated engines and two frontends, shared by all tests that break nothing."""
    with running(ROOT / "examples" / "demo.yaml") as deployment:
        yield deployment
