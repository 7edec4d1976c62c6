"""Fixtures of several modules of the router's tests."""

import pytest_asyncio
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
