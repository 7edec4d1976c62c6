"""A deployment behind real Envoy (`mmrouter up --gateway envoy`), shared by the tests that break nothing."""

from collections.abc import Iterator

import pytest
from artefacts import envoy_program
from local.rig import ROOT, Deployment, running
from scenarios import chat, web
from waiting import wait_for

__all__ = ["chat", "web"]

START_SECONDS = 180


@pytest.fixture(scope="session")
def envoy() -> str:
    """Envoy's program."""
    return envoy_program()


@pytest.fixture(scope="session")
def gateway(envoy: str) -> Iterator[Deployment]:
    with running(ROOT / "examples" / "demo.yaml", "--gateway", "envoy", start_seconds=START_SECONDS) as deployment:
        yield deployment


@pytest.fixture
def settled(gateway: Deployment) -> Deployment:
    wait_for(gateway.settled, 120, "every worker is verified on every frontend")
    return gateway
