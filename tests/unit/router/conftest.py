"""Fixtures of several modules of the router's tests."""

import pytest
import pytest_asyncio
from unit.router.preparing import chat, preparing, settings
from unit.router.router_rig import client_of, router
from unit.router.scripted_engines import Rig


@pytest_asyncio.fixture
async def make_rig():
    """A function that makes deployments with scripted engines, which are closed after the test."""
    rigs = []

    def build(**options) -> Rig:
        rigs.append(Rig(**options))
        return rigs[-1]

    yield build
    for rig in rigs:
        rig.close()


@pytest.fixture
async def r():
    """A running router of the default deployment."""
    async with router() as made:
        yield made


@pytest.fixture
async def client(r):
    async with client_of(r) as client:
        yield client


@pytest.fixture
async def prepare():
    """Prepare a request of content parts and further fields."""
    async with preparing(settings()) as preparer:
        yield lambda *parts, salt=None, **fields: preparer.prepare(chat(*parts, **fields), salt)


@pytest.fixture
def same_request_id(monkeypatch):
    """Refusals of the connection itself have a random request id."""
    monkeypatch.setattr("mmrouter_router.http.connection.answered_name", lambda headers: b"made")
