"""Announce the encoders to the sidecars of SGLang's engines, which send images to encoders themselves.

The router knows the encoders already, so engine pods need no access to the API server, and local processes need none.
"""

import asyncio
import logging
import time
from collections.abc import Callable

from mmrouter_lib import feed
from mmrouter_lib.engines.sglang.launch import ASKS_ENCODERS
from mmrouter_router.fleet.feed_client import FeedClient, FeedRequestError
from mmrouter_router.fleet.workers import Fleet, Worker, prefer_admitted

log = logging.getLogger("mmrouter.encoders")

STEP_SECONDS = 0.5
"""Interval at which changes are announced."""
REPEAT_SECONDS = 5.0
"""Interval at which an unchanged list is repeated, for sidecars that restarted."""

Listed = tuple[tuple[str, str], ...]


class EncoderAnnouncer:
    """Sends the list of encoders to every engine that needs it."""

    def __init__(
        self,
        router_id: str,
        fleet: Fleet,
        feeder_of: Callable[[str], FeedClient | None],
        admission_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``admission_seconds``: how long closed readiness gates keep an encoder off the list."""
        self._router_id, self._fleet, self._feeder_of = router_id, fleet, feeder_of
        self._admission_seconds, self._clock = admission_seconds, clock
        self._announced: dict[str, tuple[float, Listed]] = {}

    @property
    def listed(self) -> Listed:
        """Name and address of every admitted encoder whose engine is up and not draining."""
        up = (worker for worker in self._fleet if worker.member.role == "encoder" and worker.serving)
        encoders = prefer_admitted(up, self._fleet.now(), self._admission_seconds)
        return tuple(sorted((worker.member.name, worker.member.ip) for worker in encoders))

    async def run(self) -> None:
        """Announce until cancelled."""
        while True:
            await self.announce()
            await asyncio.sleep(STEP_SECONDS)

    async def announce(self) -> None:
        """Send the list to every engine that has another one, or got it :data:`REPEAT_SECONDS` ago."""
        listed, now = self.listed, self._clock()
        engines = {w.member.uid: w for w in self._fleet if w.member.role in ASKS_ENCODERS}
        self._announced = {uid: sent for uid, sent in self._announced.items() if uid in engines}
        due = [worker for uid, worker in engines.items() if not self._up_to_date(uid, listed, now)]
        await asyncio.gather(*(self._announce(worker, listed, now) for worker in due))

    def _up_to_date(self, uid: str, listed: Listed, now: float) -> bool:
        sent = self._announced.get(uid)
        return sent is not None and sent[1] == listed and now - sent[0] < REPEAT_SECONDS

    async def _announce(self, worker: Worker, listed: Listed, now: float) -> None:
        feeder = self._feeder_of(worker.member.uid)
        if feeder is None:
            return
        try:
            await feeder.request(lambda number: feed.EncoderAddresses(number, self._router_id, listed))
        except FeedRequestError as error:
            log.debug("%s: announcing the encoders failed: %s", worker.member.name, error)
        else:
            self._announced[worker.member.uid] = (now, listed)
