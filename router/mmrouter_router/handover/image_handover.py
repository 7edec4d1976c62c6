"""Hand a request's images over to an engine: the ways that are tried for each image, and the fallback to bytes."""

import itertools
import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from mmrouter_handover.shm import HandOverError, PlainFile
from mmrouter_lib.api import quantity_bytes
from mmrouter_lib.engines.vllm.adapter import file_url, is_file_refused
from mmrouter_lib.engines.vllm.plugin_api import is_cache_miss
from mmrouter_router.core.settings import Settings
from mmrouter_router.fleet.workers import Fleet, Member, Worker
from mmrouter_router.handover import ways
from mmrouter_router.handover.files import SharedFolder
from mmrouter_router.handover.plugin_client import PluginRegistry, PluginServer, ProcessedImages
from mmrouter_router.handover.request_delivery import AddressedRequest, Post, T
from mmrouter_router.http.engine_connection import Body
from mmrouter_router.http.upstream import Upstream
from mmrouter_router.request.prepared import OutgoingImage, Place
from mmrouter_router.scheduling.offload_comparison import Waiting
from mmrouter_router.telemetry.metrics import Metrics

log = logging.getLogger("mmrouter.handover")

BACKOFF: Final = "resting"  # reason of a way that failed several times in a row
REFUSED, MISSED, TOGETHER = "refused", "missed", "together"
"""The engine could not read a file, did not hold a processed image, or got this image anew with a failed one."""


@dataclass(slots=True)
class _Attempt:
    """One request on its way to one engine. Images by identity, each once.

    ``engine``: its id, which changes with a restart. ``waiting``: ``None`` where there was no choice of a renderer.
    """

    engine: str
    costs: ways.WayCosts
    images: Mapping[str, OutgoingImage]
    transfers: Mapping[str, ways.ImageTransfer]
    files: dict[str, PlainFile] = field(default_factory=dict)
    waiting: Waiting | None = None
    answered: bool = False

    @property
    def tokens(self) -> int:
        return sum(transfer.tokens for transfer in self.transfers.values())


class Handover:
    """Delivery that hands images over to the engines of one deployment."""

    def __init__(
        self,
        settings: Settings,
        fleet: Fleet,
        upstream: Upstream,
        metrics: Metrics,
        renderers: Callable[[], Sequence[Member]],
        folder: SharedFolder | None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """``renderers``: those that are available now. ``folder``: this pod's."""
        spec, engine_key = settings.deployment.spec, settings.engine_key
        self._mode = spec.transfer
        self._shares = {pool.name: pool.shared_memory.scope == "node" for pool in spec.pools}
        first = {**ways.FIRST, **(folder.measured() if folder is not None else {})}
        gain = ways.AUTO_GAIN if spec.routing.transfer in (None, "auto") else 1.0
        always = settings.always_hand_over
        self._costs = {
            pool.name: ways.WayCosts(first, always=always, gain=gain, wall_clock=wall_clock) for pool in spec.pools
        }
        self._renders = any(pool.role == "renderer" for pool in spec.pools)
        self._fleet, self._metrics, self._renderers = fleet, metrics, renderers
        self._here, self._folder, self._clock = ways.Endpoint(settings.node, shares=folder is not None), folder, clock
        self._turn = itertools.count()
        self.backoff = ways.WayBackoff(clock)
        self._processed = ProcessedImages(upstream, engine_key)
        self.plugins = PluginRegistry(upstream, engine_key, self._servers, clock)
        fleet.change_listeners.append(self._forget)

    async def run(self) -> None:
        if self._renders:
            await self.plugins.run()

    def close(self) -> None:
        if self._folder is not None:
            self._folder.close()

    async def send(self, request: AddressedRequest, post: Post[T], transfers: list[dict[str, Any]]) -> T:
        """Send a request; return the answer once its first byte is there, and release all files. Raises as ``post``."""
        images = {image.uuid: image for image in request.outgoing.images}
        if not images:
            return await post(await request.plain())
        worker = request.worker.member
        each = {
            name: ways.ImageTransfer(name, len(image.media.data), image.tokens, worker.name)
            for name, image in images.items()
        }
        attempt = _Attempt(request.worker.id, self._costs[worker.pool], images, each)
        try:
            answer = await post(await self._prepare(attempt, request))
            status = answer.status
            hands_over = any(transfer.how != "bytes" for transfer in each.values())
            error = await answer.error_text() if hands_over and status >= 400 else b""
            missed = bool(error) and is_cache_miss(status, error)
            if missed or (error and is_file_refused(status, error)):
                answer.drop()
                failed = _fall_back(each.values(), MISSED if missed else REFUSED, files=not missed)
                answer = await post(await request.plain())
                if answer.status < 400:
                    for way in failed:
                        self.backoff.failed(attempt.engine, way)
            elif status < 400:
                attempt.answered = True
                for way in {transfer.how for transfer in each.values()} - {"bytes"}:
                    self.backoff.succeeded(attempt.engine, way)
            for transfer in each.values():
                self._metrics.handovers.labels(transfer.how, "").inc()
                self._metrics.handover_bytes.labels(transfer.how).inc(transfer.size)
                self._metrics.handover_seconds.labels(transfer.how).observe(transfer.seconds)
            return answer
        finally:
            if attempt.waiting is not None:
                comparison = attempt.costs.processing
                comparison.end(attempt.waiting, attempt.tokens if attempt.answered else 0)
                for by, cost in zip(("engine", "renderer"), comparison.costs, strict=True):
                    self._metrics.handover_cost.labels(worker.pool, by).set(cost or 0)
            for file in attempt.files.values():
                file.release()
            transfers += [transfer.as_json() for transfer in each.values()]
            self._count_fallbacks(fallback for transfer in each.values() for fallback in transfer.fallbacks)

    async def _prepare(self, attempt: _Attempt, request: AddressedRequest) -> Body:
        """Put every image where the engine finds it, and return the body that refers to it."""
        renderer = self._renderer(request.worker.member.node) if self._renders else None
        eligibility = self._eligibility(request.worker, renderer)
        plan = ways.plan_handover(list(attempt.transfers.values()), eligibility, attempt.costs)
        for name, fallbacks in plan.fallbacks.items():
            attempt.transfers[name].fallbacks += fallbacks
        if not all(eligibility.processed.values()) and attempt.tokens >= ways.FEW_TOKENS:
            attempt.waiting = attempt.costs.processing.begin(attempt.engine, elsewhere=bool(plan.processed))
        if plan.processed and renderer is not None:
            await self._process(attempt, request, renderer, plan)
        await self._write(attempt, [name for name in plan.files if attempt.transfers[name].how == "bytes"])
        urls: dict[Place, str | None] = {}
        for image in request.outgoing.images:
            transfer = attempt.transfers[image.uuid]
            if transfer.how == "bytes" and image.uuid in plan.files and image.uuid in attempt.files:
                transfer.how = "file"
            if transfer.how != "bytes":
                urls[image.place] = file_url(attempt.files[image.uuid].path) if transfer.how == "file" else None
        began = self._clock()
        body = await request.outgoing.written(request.fields, urls)
        if inline := [transfer for transfer in attempt.transfers.values() if transfer.how == "bytes"]:
            seconds, size = self._clock() - began, sum(transfer.size for transfer in inline)
            attempt.costs.observe("bytes", size, seconds)
            for transfer in inline:
                transfer.seconds = seconds * transfer.size / max(size, 1)
        return body

    async def _process(
        self, attempt: _Attempt, request: AddressedRequest, renderer: Member, plan: ways.HandoverPlan
    ) -> None:
        """Let a renderer process the images and the engine take them."""
        began = self._clock()
        outgoing, transfers, costs = request.outgoing, attempt.transfers, attempt.costs
        if not ways.why_no_file(self._here, self._endpoint(renderer, renderer.uid)):
            small = [name for name, transfer in transfers.items() if not costs.why_no_file(transfer.size)]
            await self._write(attempt, small)
        urls = {i.place: file_url(attempt.files[i.uuid].path) for i in outgoing.images if i.uuid in attempt.files}
        chat = outgoing.with_images(outgoing.fields, urls)
        engine, names = request.worker.member.ip, list(attempt.images)
        outcome = await self._processed.hand_over(renderer.ip, engine, chat, plan.processed, names)
        seconds = self._clock() - began
        self._count_fallbacks(outcome.others)
        failed = renderer.uid if outcome.failed == "renderer" else attempt.engine
        for name, fallbacks in outcome.fallbacks.items():
            transfers[name].fallbacks += fallbacks
        for way in {fallback.how for fallbacks in outcome.fallbacks.values() for fallback in fallbacks}:
            self.backoff.failed(failed, way)
        for name, way in outcome.held.items():
            transfers[name].how, transfers[name].seconds = way, seconds

    async def _write(self, attempt: _Attempt, names: Collection[str]) -> None:
        for name in names:
            if name in attempt.files or self._folder is None:
                continue
            transfer = attempt.transfers[name]
            began = self._clock()
            try:
                attempt.files[name] = await self._folder.put(name, attempt.images[name].media)
            except HandOverError as error:
                transfer.fallbacks.append(ways.Fallback("file", error.reason))
                continue
            transfer.seconds = self._clock() - began
            attempt.costs.observe("file", transfer.size, transfer.seconds)

    def _count_fallbacks(self, fallbacks: Iterable[ways.Fallback]) -> None:
        for fallback in fallbacks:
            self._metrics.handovers.labels(fallback.how, fallback.reason).inc()

    def _eligibility(self, worker: Worker, renderer: Member | None) -> ways.WayEligibility:
        shared = worker.heartbeat.shared if worker.heartbeat is not None else None
        engine = replace(self._endpoint(worker.member, worker.id), above=shared is not None and shared.above)
        file = ways.why_no_file(self._here, engine) or (BACKOFF if self.backoff.skips(worker.id, "file") else "")
        if not self._renders:
            return ways.WayEligibility(file)
        other = self._endpoint(renderer, renderer.uid) if renderer is not None else None
        servers = [worker.id, *([renderer.uid] if renderer is not None else [])]
        processed = {
            way: why or (BACKOFF if any(self.backoff.skips(server, way) for server in servers) else "")
            for way, why in ways.why_not_processed(self._mode, other, engine).items()
        }
        return ways.WayEligibility(file, processed)

    def _endpoint(self, member: Member, server: str) -> ways.Endpoint:
        return ways.Endpoint(member.node, self._shares.get(member.pool, False), self.plugins.status(server))

    def _renderer(self, node: str) -> Member | None:
        """Return a renderer for an engine on this node, preferably on the same node, round robin."""
        usable = self._renderers()
        near = [renderer for renderer in usable if renderer.node == node] or usable
        return near[next(self._turn) % len(near)] if near else None

    def _servers(self) -> list[PluginServer]:
        engines = [PluginServer(w.id, w.member.name, w.member.ip) for w in self._fleet if w.serving]
        return engines + [PluginServer(m.uid, m.name, m.ip) for m in self._renderers()]

    def _forget(self) -> None:
        self.backoff.retain({*(worker.id for worker in self._fleet), *(r.uid for r in self._renderers())})


def _fall_back(transfers: Iterable[ways.ImageTransfer], reason: str, *, files: bool) -> set[ways.Way]:
    """Send every image as bytes; return the ways that failed. ``files``: whether a file or a processed image did."""
    failed: set[ways.Way] = set()
    for transfer in transfers:
        if transfer.how == "bytes":
            continue
        at_fault = (transfer.how == "file") is files
        transfer.fallbacks.append(ways.Fallback(transfer.how, reason if at_fault else TOGETHER))
        if at_fault:
            failed.add(transfer.how)
        transfer.how = "bytes"
    return failed


def build_handover(
    settings: Settings, fleet: Fleet, upstream: Upstream, metrics: Metrics, renderers: Callable[[], Sequence[Member]]
) -> Handover | None:
    """Build the hand-over of a deployment; ``None`` where images travel in requests."""
    spec = settings.deployment.spec
    if spec.transfer == "none":
        return None
    folder = None
    if settings.shared_dir is not None:
        pools = (pool for pool in spec.pools if pool.shared_memory.scope == "node")
        total = max((quantity_bytes(pool.shared_memory.size) for pool in pools), default=0)
        try:
            folder = SharedFolder(settings.shared_dir, settings.router_id, settings.shared_limit_bytes or total, total)
        except OSError as error:
            log.warning("images are not handed over as files: %s: %s", settings.shared_dir, error.strerror)
    return Handover(settings, fleet, upstream, metrics, renderers, folder)
