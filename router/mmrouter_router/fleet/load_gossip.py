"""Exchange of in-flight load between the routers of a deployment, through the engines' sidecars (docs/feed.md).

Without it a router would take an engine that another has just filled for idle. A router without peers sends nothing.
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress

from mmrouter_lib import feed
from mmrouter_router.fleet.feed_client import FeedClient
from mmrouter_router.fleet.rank_load import PeerUsage
from mmrouter_router.fleet.workers import Fleet, Worker

BATCH_SECONDS = 0.01  # changes within this time are sent together
REPEAT_SECONDS = 1.0  # interval at which unchanged load is repeated, for routers and sidecars that restarted
EXPIRY_SECONDS = 3.0  # after this time without a frame a router's load is dropped


class LoadGossip:
    """Publishes this router's load and applies that of its peers."""

    def __init__(
        self,
        router_id: str,
        fleet: Fleet,
        feeder_of: Callable[[str], FeedClient | None],
        has_peers: Callable[[], bool],
        on_sent: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``feeder_of``: pod uid -> its feed client. ``on_sent`` is called for every frame that is sent."""
        self._router_id, self._fleet, self._feeder_of = router_id, fleet, feeder_of
        self._has_peers, self._on_sent, self._clock = has_peers, on_sent, clock
        self._changed: set[tuple[str, int]] = set()
        self.wake = asyncio.Event()

    def changed(self, worker: Worker, rank: int) -> None:
        if not self._has_peers():  # a router that joins later gets the next repetition
            return
        self._changed.add((worker.member.uid, rank))
        self.wake.set()

    def on_work(self, worker: Worker, work: feed.Work) -> None:
        """Apply a router's load on a rank; frames of this router itself are ignored."""
        if work.router == self._router_id or work.rank not in range(worker.ranks):
            return
        usage = self._fleet.usage(worker, work.rank)
        if work.requests > 0:
            usage.peers[work.router] = PeerUsage(work.requests, work.prefill, work.active, self._clock())
        else:
            usage.peers.pop(work.router, None)
        usage.sum_peers()

    async def run(self) -> None:
        due = self._clock()
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(due - self._clock()):
                    await self.wake.wait()
                    await asyncio.sleep(BATCH_SECONDS)
            if self._clock() >= due:
                due = self._clock() + REPEAT_SECONDS
                self.expire()
                for worker in self._fleet:
                    busy = [rank for rank, usage in worker.usage.items() if usage.requests]
                    self._changed.update((worker.member.uid, rank) for rank in busy)
            await self.publish()

    async def publish(self) -> None:
        self.wake.clear()
        changed, self._changed = self._changed, set()
        if not self._has_peers():
            return
        for uid, rank in changed:
            worker, feeder = self._fleet.workers.get(uid), self._feeder_of(uid)
            if worker is not None and feeder is not None and (usage := worker.usage.get(rank)) is not None:
                work = feed.Work(self._router_id, rank, usage.requests, usage.prefill, usage.active)
                await feeder.send_work(work)
                self._on_sent()

    def expire(self) -> None:
        since = self._clock() - EXPIRY_SECONDS
        for worker in self._fleet:
            for usage in worker.usage.values():
                if any(peer.at < since for peer in usage.peers.values()):
                    usage.peers = {router: peer for router, peer in usage.peers.items() if peer.at >= since}
                    usage.sum_peers()
