"""The router's half of the feed as a process of its own: real sockets, order and index, and nothing else.

Told what to do by JSON lines on stdin, so that its CPU seconds are those of the ingest alone.
"""

import asyncio
import gc
import json
import sys
import time
from typing import Any

import uvloop
import zmq.asyncio

from mmrouter_router.core.settings import CurveKeys
from mmrouter_router.fleet.feed_client import Feed
from mmrouter_router.fleet.workers import Fleet, Member, Worker
from mmrouter_router.telemetry.metrics import Metrics

SETTLE_SECONDS = 60.0
POLL_SECONDS = 0.02


class Receiver:
    """State between commands."""

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
            feeder = Feed(worker, self._fleet, keys, context, self._metrics)
            self._feeds.append(asyncio.create_task(feeder.run()))
        await self._until(lambda: all(worker.routable for worker in self._workers), "not every worker is routable")
        gc.collect()
        gc.freeze()
        return {}

    async def cpu(self) -> dict[str, Any]:
        """CPU seconds of this process, all threads."""
        return {"cpu": time.process_time()}

    async def settle(self, seqs: list[int]) -> dict[str, Any]:
        """Wait until worker n has applied delta ``seqs[n]``; answer CPU seconds and the keys that the index holds."""

        def here() -> bool:
            return all(worker.follower.seq >= seq for worker, seq in zip(self._workers, seqs, strict=True))

        await self._until(here, "not every delta came")
        held = [self._fleet.index.held(worker.slots[0]) for worker in self._workers]
        return {"cpu": time.process_time(), "held": held}

    async def _until(self, condition: Any, words: str) -> None:
        try:
            async with asyncio.timeout(SETTLE_SECONDS):
                while not condition():  # noqa: ASYNC110 - an event per delta would be part of what is measured
                    await asyncio.sleep(POLL_SECONDS)
        except TimeoutError as error:
            raise RuntimeError(f"{words} within {SETTLE_SECONDS:g} s") from error


async def main() -> None:
    """Serve commands until stdin ends."""
    receiver = Receiver()
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        command = json.loads(line)
        try:
            answer = await getattr(receiver, command.pop("do"))(**command)
        except Exception as error:  # everything is the driver's to report
            answer = {"error": f"{type(error).__name__}: {error}"}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    uvloop.run(main())
