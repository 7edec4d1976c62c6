"""Hand-overs from this router: what is tried for each image, in which order, and what is done when it does not work."""

import itertools
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from mmrouter_handover.shm import HandOverError, PlainFile
from mmrouter_lib.api import MMRouterDeployment
from mmrouter_lib.engines.vllm.handover import is_cache_miss
from mmrouter_lib.engines.vllm.media_files import file_url, is_file_refused
from mmrouter_router.fleet.workers import Fleet, Member, Worker
from mmrouter_router.handover.cost import FIRST, Costs
from mmrouter_router.handover.delivery import Parcel, Post, T
from mmrouter_router.handover.eligibility import End, why_no_file, why_not_processed
from mmrouter_router.handover.files import Folder
from mmrouter_router.handover.plugin_registry import Plugins, Server
from mmrouter_router.handover.processed_images import Processing
from mmrouter_router.handover.selection import plan
from mmrouter_router.handover.types import Fall, Load, Plan, Reach, Travelled, Way
from mmrouter_router.handover.way_backoff import Resting
from mmrouter_router.http.upstream import Body, Upstream
from mmrouter_router.request.engine_request import OutgoingImage, Place
from mmrouter_router.telemetry.metrics import Metrics

RESTING: Final = "resting"
"""A way that failed several times in a row is not tried for a while."""
REFUSED, MISSED, TOGETHER = "refused", "missed", "together"
"""An engine could not read a file, did not hold a processed image, or was sent another image anew and so this one."""


@dataclass(slots=True)
class _Leg:
    """One parcel on its way to one engine. Images by identity, each once."""

    engine: str
    """Its id: another one after a restart."""
    costs: Costs
    images: Mapping[str, OutgoingImage]
    travelled: Mapping[str, Travelled]
    files: dict[str, PlainFile] = field(default_factory=dict)
    weighed: bool = False
    """A renderer could do it, so both ways are measured."""

    @property
    def handed(self) -> bool:
        """Whether any image travels outside of the body."""
        return any(one.how != "bytes" for one in self.travelled.values())


class HandOver:
    """Hands images over to the engines of one deployment: the delivery of its requests."""

    def __init__(
        self,
        deployment: MMRouterDeployment,
        fleet: Fleet,
        upstream: Upstream,
        engine_key: str,
        metrics: Metrics,
        renderers: Callable[[], Sequence[Member]],
        *,
        node: str,
        folder: Folder | None = None,
        always: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``renderers``: those that can be asked now. ``node``: this pod's. ``folder``: this pod's in the shared one.
        ``always``: whatever is possible is done, whatever it costs.
        """
        spec = deployment.spec
        self._mode = spec.routing.transfer
        self._shares = {pool.name: pool.shared_memory.scope == "node" for pool in spec.pools}
        first = {**FIRST, **(folder.measured() if folder is not None else {})}
        self._costs = {pool.name: Costs(first, always=always) for pool in spec.pools}
        self._renders = any(pool.role == "renderer" for pool in spec.pools)
        self._fleet, self._metrics, self._renderers = fleet, metrics, renderers
        self._here, self._folder, self._clock = End(node, shares=folder is not None), folder, clock
        self._turn = itertools.count()
        self._resting = Resting(clock)
        self._processing = Processing(upstream, engine_key)
        self.plugins = Plugins(upstream, engine_key, self._servers, clock)
        fleet.on_change(self._forget)

    async def run(self) -> None:
        """Follow the plugins of engines and renderers, where there is anything to process; ends by cancellation."""
        if self._renders:
            await self.plugins.run()

    def close(self) -> None:
        """Give the folder back."""
        if self._folder is not None:
            self._folder.close()

    async def send(self, parcel: Parcel, post: Post[T], told: list[dict[str, Any]]) -> T:
        """Send a request to an engine and return its answer, whose first byte is there; then nothing is kept for it.

        Raises what ``post`` raises.
        """
        images = {image.uuid: image for image in parcel.outgoing.images}
        if not images:
            return await post(parcel.plain)
        worker = parcel.worker.member
        travelled = {name: Travelled(name, worker.name, len(image.media.data)) for name, image in images.items()}
        leg = _Leg(parcel.worker.id, self._costs[worker.pool], images, travelled)
        began = self._clock()
        try:
            answer = await post(await self._packed(leg, parcel))
            status = answer.status
            why = _refusal(status, await answer.said()) if leg.handed and status >= 400 else None
            if why is not None:
                answer.drop()
                blamed = _returned(leg, why)
                answer = await post(parcel.plain)
                if answer.status < 400:
                    for way in blamed:
                        self._resting.failed(leg.engine, way)
            elif status < 400:
                self._arrived(leg, self._clock() - began)
            self._count_arrivals(travelled.values())
            return answer
        finally:
            for file in leg.files.values():
                file.release()
            told += [one.as_json() for one in travelled.values()]
            self._count_falls(fall for one in travelled.values() for fall in one.falls)

    # -- before it is sent -------------------------------------------------------------------------------------------

    async def _packed(self, leg: _Leg, parcel: Parcel) -> Body:
        """Put every image where the engine finds it, and return the body that says where."""
        loads = [Load(name, len(image.media.data), image.tokens) for name, image in leg.images.items()]
        renderer = self._renderer(parcel.worker.member.node) if self._renders else None
        reach = self._reach(parcel.worker, renderer)
        found = plan(loads, reach, leg.costs)
        for name, falls in found.falls.items():
            leg.travelled[name].falls += falls
        leg.weighed = not all(reach.processed.values())
        if found.processed and renderer is not None:
            await self._process(leg, parcel, renderer, found)
        await self._write(leg, [name for name in found.files if leg.travelled[name].how == "bytes"])
        shown: dict[Place, str | None] = {}
        for image in parcel.outgoing.images:
            one = leg.travelled[image.uuid]
            if one.how == "bytes" and image.uuid in found.files and image.uuid in leg.files:
                one.how = "file"
            if one.how != "bytes":
                shown[image.place] = file_url(leg.files[image.uuid].path) if one.how == "file" else None
        began = self._clock()
        body = parcel.outgoing.pieces(parcel.fields, shown)
        if left := [one for one in leg.travelled.values() if one.how == "bytes"]:
            seconds, size = self._clock() - began, sum(one.size for one in left)
            leg.costs.observe("bytes", size, seconds)
            for one in left:
                one.seconds = seconds * one.size / max(size, 1)
        return body

    async def _process(self, leg: _Leg, parcel: Parcel, renderer: Member, found: Plan) -> None:
        """Have a renderer process the images, and the engine take them."""
        began = self._clock()
        request = parcel.outgoing
        if not why_no_file(self._here, self._end(renderer, renderer.uid)):
            await self._write(leg, [n for n, one in leg.travelled.items() if not leg.costs.why_no_file(one.size)])
        shown = {i.place: file_url(leg.files[i.uuid].path) for i in request.images if i.uuid in leg.files}
        chat = request.with_images(request.fields, shown)
        outcome = await self._processing.hand_over(
            renderer.ip, parcel.worker.member.ip, chat, found.processed, list(leg.images)
        )
        seconds = self._clock() - began
        self._count_falls(outcome.others)
        blamed = renderer.uid if outcome.blamed == "renderer" else leg.engine
        for name, falls in outcome.falls.items():
            leg.travelled[name].falls += falls
        for way in {fall.how for falls in outcome.falls.values() for fall in falls}:
            self._resting.failed(blamed, way)
        for name, way in outcome.held.items():
            leg.travelled[name].how, leg.travelled[name].seconds = way, seconds

    async def _write(self, leg: _Leg, names: Collection[str]) -> None:
        """Write images into files that have none yet."""
        for name in names:
            if name in leg.files or self._folder is None:
                continue
            one = leg.travelled[name]
            began = self._clock()
            try:
                leg.files[name] = await self._folder.put(name, leg.images[name].media)
            except HandOverError as error:
                one.falls.append(Fall("file", error.reason))
                continue
            one.seconds = self._clock() - began
            leg.costs.observe("file", one.size, one.seconds)

    # -- after it was sent -------------------------------------------------------------------------------------------

    def _arrived(self, leg: _Leg, seconds: float) -> None:
        """Learn from an answer that came."""
        ways = {one.how for one in leg.travelled.values()}
        for way in ways - {"bytes"}:
            self._resting.worked(leg.engine, way)
        processed = ways.isdisjoint({"bytes", "file"})
        if leg.weighed and (processed or ways <= {"bytes", "file"}):
            tokens = sum(image.tokens for image in leg.images.values())
            leg.costs.observe_answer(tokens, seconds, processed=processed)

    def _count_arrivals(self, travelled: Iterable[Travelled]) -> None:
        for one in travelled:
            self._metrics.handovers.labels(one.how, "").inc()
            self._metrics.handover_bytes.labels(one.how).inc(one.size)
            self._metrics.handover_seconds.labels(one.how).observe(one.seconds)

    def _count_falls(self, falls: Iterable[Fall]) -> None:
        for fall in falls:
            self._metrics.handovers.labels(fall.how, fall.reason).inc()

    # -- what leads where --------------------------------------------------------------------------------------------

    def _reach(self, worker: Worker, renderer: Member | None) -> Reach:
        shared = worker.beat.shared if worker.beat is not None else None
        engine = replace(self._end(worker.member, worker.id), above=shared is not None and shared.above)
        file = why_no_file(self._here, engine) or (RESTING if self._resting.rests(worker.id, "file") else "")
        if not self._renders:
            return Reach(file)
        other = self._end(renderer, renderer.uid) if renderer is not None else None
        servers = [worker.id, *([renderer.uid] if renderer is not None else [])]
        return Reach(
            file,
            {
                way: why or (RESTING if any(self._resting.rests(server, way) for server in servers) else "")
                for way, why in why_not_processed(self._mode, other, engine).items()
            },
        )

    def _end(self, member: Member, server: str) -> End:
        return End(member.node, self._shares.get(member.pool, False), self.plugins.status(server))

    def _renderer(self, node: str) -> Member | None:
        """Return the renderer to ask for an engine on this node: one beside it if there is one, in turn."""
        usable = self._renderers()
        near = [one for one in usable if one.node == node] or usable
        return near[next(self._turn) % len(near)] if near else None

    def _servers(self) -> list[Server]:
        engines = [Server(w.id, w.member.name, w.member.ip) for w in self._fleet if w.serving]
        return engines + [Server(m.uid, m.name, m.ip) for m in self._renderers()]

    def _forget(self) -> None:
        self._resting.keep({*(worker.id for worker in self._fleet), *(one.uid for one in self._renderers())})


def _refusal(status: int, raw: bytes) -> tuple[str, bool] | None:
    """Return why an engine's error is the hand-over's fault, and whether a file's; ``None`` where it is not."""
    if is_cache_miss(status, raw):
        return MISSED, False
    return (REFUSED, True) if is_file_refused(status, raw) else None


def _returned(leg: _Leg, why: tuple[str, bool]) -> set[Way]:
    """Everything goes by bytes now; return the ways that did not work."""
    reason, files = why
    blamed: set[Way] = set()
    for one in leg.travelled.values():
        if one.how == "bytes":
            continue
        guilty = (one.how == "file") is files
        one.falls.append(Fall(one.how, reason if guilty else TOGETHER))
        if guilty:
            blamed.add(one.how)
        one.how = "bytes"
    return blamed
