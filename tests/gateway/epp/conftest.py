"""The picker under test: ours in this process, or the one whose address ``MMROUTER_EPP`` names."""

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import pytest
from gateway.epp.driver import Driver
from unit.router.rig import cancelled, deployment, heartbeat, loopback
from unit.router.router_rig import heard, member, router
from waiting import until

from mmrouter_router.app import Router
from mmrouter_router.fleet.membership import Membership
from mmrouter_router.http.certificate import KeyAndChain
from mmrouter_router.http.server import Shutdown
from mmrouter_router.intake import PARSERS
from mmrouter_router.picker.engine_choice import EngineChoice
from mmrouter_router.picker.exchange import Stream
from mmrouter_router.picker.server import PICKER_PORT, Picker

SECONDS = 120.0  # of a probe, for a busy machine
ENGINES = ("127.84.0.2", "127.84.0.3", "127.84.0.4")


@dataclass
class UnderTest:
    """``own``: the router behind our picker, ``None`` for another one. ``model``: a name that it serves. ``ranks``: of
    each engine behind our picker.
    """

    driver: Driver
    endpoints: tuple[str, ...]
    model: str
    own: Router | None = None
    ranks: int = 1

    def chat(self, text: str = "x", **fields: Any) -> bytes:
        """The body of a chat."""
        return json.dumps({"model": self.model, "messages": [{"role": "user", "content": text}], **fields}).encode()

    @property
    def router(self) -> Router:
        if self.own is None:
            pytest.skip("not run: needs the inside of our own picker")
        return self.own

    async def settled(self) -> None:
        """Wait until nothing of an earlier request is booked."""
        if self.own is not None:
            own = self.own
            await until(lambda: not own.metrics.in_flight and not any(u.requests for w in own.fleet for u in _usage(w)))


def _usage(worker: Any) -> list[Any]:
    return list(worker.usage.values())


@pytest.fixture
async def epp() -> AsyncIterator[UnderTest]:
    if (address := os.environ.get("MMROUTER_EPP")) is not None:
        endpoints = tuple(os.environ["MMROUTER_EPP_ENDPOINTS"].split(","))
        driver = Driver(address)
        yield UnderTest(driver, endpoints, os.environ.get("MMROUTER_EPP_MODEL", "m"))
        await driver.close()
        return
    async with router(own=deployment()) as own:
        own.apply_membership(Membership(tuple(member(f"w{n}", ip) for n, ip in enumerate(ENGINES))))
        for worker in own.fleet:
            heard(own, worker.member.uid)

        async def beat() -> None:
            while True:
                await asyncio.sleep(0.2)
                for worker in own.fleet:
                    heartbeat(own.fleet, worker, ranks=made.ranks)

        ip = loopback()
        choice = EngineChoice(own.client_app(), PARSERS.keys(), own.chat.answer, test_selection=True)
        picker = Picker(choice, own.shutdown, lambda: own.ready, host=ip)
        driver = Driver(f"{ip}:{PICKER_PORT}")
        made = UnderTest(driver, tuple(f"{engine}:8000" for engine in ENGINES), "t", own)
        tasks = [asyncio.create_task(picker.serve(30.0)), asyncio.create_task(beat())]
        try:
            yield made
        finally:
            await driver.close()
            own.shutdown.stop("the test has ended")
            await tasks[0]
            await cancelled(tasks[1])


async def listening(ip: str) -> None:
    async with asyncio.timeout(SECONDS):
        while True:
            with contextlib.suppress(ConnectionRefusedError):
                _, writer = await asyncio.open_connection(ip, PICKER_PORT)
                writer.close()
                return
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def serving(certificate: Callable[[], KeyAndChain] | None, *, ready: bool = True) -> AsyncIterator[str]:
    """Yield the address of a picker."""

    async def unused(stream: Stream, first: Any) -> None:
        raise AssertionError("no request is sent")

    shutdown, ip = Shutdown(), loopback()
    task = asyncio.create_task(Picker(unused, shutdown, lambda: ready, host=ip, certificate=certificate).serve(1.0))
    try:
        await listening(ip)
        yield ip
    finally:
        shutdown.stop("the test has ended")
        await task
