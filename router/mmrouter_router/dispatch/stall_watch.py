"""Closes connections to engines that hang, so that their requests and streams move to other engines.

A stopped process, or one on a lost node, closes no connection. During a slow prefill or long reasoning an engine sends
no bytes either, so three conditions must hold: no byte for :data:`SILENT_SECONDS`, an engine that the fleet reports as
gone (its sidecar reports it, or sends nothing itself), and no answer to the router's own health check.
"""

import asyncio
from typing import Final

from mmrouter_router.fleet.workers import Fleet, Worker
from mmrouter_router.http.engine_connection import Address, UpstreamError
from mmrouter_router.http.upstream import Upstream

PERIOD: Final = 1.0  # seconds between checks, which cost nothing while no engine is gone
SILENT_SECONDS: Final = 5
PROBE_SECONDS: Final = 2.0
SILENT_FEED_SECONDS: Final = 2.0  # four heartbeats


class StallWatch:
    """Checks the connections of all requests in progress."""

    def __init__(self, fleet: Fleet, upstream: Upstream, health_path: str) -> None:
        self._fleet, self._upstream, self._path = fleet, upstream, health_path

    async def run(self) -> None:
        while True:
            await asyncio.sleep(PERIOD)
            await self.check()

    async def check(self) -> None:
        """Count one period of silence per connection, and close those above the limit."""
        up = {worker.member.ip for worker in self._fleet if not self._is_gone(worker)}
        gone = [address for address in self._upstream.active() if address[0] not in up]
        silent = [address for address in gone if self._upstream.count_silence(address) >= SILENT_SECONDS / PERIOD]
        answers = await asyncio.gather(*map(self._answers, silent))
        for address, alive in zip(silent, answers, strict=True):
            if not alive:
                self._upstream.end_silent(address, SILENT_SECONDS / PERIOD)

    def _is_gone(self, worker: Worker) -> bool:
        beat = worker.heartbeat
        if beat is None or beat.engine_state != "up":
            return True
        return self._fleet.now() - worker.heartbeat_at > SILENT_FEED_SECONDS

    async def _answers(self, address: Address) -> bool:
        try:
            async with asyncio.timeout(PROBE_SECONDS):
                await self._upstream.ask(address, "GET", self._path, {}, limit=1024)
        except (UpstreamError, TimeoutError):
            return False
        return True
