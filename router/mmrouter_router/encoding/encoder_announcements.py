"""Tells the sidecars of SGLang's engines which encoders there are: those engines ask encoders themselves, through them.

So no engine pod needs a way to the API server, and local processes need none at all: who encodes is known here.
"""

import asyncio
import logging
import time
from collections.abc import Callable

from mmrouter_lib import feed
from mmrouter_lib.engines.sglang.launch import ASKS_ENCODERS
from mmrouter_router.fleet.admission import preferred
from mmrouter_router.fleet.feed_client import Feed, FeedSilentError
from mmrouter_router.fleet.workers import Fleet, Worker

log = logging.getLogger("mmrouter.encoders")

STEP_SECONDS = 0.5
"""How soon a change is told."""
AGAIN_SECONDS = 5.0
"""A sidecar that began anew has forgotten."""

Listed = tuple[tuple[str, str], ...]


class EncoderList:
    """One per router; ``run`` tells."""

    def __init__(
        self,
        router_id: str,
        fleet: Fleet,
        feeder_of: Callable[[str], Feed | None],
        patience: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``patience``: seconds for which an encoder's closed readiness gates count."""
        self._router_id, self._fleet, self._feeder_of = router_id, fleet, feeder_of
        self._patience, self._clock = patience, clock
        self._told: dict[str, tuple[float, Listed]] = {}

    @property
    def listed(self) -> Listed:
        """Name and address of every encoder whose engine is up, that was let in and that does not leave."""
        up = (worker for worker in self._fleet if worker.member.role == "encoder" and worker.serving)
        encoders = preferred(up, self._fleet.now(), self._patience)
        return tuple(sorted((worker.member.name, worker.member.ip) for worker in encoders))

    async def run(self) -> None:
        """Tell, until cancelled."""
        while True:
            await self.tell()
            await asyncio.sleep(STEP_SECONDS)

    async def tell(self) -> None:
        """Tell everybody who does not know yet, or was told a while ago."""
        listed, now = self.listed, self._clock()
        asking = [worker for worker in self._fleet if worker.member.role in ASKS_ENCODERS]
        self._told = {w.member.uid: self._told[w.member.uid] for w in asking if w.member.uid in self._told}
        due = [w for w in asking if not self._knows(w.member.uid, listed, now)]
        await asyncio.gather(*(self._tell(worker, listed, now) for worker in due))

    def _knows(self, uid: str, listed: Listed, now: float) -> bool:
        told = self._told.get(uid)
        return told is not None and told[1] == listed and now - told[0] < AGAIN_SECONDS

    async def _tell(self, worker: Worker, listed: Listed, now: float) -> None:
        feeder = self._feeder_of(worker.member.uid)
        if feeder is None:
            return
        try:
            await feeder.question(lambda number: feed.EncoderAddresses(number, self._router_id, listed))
        except FeedSilentError as error:
            log.debug("%s: it does not know the encoders: %s", worker.member.name, error)
        else:
            self._told[worker.member.uid] = (now, listed)
