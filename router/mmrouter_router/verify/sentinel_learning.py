"""Where what is known of sentinels meets the fleet: requests and sightings in, questions of our own out.

What the feed alone cannot teach (several frontends send to the same engines, or two images stood at one place) is
asked once it is worth it: an image that is requested again and still not known is shown to the engine under a text of
our own.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

from mmrouter_lib import feed
from mmrouter_router.core.types import Scope
from mmrouter_router.fleet.feed_client import Feed, FeedSilentError
from mmrouter_router.fleet.workers import Fleet, Worker
from mmrouter_router.request.prepare import Prepared
from mmrouter_router.scheduling.placer import Decision
from mmrouter_router.sentinels import Asked, Line, Sentinels
from mmrouter_router.telemetry.metrics import Metrics
from mmrouter_router.verify.canary import Canary
from mmrouter_router.verify.probe_requests import OwnRequestError, Picture

log = logging.getLogger("mmrouter.learning")

MAX_ASKED = 65_536
"""Images that are not known yet and whose requests are counted."""
MAX_QUESTIONS = 64
MAX_QUESTION_BYTES = 128 << 20
"""Encoded images that wait to be asked about; one that is larger is asked about when nothing else waits."""
WORTH_IT = 2
"""Requests for an image before we ask for it ourselves."""


class _Question(NamedTuple):
    uid: str
    rank: int
    block_size: int
    scope: Scope
    picture: Picture


class Learning:
    """One per router. ``run`` asks the questions, one at a time."""

    def __init__(
        self,
        sentinels: Sentinels,
        fleet: Fleet,
        canary: Canary,
        feeder_of: Callable[[str], Feed | None],
        metrics: Metrics,
    ) -> None:
        self._sentinels, self._fleet, self._canary = sentinels, fleet, canary
        self._feeder_of, self._metrics = feeder_of, metrics
        self._times: OrderedDict[tuple[Scope, bytes], int] = OrderedDict()
        self._questions: asyncio.Queue[_Question] = asyncio.Queue(MAX_QUESTIONS)
        self._waiting_bytes = 0
        self._recalled: dict[str, tuple[int, Scope]] = {}  # pod uid -> epoch and scope whose sightings we have
        fleet.on_change(self._describe)
        fleet.on_sighting(lambda worker, sighting: self._sighted(worker, sighting, live=True))

    def sent(self, decision: Decision, prepared: Prepared) -> None:
        """Note a request that is about to be sent."""
        target = decision.target
        worker, scope = target.worker, target.worker.scope
        if scope is None:
            return
        if len(prepared.spans) != len(prepared.images) or prepared.request.media:
            self._sentinels.unsettle()
        if not prepared.spans:
            return
        asked = Asked(prepared.ids, prepared.spans, target.block_size, prepared.seed)
        self._sentinels.asked(scope, _line(worker, target.rank), asked)
        for image in prepared.images:
            if image.resolved and self._sentinels.values(scope, image.identity, image.media.data) is None:
                picture = Picture(image.identity, image.media.data, image.media.mime, image.tokens)
                self._want(_Question(worker.member.uid, target.rank, target.block_size, scope, picture))

    async def run(self) -> None:
        """Ask, until cancelled."""
        while True:
            question = await self._questions.get()
            self._waiting_bytes -= len(question.picture.data)
            worker, feeder = self._fleet.workers.get(question.uid), self._feeder_of(question.uid)
            if worker is None or feeder is None or not worker.routable or worker.scope != question.scope:
                continue
            if self._sentinels.values(question.scope, question.picture.identity, question.picture.data) is not None:
                continue
            try:
                known = await self._canary.learn(worker, question.rank, feeder, question.block_size, question.picture)
                self._metrics.sentinels.labels("asked" if known else "unanswered").inc()
            except (OwnRequestError, FeedSilentError) as error:
                self._metrics.sentinels.labels("unanswered").inc()
                log.warning("%s: asking about an image failed: %s", worker.member.name, error)

    async def recall(self) -> None:
        """Ask every sidecar that is new to us for the sightings that it remembers."""
        for worker in list(self._fleet):
            scope, feeder = worker.scope, self._feeder_of(worker.member.uid)
            if scope is None or feeder is None or not worker.routable:
                continue
            now = (worker.follower.epoch, scope)
            if self._recalled.get(worker.member.uid) == now:
                continue
            try:
                parts = await feeder.question(feed.ObservationsRequest)
            except FeedSilentError as error:
                log.warning("%s: its sightings are not known: %s", worker.member.name, error)
                continue
            self._recalled[worker.member.uid] = now
            for part in parts:
                if isinstance(part, feed.ObservationsPart):
                    for sighting in part.sightings:
                        self._sighted(worker, sighting, live=False)
        self._recalled = {uid: known for uid, known in self._recalled.items() if uid in self._fleet.workers}

    def _want(self, question: _Question) -> None:
        key = (question.scope, question.picture.identity)
        times = self._times.pop(key, 0) + 1
        size = self._waiting_bytes + len(question.picture.data)
        if times >= WORTH_IT and not self._questions.full() and (size <= MAX_QUESTION_BYTES or not self._waiting_bytes):
            self._questions.put_nowait(question)
            self._waiting_bytes = size
            times = 0  # asked; should it stay unknown, the next requests count anew
        self._times[key] = times
        if len(self._times) > MAX_ASKED:
            self._times.popitem(last=False)

    def _describe(self) -> None:
        for worker in self._fleet:
            if worker.scope is not None and worker.beat is not None:
                self._sentinels.describe(worker.scope, worker.beat.engine_version, worker.beat.facts)

    def _sighted(self, worker: Worker, sighting: feed.ImageObservation, *, live: bool) -> None:
        if worker.scope is not None and sighting.sentinels:
            place = (sighting.parent, sighting.offset)
            line = _line(worker, sighting.rank)
            self._sentinels.sighted(worker.scope, line, place, sighting.sentinels, sighting.length, live=live)


def _line(worker: Worker, rank: int) -> Line:
    return Line(worker.member.uid, worker.follower.epoch, rank)
