"""The router process: one event loop, three ports (8000 clients, 8001 control, 9090 metrics and health)."""

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, get_args

from mmrouter_lib import __version__
from mmrouter_lib.engines import adapter, storing_pools
from mmrouter_lib.feed_keys import CHECK_SECONDS, KeyWatch, fingerprint
from mmrouter_lib.settings_errors import SettingsError
from mmrouter_router import build
from mmrouter_router.admission.tenant_limits import TenantAdmission
from mmrouter_router.api import client_port, metrics_port
from mmrouter_router.api.chat import Chat
from mmrouter_router.api.lazy_app import LazyApp
from mmrouter_router.api.live_view import LiveView
from mmrouter_router.api.operator_report import UNROUTABLE, Reporter
from mmrouter_router.api.response_routes import ResponseRoutes
from mmrouter_router.core.response_ids import ResponseIds
from mmrouter_router.core.settings import CONTROL_PORT, CURVE_FILES, Settings, curve_keys
from mmrouter_router.core.worker_threads import WorkerThreads
from mmrouter_router.dispatch.stall_watch import StallWatch
from mmrouter_router.dispatch.stored_responses import StoredResponses
from mmrouter_router.explain.decisions import DecisionTrace
from mmrouter_router.explain.log_lines import prediction_line
from mmrouter_router.fleet import membership
from mmrouter_router.fleet.feed_client import FeedClient, FeedRequestError, feed_context
from mmrouter_router.fleet.workers import Worker
from mmrouter_router.http.certificate import ServerCertificate
from mmrouter_router.http.server import ADMIN_DRAIN_SECONDS, Server, Shutdown, raise_open_files, serve
from mmrouter_router.http.upstream import Upstream
from mmrouter_router.intake import PARSERS
from mmrouter_router.request.prepared import Outgoing, Prepared
from mmrouter_router.request.renderer_client import ROLE as RENDERER_ROLE
from mmrouter_router.scheduling.candidates import Eligibility, NoWorkerError
from mmrouter_router.scheduling.disaggregation import canary_applies
from mmrouter_router.telemetry.metrics import Metrics
from mmrouter_router.verify.probe_requests import ProbeRequestError

if TYPE_CHECKING:
    from mmrouter_router.picker.server import Picker

log = logging.getLogger("mmrouter.router")

READY_SECONDS = 30.0  # after the start the router is ready even without all snapshots (docs/architecture.md)
CANARY_RETRY_SECONDS = 1.0
SWEEP_SECONDS = 0.05


class Router:
    """The components of one router, and their background tasks."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.metrics = Metrics()
        self.threads = WorkerThreads()
        self.fleet = build.build_fleet(settings, self.metrics)
        self.trust = build.engine_trust(settings, self.metrics)
        self.upstream = Upstream(trust=self.trust)
        self._curve = settings.curve
        self.peers: tuple[membership.Peer, ...] = ()
        self._feeds: dict[str, tuple[FeedClient, asyncio.Task[None]]] = {}
        self._canaries: dict[str, asyncio.Task[None]] = {}

        base = build.Base(settings, self.metrics, self.threads, self.fleet, self.upstream, self.feed)
        self.gossip, self.placer = build.build_placement(base, self.has_peers)
        self.media, self.renderer, self.preparer = build.build_preparation(base)
        verification = build.build_verification(base, self.renderer, self.preparer, self.placer)
        self.sampler, self._render_sampler = verification.sampler, verification.render_sampler
        self.canary, self._learning = verification.canary, verification.learning
        self.probe_requests, self.probes = verification.probe_requests, verification.probes
        admission = TenantAdmission(base.spec.frontend.tenants, routers=lambda: 1 + len(self.peers))
        dispatch = build.build_dispatch(base, self.renderer, self.placer, verification, admission, self.has_peers)
        self.handover, self.stages = dispatch.handover, dispatch.stages
        encoding = dispatch.encoding, dispatch.encoder_list, dispatch.encoder_weights
        self._optional = (self._render_sampler, *encoding, self.handover, self._learning)
        self.tracing = build.build_tracing(base.spec.observability.otlp_endpoint, self.metrics)
        pools = storing_pools(settings.deployment)
        stored = StoredResponses(ResponseIds(settings.identity_key), self.fleet, pools)
        self.chat = Chat(
            settings,
            self.metrics,
            self.preparer,
            dispatch.forwarder,
            self.tracing,
            self.threads,
            admission,
            stored,
            adapters=self.fleet.adapters,
            needs_prompt=build.build_needs_prompt(base, self.preparer, self.sampler),
            answered=self._answered,
        )
        self.decisions = self.chat.decisions
        query = base.engine.response_query
        self._responses = (
            ResponseRoutes(self.chat.tenants, admission, stored, dispatch.engines, query) if pools else None
        )
        self.reporter = Reporter(
            router_id=settings.router_id,
            engine=base.spec.engine.type,
            fleet=self.fleet,
            renderer=self.renderer,
            probes=self.probes,
            counts=self.chat.counts.totals,
            ready=lambda: self.ready,
            possible=lambda: self.probe_requests.possible,
            possible_at=self.probe_requests.possible_at,
            degraded=lambda: self.stages.form().degraded,
        )
        self.shutdown = Shutdown()
        self._context = feed_context()
        # One group for all tasks: an unexpected exception ends the process instead of silently ending one feed.
        self._tasks = asyncio.TaskGroup()
        self._started, self._created = time.monotonic(), int(time.time())
        self._ready = self._discovered = False
        self._changed = asyncio.Event()
        self.fleet.change_listeners.append(self._changed.set)

    def _prediction_line(self) -> str:
        made = self.preparer
        return prediction_line(
            self.settings.deployment.spec,
            family=made.family.name if made.family is not None else "",
            unknown=made.unknown_family,
            unpredicted=made.unpredicted,
            text_only=made.family is not None and not made.family.places_images,
            learns_images=made.sentinels is not None,
            hidden=made.hidden,
        )

    def feed(self, uid: str) -> FeedClient | None:
        entry = self._feeds.get(uid)
        return entry[0] if entry is not None else None

    def has_peers(self) -> bool:
        return bool(self.peers)

    @property
    def ready(self) -> bool:
        """Whether all known sidecars have sent their snapshot, or the deadline has passed; false while draining."""
        if not self._ready:
            known = [worker for worker in self.fleet if worker.member.ready and not worker.member.draining]
            synced = all(worker.sync.synced and worker.heartbeat is not None for worker in known)
            self._ready = (self._discovered and synced) or time.monotonic() - self._started > READY_SECONDS
        return self._ready and not self.shutdown.draining

    def apply_membership(self, present: membership.Membership) -> None:
        self.upstream.encrypted = frozenset(member.ip for member in present.members if member.tls)
        self.peers = tuple(peer for peer in present.peers if peer.ip != self.settings.pod_ip)
        if present.leaving:
            self.shutdown.drain("this pod is being deleted")
        # Renderers have no cache and no sidecar, and are no targets of requests.
        members = [member for member in present.members if member.role != RENDERER_ROLE]
        self.renderer.roster(member for member in present.members if member.role == RENDERER_ROLE)
        # A pod whose sandbox was recreated keeps its uid, gets a new address and has lost its cache.
        addresses = {member.uid: member.ip for member in members}
        for worker in list(self.fleet):
            if addresses.get(worker.member.uid) != worker.member.ip:
                self._remove(worker.member.uid)
        for member in members:
            worker = self.fleet.join(member)
            if member.uid not in self._feeds:
                feed = FeedClient(worker, self.fleet, self._curve, self._context, self.metrics)
                self._feeds[member.uid] = (feed, self._tasks.create_task(feed.run(), name=f"feed {member.name}"))
        self._discovered = True

    def _remove(self, uid: str) -> None:
        self._feeds.pop(uid)[1].cancel()
        if (canary := self._canaries.pop(uid, None)) is not None:
            canary.cancel()
        self.chat.counts.forget_worker(self.fleet.workers[uid].member.name)
        self.fleet.leave(uid)

    async def run(self) -> None:
        settings = self.settings
        certificate = build.server_certificate(settings, self.metrics)
        clients = Server(
            self.client_app(),
            settings.host,
            client_port.PORT,
            drain_seconds=settings.drain_seconds,
            max_connections=raise_open_files(),
            count=lambda outcome: self.metrics.connections.labels(outcome).inc(),
            certificate=certificate,
            count_slow=lambda part: self.metrics.slow_clients.labels(part).inc(),
        )
        metrics = metrics_port.metrics_app(self.metrics.registry, lambda: self.ready)
        picker = self._picker(certificate)
        control = LazyApp(lambda: self._control_app(picker))
        admin = {CONTROL_PORT: control, metrics_port.PORT: metrics}
        others = [Server(app, settings.host, port, drain_seconds=ADMIN_DRAIN_SECONDS) for port, app in admin.items()]
        log.info("router %s serves %s on %s", settings.router_id, settings.served_model, settings.pod_ip)
        log.log(logging.INFO if self.probe_requests.possible else logging.WARNING, "%s", self._prediction_line())
        async with self.lifespan() as tasks:
            stalls = StallWatch(self.fleet, self.upstream, adapter(settings.deployment.spec.engine.type).health_path)
            components = (self.sampler, self.renderer, self.probes, self.gossip, stalls, *self._optional)
            loops = [self._watch_keys, self._discover, self._verify_all, self._sweep, self._recall_sightings]
            loops += [self.chat.tenants.follow, *(component.run for component in components if component is not None)]
            loops += [watched.watch for watched in (certificate, self.trust) if watched is not None]
            running = [tasks.create_task(loop(), name=loop.__qualname__) for loop in loops]
            picking = [] if picker is None else [tasks.create_task(picker.serve(settings.drain_seconds), name="picker")]
            await serve(clients, others, self.shutdown)
            await asyncio.gather(*picking)
            for task in (*running, *self._canaries.values(), *(task for _, task in self._feeds.values())):
                task.cancel()

    @contextlib.asynccontextmanager
    async def lifespan(self) -> AsyncIterator[asyncio.TaskGroup]:
        """Run the router's tasks within; close all its connections at the end."""
        try:
            async with self._tasks as tasks:
                yield tasks
        finally:
            await self.close()

    async def close(self) -> None:
        if self.handover is not None:
            self.handover.close()
        self.upstream.close()
        await self.media.close()
        self.threads.close()
        self._context.destroy(linger=0)
        self.tracing.close()

    async def _discover(self) -> None:
        settings = self.settings
        if settings.discovery == "file":
            await membership.watch_file(settings.config_dir / "workers.json", self.apply_membership)
        else:
            name, uid = settings.deployment.metadata.name, settings.pod_uid
            await membership.watch_pods(settings.api_server, name, uid, self.apply_membership, self.metrics)

    async def _watch_keys(self) -> None:
        settings = self.settings
        watch = KeyWatch(settings.config_dir / "secrets", settings.identity_key, *CURVE_FILES)
        while True:
            if (files := watch.changed()) is not None:
                try:
                    self._curve = curve_keys(files)
                except SettingsError as error:
                    log.error("the feed keeps its present keys: %s", error)
                for feed, _ in self._feeds.values():
                    feed.use_keys(self._curve)
            await asyncio.sleep(CHECK_SECONDS)

    async def _verify_all(self) -> None:
        """Run a canary for every routable, unverified worker, one at a time per worker; update gauges."""
        while True:
            self._changed.clear()
            workers = [worker for worker in self.fleet if canary_applies(worker.member.role)]
            for worker in filter(self.probe_requests.possible_at, () if self.shutdown.draining else workers):
                task = self._canaries.get(worker.member.uid)
                if worker.routable and worker.canary == "Unknown" and (task is None or task.done()):
                    self._canaries[worker.member.uid] = self._tasks.create_task(self._verify(worker))
            self.metrics.index_keys.set(len(self.fleet.index))
            for state in get_args(Eligibility):
                count = sum(self.placer.eligibility(worker) == state for worker in workers)
                self.metrics.workers.labels(state).set(count)
            causes = Counter(state.cause for state in map(self.reporter.standing, workers) if not state.routable)
            for cause in UNROUTABLE:
                self.metrics.unroutable.labels(cause).set(causes[cause])
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CANARY_RETRY_SECONDS):
                    await self._changed.wait()

    async def _verify(self, worker: Worker) -> None:
        feed = self.feed(worker.member.uid)
        if feed is None:
            return  # removed before the task started
        try:
            await self.canary.verify(worker, feed, self.placer.block_size(worker))
        except (ProbeRequestError, FeedRequestError) as error:
            log.warning("%s: canary not carried out: %s", worker.member.name, error)
            self.metrics.parity.labels("Unknown", "not_run").inc()
        await asyncio.sleep(CANARY_RETRY_SECONDS)  # by then the result is in the worker's heartbeat

    def _answered(self, trace: DecisionTrace, prepared: Prepared, outgoing: Outgoing) -> None:
        self.sampler.offer(trace)
        if self._render_sampler is not None:
            self._render_sampler.offer(trace, prepared, lambda: outgoing.plain)

    async def _recall_sightings(self) -> None:
        while self._learning is not None:
            if self.peers and self.preparer.sentinels is not None:
                self.preparer.sentinels.suspend_alignment()  # other routers send images to the same engines
            await self._learning.recall()
            await asyncio.sleep(CANARY_RETRY_SECONDS)

    async def _sweep(self) -> None:
        while True:
            more = self.fleet.index.sweep()
            await asyncio.sleep(0 if more else SWEEP_SECONDS)

    def _picker(self, certificate: ServerCertificate | None) -> "Picker | None":
        """Return the server for gateways, ``None`` where the deployment has none."""
        settings = self.settings
        mode = settings.deployment.spec.frontend.mode
        if mode == "frontend":
            return None
        # Imported here so that only a router with a gateway loads gRPC.
        from mmrouter_router.picker.engine_choice import EngineChoice  # noqa: PLC0415
        from mmrouter_router.picker.frontend_choice import FrontendChoice  # noqa: PLC0415
        from mmrouter_router.picker.server import Picker  # noqa: PLC0415

        test = settings.test_selection
        if mode == "frontendPicker":
            handle: Any = FrontendChoice(self._ready_frontends, client_port.PORT, test_selection=test)
        else:
            handle = EngineChoice(self.client_app(), PARSERS.keys(), self.chat.answer, test_selection=test)
        return Picker(
            handle,
            self.shutdown,
            # A frontend answers 503 itself where no engine can take a request.
            lambda: self.ready and (mode == "frontendPicker" or self._serves()),
            host=settings.host,
            certificate=build.picker_certificate(settings, certificate),
        )

    def _ready_frontends(self) -> tuple[str, ...]:
        own = (self.settings.pod_ip,) if self.ready else ()
        return (*own, *(peer.ip for peer in self.peers if peer.ready))

    def _control_app(self, picker: "Picker | None") -> Any:
        from mmrouter_router.api.control_port import control_app  # noqa: PLC0415 - it imports FastAPI

        return control_app(
            self.settings.control_token,
            self.reporter,
            self.placer,
            self.stages,
            self.chat,
            self.sampler,
            self.preparer.prompter,
            peers=lambda: self.peers,
            stopping=self.shutdown.stopping,
            refusals=self.metrics.control_refusals,
            feed_keys=lambda: sorted({fingerprint(key) for keys in self._curve for key in (keys.public, keys.server)}),
            live=self._live_view(),
            gateway_requests=None if picker is None else lambda: picker.requests,
        )

    def client_app(self) -> Any:
        about = client_port.About(self._models, self._versions, self._serves)

        def count(path: str, code: str) -> None:
            self.metrics.requests.labels(path, code).inc()

        responses = () if self._responses is None else self._responses.routes()
        return client_port.client_app(
            self.chat, PARSERS.keys(), count, self.shutdown, lambda: self.ready, about, responses
        )

    def _live_view(self) -> LiveView:
        resource = self.settings.deployment
        about = {"deployment": resource.metadata.name, "model": self.settings.served_model}
        about |= {"engine": resource.spec.engine.type, "policy": resource.spec.routing.policy, "version": __version__}
        exactness, frontends = self.metrics.decisions, lambda: 1 + len(self.peers)
        return LiveView(self.reporter, self.placer, self.decisions, exactness, about, frontends)

    def _models(self) -> list[dict[str, Any]]:
        """Return the model list: the model, and the LoRA adapters that engines have loaded.

        The context is the smallest of the engines, ``None`` while unknown.
        """
        model = {
            "id": self.settings.served_model,
            "object": "model",
            "created": self._created,
            "owned_by": "mmrouter",
            "root": self.settings.deployment.spec.model.id,
            "parent": None,
            "max_model_len": self.fleet.context_length() or None,
        }
        adapters = sorted(self.fleet.adapters())
        return [model, *({**model, "id": name, "root": name, "parent": model["id"]} for name in adapters)]

    def _versions(self) -> dict[str, str]:
        """Return the engines' release, of several the one that most engines run, and mmrouter's."""
        releases = Counter(worker.heartbeat.engine_version for worker in self.fleet if worker.heartbeat is not None)
        version = releases.most_common(1)[0][0] if releases else ""
        return {"version": version, "engine": self.settings.deployment.spec.engine.type, "mmrouter": __version__}

    def _serves(self) -> bool:
        """Whether an engine can take a request now, if only as a last resort."""
        try:
            self.placer.groups((), frozenset(self.stages.form().answers), None)
        except NoWorkerError:
            return False
        return True
