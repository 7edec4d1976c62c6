"""A deployment behind real Envoy (`mmrouter up --gateway envoy`), shared by the tests that break nothing."""

from collections.abc import Iterator

import pytest
from local.rig import ROOT, Deployment, running
from scenarios import chat, web
from waiting import wait_for

from mmrouter_cli.local.envoy import find_envoy
from mmrouter_cli.local.folders import LocalError

__all__ = ["chat", "web"]

START_SECONDS = 180


@pytest.fixture(scope="session")
def envoy() -> str:
    """Envoy's program."""
    try:
        return find_envoy()
    except LocalError as error:
        pytest.skip(f"not run: {error}")


@pytest.fixture(scope="session")
def gateway(envoy: str) -> Iterator[Deployment]:
    with running(ROOT / "examples" / "demo.yaml", "--gateway", "envoy", start_seconds=START_SECONDS) as deployment:
        yield deployment


@pytest.fixture
def settled(gateway: Deployment) -> Deployment:
    wait_for(gateway.settled, 120, "every worker is verified on every frontend")
    return gateway
