"""Builders of a router's components: placement, request preparation, verification, dispatch and tracing."""

import os
from collections.abc import Callable
from typing import NamedTuple

from mmrouter_lib.api.spec import Spec
from mmrouter_lib.cache_layout import chunk_tokens
from mmrouter_lib.engines import adapter
from mmrouter_lib.engines.base.adapter import EngineAdapter
from mmrouter_lib.engines.vllm.stage_requests import BlockLeases, lease_seconds
from mmrouter_lib.media_identity import media_identity
from mmrouter_lib.model_folder import find_json
from mmrouter_lib.tls_context import EngineTrust, engine_server_name
from mmrouter_router.admission.tenant_limits import TenantAdmission
from mmrouter_router.core.settings import Settings
from mmrouter_router.core.worker_threads import WorkerThreads
from mmrouter_router.dispatch.engine_client import EngineClient
from mmrouter_router.dispatch.forwarder import Forwarder
from mmrouter_router.dispatch.stages import Stages
from mmrouter_router.dispatch.waiting_line import WaitingLine
from mmrouter_router.encoding.encoder_pods import EncoderAnnouncer, EncoderPods, EncoderProbes, heard_encoders
from mmrouter_router.encoding.encoder_weights import EncoderWeights
from mmrouter_router.encoding.encoding_claims import EncodingClaims
from mmrouter_router.encoding.image_sender import ImageSender
from mmrouter_router.encoding.scheduler import EncoderScheduler
from mmrouter_router.fleet.feed_client import FeedClient
from mmrouter_router.fleet.load_gossip import LoadGossip
from mmrouter_router.fleet.workers import Fleet
from mmrouter_router.handover.image_handover import Handover, build_handover
from mmrouter_router.handover.request_delivery import BytesDelivery, Delivery
from mmrouter_router.http.certificate import KeyAndChain, ServerCertificate, self_signed
from mmrouter_router.http.upstream import Upstream
from mmrouter_router.media.resolve import MediaResolver
from mmrouter_router.request.prepare import Preparer, PromptModel
from mmrouter_router.request.renderer_client import ROLE as RENDERER_ROLE
from mmrouter_router.request.renderer_client import Renderer, small_pictures
from mmrouter_router.scheduling.disaggregation import OffloadPolicy
from mmrouter_router.scheduling.placer import Placer
from mmrouter_router.scheduling.scoring import PROMPT_BLIND_POLICIES
from mmrouter_router.sentinels.evidence import SentinelStore
from mmrouter_router.telemetry.metrics import Metrics
from mmrouter_router.telemetry.tracing import NO_TRACING, Tracing
from mmrouter_router.verify.canary import Canary
from mmrouter_router.verify.probe_requests import ProbeRequests
from mmrouter_router.verify.sampling import ParitySampler, RenderSampler
from mmrouter_router.verify.sentinel_learning import SentinelLearning


class Base(NamedTuple):
    """What all builders need. ``feed_of``: pod uid -> its sidecar's feed."""

    settings: Settings
    metrics: Metrics
    threads: WorkerThreads
    fleet: Fleet
    upstream: Upstream
    feed_of: Callable[[str], FeedClient | None]

    @property
    def spec(self) -> Spec:
        return self.settings.deployment.spec

    @property
    def engine(self) -> EngineAdapter:
        return adapter(self.spec.engine.type)

    @property
    def roles(self) -> set[str]:
        return {pool.role for pool in self.spec.pools}


def build_fleet(settings: Settings, metrics: Metrics) -> Fleet:
    spec = settings.deployment.spec
    args = [*spec.engine.args, *(argument for pool in spec.pools for argument in pool.args)]
    return Fleet(metrics, chunk=chunk_tokens(find_json(settings.model_dir, "config.json") or {}, args))


def build_placement(base: Base, has_peers: Callable[[], bool]) -> tuple[LoadGossip, Placer]:
    gossip = LoadGossip(base.settings.router_id, base.fleet, base.feed_of, has_peers, base.metrics.work.inc)
    base.fleet.work_listeners.append(gossip.on_work)
    return gossip, Placer(base.settings.deployment, base.fleet, changed=gossip.changed)


def engine_trust(settings: Settings, metrics: Metrics) -> EngineTrust | None:
    """Return the trust in the engines' certificates, if they serve TLS. Raises ``CertificateError``."""
    if settings.deployment.spec.engine.tls is None:
        return None
    name = engine_server_name(settings.deployment.metadata.name, settings.deployment.metadata.namespace)
    trust = EngineTrust(settings.config_dir / "engine-ca", name, lambda event: metrics.engine_tls.labels(event).inc())
    for event in ("untrusted", "name", "expired"):
        metrics.engine_tls.labels(event)  # at 0: the first one is an increase
    metrics.tls_refused.labels("engine_ca").set_function(lambda: trust.refused)
    return trust


def server_certificate(settings: Settings, metrics: Metrics) -> ServerCertificate | None:
    """Return the certificate of the client port, if it serves TLS. Raises ``CertificateError``."""
    if settings.deployment.spec.frontend.tls is None:
        return None
    certificate = ServerCertificate(settings.config_dir / "tls", lambda event: metrics.tls.labels(event).inc())
    metrics.tls_refused.labels("certificate").set_function(lambda: certificate.refused)
    return certificate


def picker_certificate(settings: Settings, of_clients: ServerCertificate | None) -> Callable[[], KeyAndChain] | None:
    """Return the certificate of the picker's port: that of the client port or one of its own, ``None`` without TLS.

    Gateways verify none, because the pickers of the inference extension make their own. Raises ``CertificateError``.
    """
    if settings.deployment.spec.frontend.picker_tls == "none":
        return None
    if of_clients is not None:
        return lambda: of_clients.pem
    made = self_signed(settings.deployment.metadata.name)
    return lambda: made


def build_preparation(base: Base) -> tuple[MediaResolver, Renderer, Preparer]:
    """Build the media resolver, the renderer's client and the preparer. Raises ``ModelFolderError``."""
    settings = base.settings
    media = MediaResolver(base.spec.routing.media, metrics=base.metrics, threads=base.threads)
    model = PromptModel.load(settings)
    renderer = Renderer(base.upstream, settings.engine_key, settings.served_model, base.metrics)
    predicting = renderer if RENDERER_ROLE in base.roles else None
    sentinels = _build_sentinels(base, model) if base.engine.learns_image_identity else None
    preparer = Preparer(
        settings,
        media,
        model,
        renderer=predicting,
        sentinels=sentinels,
        threads=base.threads,
        key_forms=base.fleet.key_forms,
        context_length=base.fleet.context_length,
    )
    family = model.family.name if model.family is not None else model.name
    base.metrics.parity.describe(base.spec.engine.type, family)
    return media, renderer, preparer


def _build_sentinels(base: Base, model: PromptModel) -> SentinelStore:
    images = small_pictures() if model.family is not None and model.family.places_images else ()
    options = model.family.pixel_options if model.family is not None else {}
    known = [(media_identity(data, options, key=base.settings.identity_key), data) for data in images]
    return SentinelStore(count=lambda event: base.metrics.sentinels.labels(event).inc(), probe_images=known)


class Verification(NamedTuple):
    """The components that compare predictions with engines. ``learning``: only for engines with sentinels."""

    sampler: ParitySampler
    render_sampler: RenderSampler | None
    probe_requests: ProbeRequests
    canary: Canary
    learning: SentinelLearning | None
    probes: EncoderProbes


def build_verification(base: Base, renderer: Renderer, preparer: Preparer, placer: Placer) -> Verification:
    settings, engine = base.settings, base.spec.engine.type
    sampler = ParitySampler(float(base.spec.verification.sample_ratio), base.fleet, base.feed_of, base.metrics)
    probe_requests = ProbeRequests(settings, preparer, base.upstream, placer.partner)
    sentinels = preparer.sentinels
    canary = Canary(settings.router_id, base.fleet, probe_requests, sentinels, preparer.seed(None), base.metrics)
    learning = SentinelLearning(sentinels, base.fleet, canary, base.feed_of, base.metrics) if sentinels else None
    render_sampler = RenderSampler(sampler.wants, renderer, base.metrics) if preparer.renderer else None
    probes = EncoderProbes(base.fleet, base.upstream, engine, settings.engine_key, settings.served_model)
    return Verification(sampler, render_sampler, probe_requests, canary, learning, probes)


class Dispatch(NamedTuple):
    """The components that send requests to engines."""

    handover: Handover | None
    encoding: ImageSender | None
    encoder_list: EncoderAnnouncer | None
    encoder_weights: EncoderWeights | None
    stages: Stages
    engines: EngineClient
    forwarder: Forwarder


def build_dispatch(
    base: Base,
    renderer: Renderer,
    placer: Placer,
    verification: Verification,
    admission: TenantAdmission,
    has_peers: Callable[[], bool],
) -> Dispatch:
    settings, spec = base.settings, base.spec
    handover = build_handover(settings, base.fleet, base.upstream, base.metrics, lambda: renderer.usable)
    delivery: Delivery = handover or BytesDelivery()
    encoding, encoder_list, weights = _build_encoding(base, verification.probes, delivery, has_peers)
    exchange = EngineClient(base.upstream, spec.engine.type, settings.engine_key)
    offload = OffloadPolicy(spec.routing.min_prefill_tokens, always=settings.always_hand_over)
    shared = spec.engine.type, base.roles, base.fleet, placer, base.metrics, exchange.ask
    leases = BlockLeases(lease_seconds(spec.engine.kv_connector))
    stages = Stages(*shared, encoding=encoding, offload=offload, delivery=delivery, leases=leases)
    on_send = verification.learning.on_send if verification.learning is not None else lambda sent, prepared: None
    waiting = _build_waiting(base, placer, admission)
    forwarder = Forwarder(placer, exchange, base.metrics, stages, delivery=delivery, waiting=waiting, on_send=on_send)
    return Dispatch(handover, encoding, encoder_list, weights, stages, exchange, forwarder)


def _build_waiting(base: Base, placer: Placer, admission: TenantAdmission) -> WaitingLine | None:
    tenants = base.spec.frontend.tenants
    if tenants is None or not tenants.max_wait_seconds:
        return None
    line = WaitingLine(base.spec.routing.max_queued_requests, tenants.max_wait_seconds, admission.weight)
    placer.answer_listeners.append(line.wake)
    base.fleet.change_listeners.append(line.wake)
    base.metrics.waiting.set_function(lambda: line.waiting)
    return line


def _build_encoding(
    base: Base, probes: EncoderProbes, delivery: Delivery, has_peers: Callable[[], bool]
) -> tuple[ImageSender | None, EncoderAnnouncer | None, EncoderWeights | None]:
    """Build the router's own encoding stage with its weights, or the list of encoders for engines that ask them."""
    settings, spec = base.settings, base.spec
    if "encoder" not in base.roles:
        return None, None, None
    if base.engine.asks_encoders_itself:
        seconds = spec.verification.timeout_seconds
        return None, EncoderAnnouncer(settings.router_id, base.fleet, base.feed_of, seconds), None
    weights = EncoderWeights(settings.resource_file, settings.deployment, base.fleet.changed)
    pods = EncoderPods(settings, base.fleet, probes, base.upstream, delivery, weights)
    claims = EncodingClaims(settings.router_id, lambda: heard_encoders(base.fleet), base.feed_of, has_peers)
    encoding = ImageSender(EncoderScheduler(spec.routing.encoder_scheduling), pods.post, claims=claims)
    base.fleet.change_listeners.append(lambda: encoding.update(pods.encoders()))
    return encoding, None, weights


def build_needs_prompt(base: Base, preparer: Preparer, sampler: ParitySampler) -> Callable[[str], bool]:
    """Return whether a request of an id needs a predicted prompt: no under a policy that ignores it, but samples."""
    plain = base.roles <= {"worker", RENDERER_ROLE} and preparer.sentinels is None
    if plain and base.spec.routing.policy in PROMPT_BLIND_POLICIES:
        return sampler.wants
    return lambda request_id: True


def build_tracing(endpoint: str, metrics: Metrics) -> Tracing:
    if not endpoint:
        return NO_TRACING
    # Imported here so that only a router with tracing loads the SDK.
    from mmrouter_router.telemetry.otlp_export import OtlpTracing  # noqa: PLC0415

    return OtlpTracing.to(endpoint, os.environ, lambda result, count: metrics.spans.labels(result).inc(count))
