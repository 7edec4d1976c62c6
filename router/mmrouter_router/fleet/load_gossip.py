"""What this router has under way at each engine, told to the other routers, and what they have, counted beside it.

Every router knows its own requests exactly and would take an engine that another one has just filled for an idle one.
So each change is told to the engine's sidecar, all changes of a few milliseconds at once, and the sidecar publishes it
to all routers (docs/feed.md). A router without peers tells nobody.
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from mmrouter_lib import feed
from mmrouter_router.fleet.rank_load import Theirs
from mmrouter_router.fleet.workers import Fleet, Worker

TELL_SECONDS = 0.01
"""Changes of so long are told together."""
AGAIN_SECONDS = 1.0
"""What did not change is told again: a router or a sidecar that began anew knows nothing of it."""
FORGET_SECONDS = 3.0
"""A router that has said nothing for so long is gone, and its requests with it."""


class Teller(Protocol):
    """A worker's feed, as far as it is needed here."""

    async def tell(self, work: feed.Work) -> None:
        """Hand it to the sidecar; what cannot be sent now is dropped."""
        ...


class Sharing:
    """One per router; ``run`` tells."""

    def __init__(
        self,
        router_id: str,
        fleet: Fleet,
        feeder_of: Callable[[str], Teller | None],
        peers: Callable[[], bool],
        told: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``peers``: whether there are other routers. ``told`` is called for every frame that is sent."""
        self._router_id, self._fleet, self._feeder_of = router_id, fleet, feeder_of
        self._peers, self._told, self._clock = peers, told, clock
        self._changed: set[tuple[str, int]] = set()
        self._news = asyncio.Event()

    def changed(self, worker: Worker, rank: int) -> None:
        """Note that this router's requests on a rank are not what they were."""
        if not self._peers():  # who joins later is told of what there is by then
            return
        self._changed.add((worker.member.uid, rank))
        self._news.set()

    def heard(self, worker: Worker, work: feed.Work) -> None:
        """Count what another router has there; our own word comes back, too."""
        if work.router == self._router_id or work.rank not in range(worker.ranks):
            return
        usage = self._fleet.usage(worker, work.rank)
        if work.requests > 0:
            usage.theirs[work.router] = Theirs(work.requests, work.prefill, work.active, self._clock())
        else:
            usage.theirs.pop(work.router, None)
        usage.add_up()

    async def run(self) -> None:
        """Tell, until cancelled."""
        due = self._clock()
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(due - self._clock()):
                    await self._news.wait()
                    await asyncio.sleep(TELL_SECONDS)
            if self._clock() >= due:
                due = self._clock() + AGAIN_SECONDS
                self.forget()
                self._changed.update(
                    (worker.member.uid, rank)
                    for worker in self._fleet
                    for rank, usage in worker.usage.items()
                    if usage.requests
                )
            await self.tell()

    async def tell(self) -> None:
        """Tell everything that changed since the last time."""
        self._news.clear()
        changed, self._changed = self._changed, set()
        if not self._peers():
            return
        for uid, rank in changed:
            worker, feeder = self._fleet.workers.get(uid), self._feeder_of(uid)
            if worker is not None and feeder is not None and (usage := worker.usage.get(rank)) is not None:
                work = feed.Work(self._router_id, rank, usage.requests, usage.prefill, usage.active)
                await feeder.tell(work)
                self._told()

    def forget(self) -> None:
        """Drop what routers had that are silent."""
        since = self._clock() - FORGET_SECONDS
        for worker in self._fleet:
            for usage in worker.usage.values():
                gone = [router for router, theirs in usage.theirs.items() if theirs.at < since]
                for router in gone:
                    del usage.theirs[router]
                if gone:
                    usage.add_up()
