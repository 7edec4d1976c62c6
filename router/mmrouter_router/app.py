"""Wiring: one process, one event loop, three ports (8000 clients, 8001 control, 9090 metrics and health)."""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable
from typing import Any, get_args

import zmq.asyncio
from fastapi import FastAPI
from prometheus_client import Counter

from mmrouter_lib.api import quantity_bytes
from mmrouter_lib.engines import adapter
from mmrouter_router.api import control
from mmrouter_router.api.chat import Chat
from mmrouter_router.api.operator_report import Reporter
from mmrouter_router.api.routes import CLIENT_PORT, METRICS_PORT, client_app, metrics_app
from mmrouter_router.core.probe_images import small_pictures
from mmrouter_router.core.settings import Settings
from mmrouter_router.dispatch.engine_client import EngineClient
from mmrouter_router.dispatch.forwarder import Forwarder
from mmrouter_router.dispatch.stages import Stages
from mmrouter_router.encoding import EncoderScheduler
from mmrouter_router.encoding.encoder_announcements import EncoderAnnouncer
from mmrouter_router.encoding.encoder_pods import EncoderPods
from mmrouter_router.encoding.encoder_probes import EncoderProbes
from mmrouter_router.encoding.image_sender import ImageSender
from mmrouter_router.explain.decisions import DecisionLog, DecisionTrace
from mmrouter_router.fleet import discovery
from mmrouter_router.fleet.feed_client import FeedClient, FeedRequestError
from mmrouter_router.fleet.load_gossip import LoadGossip
from mmrouter_router.fleet.workers import Fleet, Worker
from mmrouter_router.handover import BytesDelivery, Delivery, build_handover
from mmrouter_router.http.body_budget import BodyBudget
from mmrouter_router.http.server import ADMIN_DRAIN_SECONDS, Server, Shutdown, serve
from mmrouter_router.http.upstream import Upstream
from mmrouter_router.intake import Limits
from mmrouter_router.intake.tenants import Tenants
from mmrouter_router.media import MediaResolver
from mmrouter_router.request.engine_request import Outgoing
from mmrouter_router.request.prepare import Prepared, Preparer
from mmrouter_router.request.renderer_client import ROLE as RENDERER_ROLE
from mmrouter_router.request.renderer_client import Renderer
from mmrouter_router.scheduling.pipeline_form import OffloadPolicy, canary_applies
from mmrouter_router.scheduling.placer import Decision, Eligibility, Placer
from mmrouter_router.scheduling.scoring import PROMPT_BLIND_POLICIES
from mmrouter_router.sentinels import SentinelStore
from mmrouter_router.telemetry.metrics import Metrics
from mmrouter_router.telemetry.tracing import NO_TRACING, Tracing
from mmrouter_router.verify.canary import Canary
from mmrouter_router.verify.probe_requests import ProbeRequestError, ProbeRequests
from mmrouter_router.verify.sampling import ParitySampler, RenderSampler
from mmrouter_router.verify.sentinel_learning import SentinelLearning

log = logging.getLogger("mmrouter.router")

READY_SECONDS = 30.0
"""Ready at the latest so long after start, with whatever is known then (docs/architecture.md)."""
CANARY_RETRY_SECONDS = 1.0
SWEEP_SECONDS = 0.05


class Router:
    """Everything that lives as long as the process."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        spec = settings.deployment.spec
        engine = adapter(spec.engine.type)
        self.served_model = spec.model.served_name or settings.deployment.metadata.name
        self.metrics = Metrics()
        self.fleet = Fleet(self.metrics)
        self.upstream = Upstream()
        self._feeds: dict[str, tuple[FeedClient, asyncio.Task[None]]] = {}
        self.gossip = LoadGossip(
            settings.router_id, self.fleet, self._feeder, lambda: bool(self.peers), self.metrics.work.inc
        )
        self.fleet.on_work(self.gossip.on_work)
        self.placer = Placer(settings.deployment, self.fleet, changed=self.gossip.changed)
        self.media = MediaResolver(spec.routing.media, metrics=self.metrics)
        self.preparer = Preparer(settings, self.media)
        family = self.preparer.family.name if self.preparer.family is not None else self.preparer.unknown_family
        self.metrics.parity.describe(spec.engine.type, family)
        self.decisions = DecisionLog()
        self.sampler = ParitySampler(float(spec.verification.sample_ratio), self.fleet, self._feeder, self.metrics)
        self.tenants = Tenants(
            settings.config_dir / "api-keys", settings.identity_key, required=spec.frontend.api_keys is not None
        )
        self.render_sampler: RenderSampler | None = None
        self.renderer = Renderer(self.upstream, settings.engine_key, self.served_model, self.metrics)
        if any(pool.role == RENDERER_ROLE for pool in spec.pools):
            self.preparer.renderer = self.renderer
            self.render_sampler = RenderSampler(self.sampler.wants, self.renderer, self.metrics)
        self.own = ProbeRequests(
            spec.engine.type,
            self.preparer,
            self.upstream,
            settings.engine_key,
            self.served_model,
            settings.identity_key,
            self.placer.partner,
        )
        self.learning: SentinelLearning | None = None
        if engine.learns_image_identity:
            self.preparer.sentinels = self._sentinels()
        self.canary = Canary(
            settings.router_id, self.fleet, self.own, self.preparer.sentinels, self.preparer.seed(None), self.metrics
        )
        if self.preparer.sentinels is not None:
            self.learning = SentinelLearning(
                self.preparer.sentinels, self.fleet, self.canary, self._feeder, self.metrics
            )
        self.probes = EncoderProbes(self.fleet, self.upstream, spec.engine.type, settings.engine_key, self.served_model)
        roles = {pool.role for pool in spec.pools}
        self.handover = build_handover(settings, self.fleet, self.upstream, self.metrics, lambda: self.renderer.usable)
        delivery: Delivery = self.handover or BytesDelivery()
        self.encoding: ImageSender | None = None
        self.encoder_list: EncoderAnnouncer | None = None
        if "encoder" in roles and engine.asks_encoders_itself:
            self.encoder_list = EncoderAnnouncer(
                settings.router_id, self.fleet, self._feeder, settings.deployment.spec.verification.timeout_seconds
            )
        if "encoder" in roles and not engine.asks_encoders_itself:
            pods = EncoderPods(
                settings.deployment,
                self.fleet,
                self.probes,
                self.upstream,
                settings.engine_key,
                self.served_model,
                delivery,
            )
            self.encoding = encoding = ImageSender(EncoderScheduler(spec.routing.encoder_scheduling), pods.post)
            self.fleet.on_change(lambda: encoding.update(pods.encoders()))
        self.exchange = EngineClient(self.upstream, spec.engine.type, settings.engine_key)
        self.stages = Stages(
            spec.engine.type,
            roles,
            self.fleet,
            self.placer,
            self.metrics,
            self.exchange.ask,
            encoding=self.encoding,
            offload=OffloadPolicy(spec.routing.min_prefill_tokens),
            delivery=delivery,
        )
        self.forwarder = Forwarder(
            self.placer,
            self.exchange,
            self.metrics,
            stages=self.stages,
            delivery=delivery,
            on_send=self.learning.on_send if self.learning is not None else _not_learned,
        )
        self.tracing = tracing_to(spec.observability.otlp_endpoint, self.metrics.spans)
        self.chat = Chat(
            router_id=settings.router_id,
            served_model=self.served_model,
            engine=spec.engine.type,
            limits=Limits.of(spec.routing.media),
            tenants=self.tenants,
            preparer=self.preparer,
            forwarder=self.forwarder,
            decisions=self.decisions,
            metrics=self.metrics,
            control_token=settings.control_token,
            debug_headers=spec.observability.debug_headers,
            answered=self._answered,
            tracing=self.tracing,
            looks=self._looks(),
            body_budget=BodyBudget(quantity_bytes(spec.frontend.max_held_bytes)),
        )
        self.reporter = Reporter(
            router_id=settings.router_id,
            engine=spec.engine.type,
            fleet=self.fleet,
            renderer=self.renderer,
            probes=self.probes,
            counts=self.chat.counts,
            ready=lambda: self.ready,
            possible=lambda: self.own.possible,
            degraded=lambda: self.stages.form().degraded,
        )
        self.shutdown = Shutdown()
        self.peers: tuple[discovery.Peer, ...] = ()
        self._context = zmq.asyncio.Context()
        # One group for everything that runs: what none of us expects ends the process loudly, never one feed silently.
        self._tasks = asyncio.TaskGroup()
        self._canaries: dict[str, asyncio.Task[None]] = {}
        self._started = time.monotonic()
        self._ready = False
        self._rostered = False
        self._changed = asyncio.Event()
        self.fleet.on_change(self._changed.set)

    def _sentinels(self) -> SentinelStore:
        pictures = [self.own.image(data) for data in small_pictures()] if self.preparer.family is not None else []
        return SentinelStore(
            count=lambda event: self.metrics.sentinels.labels(event).inc(),
            probe_images=[(picture.identity, picture.data) for picture in pictures],
        )

    def _looks(self) -> Callable[[str], bool]:
        """Return whether a request's prompt is predicted, by the request's id.

        A policy that is the same whatever the prompt is needs none; then those are predicted that are sampled anyway,
        and those that show their decision. Stages, and what is learned of SGLang's sentinels, need all prompts.
        """
        spec = self.settings.deployment.spec
        plain = {pool.role for pool in spec.pools} <= {"worker", RENDERER_ROLE} and self.preparer.sentinels is None
        return self.sampler.wants if plain and spec.routing.policy in PROMPT_BLIND_POLICIES else lambda request_id: True

    def _feeder(self, uid: str) -> FeedClient | None:
        known = self._feeds.get(uid)
        return known[0] if known is not None else None

    @property
    def ready(self) -> bool:
        """True once every known sidecar's snapshot is in or the deadline has passed; then until this router leaves."""
        if not self._ready:
            known = all(
                worker.sync.synced and worker.heartbeat is not None
                for worker in self.fleet
                if worker.member.ready and not worker.member.draining
            )
            self._ready = (self._rostered and known) or time.monotonic() - self._started > READY_SECONDS
        return self._ready and not self.shutdown.draining

    def roster(self, roster: discovery.Membership) -> None:
        """Take over who is there."""
        self.peers = tuple(p for p in roster.peers if p.ip != self.settings.pod_ip)
        if roster.leaving:
            self.shutdown.drain("this pod is being deleted")
        # A renderer has no cache and no sidecar: there is nothing to follow and nowhere to route to.
        members = [member for member in roster.members if member.role != RENDERER_ROLE]
        self.renderer.roster(member for member in roster.members if member.role == RENDERER_ROLE)
        # A pod whose sandbox was made anew has another address under its uid, and nothing of its cache is left.
        here = {member.uid: member.ip for member in members}
        for worker in list(self.fleet):
            if here.get(worker.member.uid) != worker.member.ip:
                self._leave(worker.member.uid)
        for member in members:
            worker = self.fleet.join(member)
            if member.uid not in self._feeds:
                feeder = FeedClient(worker, self.fleet, self.settings.curve, self._context, self.metrics)
                self._feeds[member.uid] = (feeder, self._tasks.create_task(feeder.run(), name=f"feed {member.name}"))
        self._rostered = True

    def _leave(self, uid: str) -> None:
        self._feeds.pop(uid)[1].cancel()
        if (canary := self._canaries.pop(uid, None)) is not None:
            canary.cancel()
        self.fleet.leave(uid)

    async def run(self) -> None:
        """Serve until cancelled or told to stop by a signal."""
        ip, drain = self.settings.host, self.settings.drain_seconds
        clients = Server(self.client_app(), ip, CLIENT_PORT, drain_seconds=drain)
        others = [
            Server(self._control_app(), ip, control.CONTROL_PORT, drain_seconds=ADMIN_DRAIN_SECONDS),
            Server(metrics_app(self.metrics, lambda: self.ready), ip, METRICS_PORT, drain_seconds=ADMIN_DRAIN_SECONDS),
        ]
        log.info(
            "router %s serves %s on %s:%d",
            self.settings.router_id,
            self.served_model,
            self.settings.pod_ip,
            CLIENT_PORT,
        )
        try:
            async with self._tasks as tasks:
                background = [
                    tasks.create_task(self._discover(), name="discovery"),
                    tasks.create_task(self._verify_all(), name="canaries"),
                    tasks.create_task(self._sweep(), name="sweep"),
                    tasks.create_task(self.sampler.run(), name="parity"),
                    tasks.create_task(self.renderer.run(), name="renderers"),
                    tasks.create_task(self.probes.run(), name="probes"),
                    tasks.create_task(self.gossip.run(), name="gossip"),
                    tasks.create_task(self._recall(self.learning), name="sightings"),
                ]
                some = (self.render_sampler, self.encoding, self.encoder_list, self.handover, self.learning)
                for part in some:  # those that this deployment has
                    if part is not None:
                        background.append(tasks.create_task(part.run(), name=type(part).__name__))
                await serve(clients, others, self.shutdown)
                for task in [*background, *self._canaries.values(), *(task for _, task in self._feeds.values())]:
                    task.cancel()
        finally:
            if self.handover is not None:
                self.handover.close()
            self.upstream.close()
            await self.media.close()
            self._context.destroy(linger=0)
            self.tracing.close()

    async def _discover(self) -> None:
        settings = self.settings
        if settings.discovery == "file":
            await discovery.watch_file(settings.config_dir / "workers.json", self.roster)
        else:
            # Here, because only this way pays for the cluster client.
            from mmrouter_router.fleet.pod_watch import watch_pods  # noqa: PLC0415

            name = settings.deployment.metadata.name
            await watch_pods(settings.api_server, name, settings.pod_uid, self.roster, self.metrics)

    async def _verify_all(self) -> None:
        """Start a canary for every worker that is routable and not verified; one at a time per worker."""
        if not self.own.possible:
            log.warning(
                "family %s is not modelled for %s and there is no renderer: requests are placed by affinity",
                self.preparer.unknown_family,
                self.settings.deployment.spec.engine.type,
            )
        while True:
            self._changed.clear()
            provable = [worker for worker in self.fleet if canary_applies(worker.member.role)]
            for worker in provable if self.own.possible and not self.shutdown.draining else ():
                task = self._canaries.get(worker.member.uid)
                if worker.routable and worker.canary == "Unknown" and (task is None or task.done()):
                    self._canaries[worker.member.uid] = self._tasks.create_task(self._verify(worker))
            self.metrics.index_keys.set(len(self.fleet.index))
            for standing in get_args(Eligibility):
                count = sum(self.placer.eligibility(worker) == standing for worker in provable)
                self.metrics.workers.labels(standing).set(count)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CANARY_RETRY_SECONDS):
                    await self._changed.wait()

    async def _verify(self, worker: Worker) -> None:
        feeder = self._feeder(worker.member.uid)
        if feeder is None:
            return  # it left before we came to it
        try:
            await self.canary.verify(worker, feeder, self.placer.block_size(worker))
        except (ProbeRequestError, FeedRequestError) as error:
            log.warning("%s: canary not carried out: %s", worker.member.name, error)
            self.metrics.parity.labels("Unknown", "not_run").inc()
        await asyncio.sleep(CANARY_RETRY_SECONDS)  # the next round looks again; a result is in the heartbeat by then

    def _answered(self, trace: DecisionTrace, prepared: Prepared, outgoing: Outgoing) -> None:
        self.sampler.offer(trace)
        if self.render_sampler is not None:
            self.render_sampler.offer(trace, prepared, lambda: outgoing.plain)

    async def _recall(self, learning: SentinelLearning | None) -> None:
        while learning is not None:
            if self.peers and self.preparer.sentinels is not None:
                self.preparer.sentinels.suspend_alignment()  # other frontends send images to the same engines
            await learning.recall()
            await asyncio.sleep(CANARY_RETRY_SECONDS)

    async def _sweep(self) -> None:
        while True:
            more = self.fleet.index.sweep()
            await asyncio.sleep(0 if more else SWEEP_SECONDS)

    def client_app(self) -> Any:
        """Return the app for clients."""
        model = {"id": self.served_model, "object": "model", "created": 0, "owned_by": "mmrouter"}
        model["root"] = self.settings.deployment.spec.model.id
        return client_app(self.chat, self.tenants, self.metrics, self.shutdown, lambda: self.ready, model)

    def _control_app(self) -> FastAPI:
        return control.create(
            token=self.settings.control_token,
            router_id=self.settings.router_id,
            fleet=self.fleet,
            placer=self.placer,
            stages=self.stages,
            chat=self.chat,
            decisions=self.decisions,
            sampler=self.sampler,
            renderer=self.renderer,
            prompter=self.preparer.prompter,
            peers=lambda: self.peers,
            report=self.reporter.report,
            stopping=self.shutdown.stopping,
            refusals=self.metrics.control_refusals,
        )


def tracing_to(endpoint: str, spans: Counter) -> Tracing:
    """Return the exporter of spans for an OTLP endpoint (empty: none); ``spans`` counts spans by result."""
    if not endpoint:
        return NO_TRACING
    # Imported here so that only a router with tracing loads the SDK.
    from mmrouter_router.telemetry.otlp_export import OtlpTracing  # noqa: PLC0415

    return OtlpTracing.to(endpoint, os.environ, lambda result, count: spans.labels(result).inc(count))


def _not_learned(decision: Decision, prepared: Prepared) -> None:
    """Where identity is ours there is nothing to learn."""
