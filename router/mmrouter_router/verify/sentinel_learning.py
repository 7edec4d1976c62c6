"""Learn images' sentinels from requests and sightings of the fleet, and from probe requests where those are ambiguous.

The feed alone cannot teach an image when several frontends send to one engine, or two images were at one place. Such an
image is sent in a probe request once it is requested again.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

from mmrouter_lib import feed
from mmrouter_router.fleet.feed_client import FeedClient, FeedRequestError
from mmrouter_router.fleet.workers import Fleet, Target, Worker
from mmrouter_router.request.prepared import Prepared
from mmrouter_router.scheduling.placer import Decision
from mmrouter_router.sentinels.align import SentRequest
from mmrouter_router.sentinels.evidence import RankEpoch, SentinelStore
from mmrouter_router.sentinels.table import Scope
from mmrouter_router.telemetry.metrics import Metrics
from mmrouter_router.verify.canary import Canary
from mmrouter_router.verify.probe_requests import ProbeImage, ProbeRequestError

log = logging.getLogger("mmrouter.learning")

MAX_COUNTED = 65_536  # unknown images whose requests are counted
MAX_PROBES = 64
MAX_PROBE_BYTES = 128 << 20  # bound of the encoded images that wait for a probe; a larger image is queued only alone
ENOUGH_REQUESTS = 2  # requests for an image before it is probed


class _Probe(NamedTuple):
    uid: str
    rank: int
    block_size: int
    scope: Scope
    image: ProbeImage


class SentinelLearning:
    """Feeds the sentinel store; ``run`` sends the probes, one at a time."""

    def __init__(
        self,
        sentinels: SentinelStore,
        fleet: Fleet,
        canary: Canary,
        feeder_of: Callable[[str], FeedClient | None],
        metrics: Metrics,
    ) -> None:
        self._sentinels, self._fleet, self._canary = sentinels, fleet, canary
        self._feeder_of, self._metrics = feeder_of, metrics
        self._times: OrderedDict[tuple[Scope, bytes], int] = OrderedDict()
        self.probes: asyncio.Queue[_Probe] = asyncio.Queue(MAX_PROBES)
        self._waiting_bytes = 0
        self._recalled: dict[str, tuple[int, Scope]] = {}  # pod uid -> epoch and scope of recalled sightings
        fleet.change_listeners.append(self._describe)
        fleet.sighting_listeners.append(lambda worker, sighting: self._sighted(worker, sighting, live=True))

    def on_send(self, decision: Decision, prepared: Prepared) -> None:
        target = decision.target
        worker, scope = target.worker, target.worker.scope
        if scope is None or worker.is_older(prepared.first_release):
            return
        unpredicted = any(part.kind != "image" or part.place is None for part in prepared.request.media)
        if len(prepared.spans) != len(prepared.images) or unpredicted:
            self._sentinels.suspend_alignment()
        if not prepared.spans:
            return
        request = SentRequest(prepared.ids, prepared.spans, target.block_size, prepared.seed)
        self._sentinels.on_request(scope, _source(worker, target.rank), request)
        for image in prepared.images:
            if image.resolved and self._sentinels.values(scope, image.name, image.media.data) is None:
                shape = image.tokens, (image.width, image.height), image.padding
                shown = ProbeImage(image.name, image.media.data, image.media.mime, *shape)
                self._count(_Probe(worker.member.uid, target.rank, target.block_size, scope, shown))

    async def run(self) -> None:
        while True:
            probe = await self.probes.get()
            self._waiting_bytes -= len(probe.image.data)
            worker, feeder = self._fleet.workers.get(probe.uid), self._feeder_of(probe.uid)
            if worker is None or feeder is None or not worker.routable or worker.scope != probe.scope:
                continue
            if self._sentinels.values(probe.scope, probe.image.identity, probe.image.data) is not None:
                continue
            try:
                learned = await self._canary.learn(Target(worker, probe.rank, probe.block_size), feeder, probe.image)
                self._metrics.sentinels.labels("asked" if learned else "unanswered").inc()
            except (ProbeRequestError, FeedRequestError) as error:
                self._metrics.sentinels.labels("unanswered").inc()
                log.warning("%s: probing an image failed: %s", worker.member.name, error)

    async def recall(self) -> None:
        """Request the remembered sightings of every new sidecar."""
        for worker in list(self._fleet):
            scope, feeder = worker.scope, self._feeder_of(worker.member.uid)
            if scope is None or feeder is None or not worker.routable:
                continue
            now = (worker.sync.epoch, scope)
            if self._recalled.get(worker.member.uid) == now:
                continue
            try:
                parts = await feeder.request(feed.ObservationsRequest)
            except FeedRequestError as error:
                log.warning("%s: recalling sightings failed: %s", worker.member.name, error)
                continue
            self._recalled[worker.member.uid] = now
            for part in parts:
                if isinstance(part, feed.ObservationsPart):
                    for sighting in part.sightings:
                        self._sighted(worker, sighting, live=False)
        self._recalled = {uid: state for uid, state in self._recalled.items() if uid in self._fleet.workers}

    def _count(self, probe: _Probe) -> None:
        key = (probe.scope, probe.image.identity)
        times = self._times.pop(key, 0) + 1
        size = self._waiting_bytes + len(probe.image.data)
        if times >= ENOUGH_REQUESTS and not self.probes.full() and (size <= MAX_PROBE_BYTES or not self._waiting_bytes):
            self.probes.put_nowait(probe)
            self._waiting_bytes = size
            times = 0  # the count restarts, in case the probe fails
        self._times[key] = times
        if len(self._times) > MAX_COUNTED:
            self._times.popitem(last=False)

    def _describe(self) -> None:
        for worker in self._fleet:
            if worker.scope is not None and worker.heartbeat is not None:
                self._sentinels.describe(worker.scope, worker.heartbeat.engine_version, worker.heartbeat.facts)

    def _sighted(self, worker: Worker, sighting: feed.ImageObservation, *, live: bool) -> None:
        if worker.scope is not None and sighting.sentinels:
            place, source = (sighting.parent, sighting.offset), _source(worker, sighting.rank)
            self._sentinels.on_sighting(worker.scope, source, place, sighting.sentinels, sighting.length, live=live)


def _source(worker: Worker, rank: int) -> RankEpoch:
    return RankEpoch(worker.member.uid, worker.sync.epoch, rank)
