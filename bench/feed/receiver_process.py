"""The router's half of the feed in a process of its own: real sockets, ordering and index, and nothing else.

Commands come as JSON lines on stdin; the CPU seconds of the process are therefore those of the ingest alone.
"""

import asyncio
import gc
import time
from collections.abc import Callable
from typing import Any

import uvloop
import zmq.asyncio

from bench.measured_process import serve
from mmrouter_router.core.settings import CurveKeys
from mmrouter_router.fleet.feed_client import FeedClient
from mmrouter_router.fleet.workers import Fleet, Member, Worker
from mmrouter_router.telemetry.metrics import Metrics

SETTLE_SECONDS = 60.0
POLL_SECONDS = 0.02


class Receiver:
    """The commands, and the state between them."""

    def __init__(self) -> None:
        self._metrics = Metrics()
        self._fleet = Fleet(self._metrics)
        self._workers: list[Worker] = []
        self._feeds: list[asyncio.Task[None]] = []

    async def follow(self, ips: list[str], public: str, secret: str, server: str) -> dict[str, Any]:
        """Open a feed per worker; answer when all are synced."""
        keys = CurveKeys(public.encode(), secret.encode(), server.encode())
        context = zmq.asyncio.Context()
        for number, ip in enumerate(ips):
            worker = self._fleet.join(Member(f"uid-{number}", f"worker-{number}", ip, "worker", "worker"))
            self._workers.append(worker)
            feed = FeedClient(worker, self._fleet, keys, context, self._metrics)
            self._feeds.append(asyncio.create_task(feed.run()))
        await _poll(lambda: all(worker.routable for worker in self._workers), "not every worker is routable")
        gc.collect()
        gc.freeze()
        return {}

    async def cpu(self) -> dict[str, Any]:
        """Answer the CPU seconds of this process, all threads."""
        return {"cpu": time.process_time()}

    async def settle(self, seqs: list[int]) -> dict[str, Any]:
        """Wait until worker n has applied delta ``seqs[n]``; answer CPU seconds and the number of indexed keys."""
        pairs = list(zip(self._workers, seqs, strict=True))
        await _poll(lambda: all(worker.sync.seq >= seq for worker, seq in pairs), "not every delta arrived")
        return {"cpu": time.process_time(), "held": [self._fleet.index.held(w.slots[0]) for w in self._workers]}


async def _poll(condition: Callable[[], bool], failure: str) -> None:
    try:
        async with asyncio.timeout(SETTLE_SECONDS):
            while not condition():  # noqa: ASYNC110 - an event per delta would add to what is measured
                await asyncio.sleep(POLL_SECONDS)
    except TimeoutError as error:
        raise RuntimeError(f"{failure} within {SETTLE_SECONDS:g} s") from error


if __name__ == "__main__":
    uvloop.run(serve(Receiver()))
