"""The table of the router's Prometheus metrics: one line declares one metric with its help text and labels.

docs/observability.md is made from these lines. Labels are bounded and units are base units.
"""

from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from mmrouter_lib import __version__, native
from mmrouter_router.core.errors import OVERLOADED

_MILLISECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_ANSWERS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)
_BLOCKS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 4096)
_RATIO = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)
_FETCH = (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)

RENDERER_CAUSES = frozenset(f"renderer_{cause}" for cause in ("unavailable", "timeout", "lost", "refused", "unusable"))
# Values of the label ``cause``; any other cause counts as unknown.
PARITY_CAUSES = RENDERER_CAUSES | {"", "template", "count", "identity", "block_size", "salt", "truncation", "unknown"}


class Metrics(Collector):
    """The metrics of one router, in a registry of their own: tests run several routers in one process."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()

        # prometheus_client appends ``_total`` to the names of counters.
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"mmrouter_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"mmrouter_{name}", text, labels, registry=registry)

        def histogram(name: str, buckets: Sequence[float], text: str, *labels: str) -> Histogram:
            return Histogram(f"mmrouter_{name}", text, labels, registry=registry, buckets=buckets)

        self.requests = counter("requests", "Client requests by path and status", "path", "code")
        self.request_seconds = histogram(
            "request_seconds", _ANSWERS, "Time from the request to the end of a complete answer"
        )
        self.control_refusals = counter(
            "control_refusals",
            "Requests without the control token or with a wrong one, on the control port or in a header",
            "reason",
        )
        self.decisions = counter("decisions", "Routing decisions by exactness and reason", "exactness", "reason")
        self.unresolved = counter(
            "unresolved_images", "Images, videos and audio that were served without a prediction, by cause", "reason"
        )
        self.prompt_blocks = counter("prompt_blocks", "Complete prompt blocks of routed requests", "worker")
        self.overlap_blocks = counter("overlap_blocks", "Prompt blocks that the chosen worker held", "worker")
        self.unproved_blocks = counter(
            "unproved_blocks", "Further prompt blocks that the chosen worker held and may not have hit", "worker"
        )
        self.tier_blocks = counter("tier_blocks", "Further prompt blocks that its lower tiers held", "worker")
        self.round_robin_blocks = counter(
            "round_robin_blocks",
            "Prompt blocks that round robin would have found in the same caches: what the candidates hold on average",
        )
        self.hit_ratio = histogram(
            "hit_ratio", _RATIO, "Share of a request's prompt blocks that the chosen worker held, for predicted prompts"
        )
        self.regret = histogram(
            "regret_blocks",
            _BLOCKS,
            "Blocks of a predicted prompt that another verified worker held beyond the hit at the chosen one",
        )
        self.stage = histogram("stage_seconds", _MILLISECONDS, "Time spent per stage of a request", "stage")
        self.first_byte = histogram(
            "first_byte_seconds",
            _SECONDS,
            "Time from the request to the answer's first byte; cached: hit where the worker held at least half of the "
            "prompt, else miss; unknown where it was not predicted",
            "cached",
        )
        self.chain = counter(
            "chain", "Stages before an answer (encode, prefill), by outcome: done, or why skipped", "stage", "outcome"
        )
        self.chain_seconds = histogram("chain_seconds", _SECONDS, "Time that a stage before an answer took", "stage")
        self.degraded = counter(
            "degraded", "Requests served without a pool because none of its pods could take work", "missing"
        )
        self.handovers = counter(
            "handover", "Images sent to engines, by way; with a reason: a way not taken, and why", "how", "reason"
        )
        self.handover_bytes = counter("handover_bytes", "Encoded bytes of images sent to engines, by way", "how")
        self.handover_seconds = histogram(
            "handover_seconds", _MILLISECONDS, "Time to put an image into its file or into the body", "how"
        )
        self.handover_cost = gauge(
            "handover_cost_seconds",
            "Measured time of an engine per visual token, where it (by: engine) or a renderer (by: renderer) processes "
            "images; 0 while it is unknown",
            *("pool", "by"),
        )
        self.retries = counter("retries", "Requests sent to another worker, by cause", "cause")
        self.stream_breaks = counter(
            "stream_breaks",
            "Streams that broke before their end, by cause; outcome: continued, or why not",
            *("cause", "outcome"),
        )
        self.quarantined = counter("quarantined", "Requests refused because they ended engines")
        self.overload = counter(
            "overload_refusals",
            "Requests answered 429: full queues of engines (queue_full), bytes held (router_full), or a tenant's limit "
            "(rate_limited, concurrency_limited)",
            "reason",
        )
        self.waiting = gauge(
            "waiting_requests", "Requests that wait for their tenant's turn while all engines are full"
        )
        self.stripped = counter(
            "stripped_fields", "Fields removed from requests because clients may not set them", "field"
        )
        self.connections = counter(
            "connections_over_limit",
            "Connections beyond the limit of open files: refused, or idle ones closed for them",
            "outcome",
        )
        self.tls = counter(
            "tls", "TLS of the client port: certificates loaded or refused, and failed handshakes", "event"
        )
        self.engine_tls = counter(
            "engine_tls",
            "TLS to engines: CAs loaded or refused, and refused connections by reason (untrusted, name, expired, "
            "handshake_failed)",
            "event",
        )
        self.tls_refused = gauge(
            "tls_refused",
            "1 while a certificate or an engine_ca that was put in place cannot be used, and the earlier one still is",
            "files",
        )
        self.slow_clients = counter(
            "slow_clients", "Clients disconnected for a slow request head, request body, or read of the answer", "part"
        )
        self.disconnects = counter("client_disconnects", "Clients that disconnected before the end of their answer")
        self.workers = gauge("workers", "Workers by standing", "standing")
        self.unroutable = gauge("unroutable_workers", "Workers that get no requests, by cause", "cause")
        self.discovery_errors = counter("discovery_errors", "Failed lists and watches of pods, by reason", "reason")
        self.discovery_synced = gauge("discovery_synced", "1 while the watch of pods works")
        self.index_keys = gauge("index_keys", "Distinct block keys in the index")
        self.feed_events = counter("feed_events", "State changes of feeds and requests to sidecars, by event", "event")
        self.feed_ignored = counter("feed_ignored", "Feed frames that were not indexed, by reason", "reason")
        self.sightings = counter("feed_sightings", "First sightings of an image in the feed")
        self.work = counter(
            "work_told", "Messages to other routers about the requests that this router has at an engine"
        )
        self.sentinels = counter(
            "sentinels",
            "SGLang's sentinels: fingerprints calibrated or demoted; images by how they became known",
            "event",
        )
        self.rendered = counter("rendered", "Prompts requested from renderers, by source or cause of failure", "source")
        self.spans = counter("spans", "Spans of traces by result, where tracing is on", "result")
        self.parity_dropped = counter("parity_dropped", "Samples dropped because too many or too large ones wait")
        self.media_resolved = counter("media_resolved", "Media resolved, by source of the bytes", "source")
        self.media_bytes = counter("media_bytes", "Bytes of resolved media, by source", "source")
        self.media_refused = counter("media_refused", "Media that was not resolved, by reason", "reason")
        self.media_joined = counter("media_joined", "Requests for media that joined a fetch in progress")
        self.media_fetch_seconds = histogram("media_fetch_seconds", _FETCH, "Time of one fetch with its redirects")
        self.media_fetching = gauge("media_fetching", "Fetches in progress")
        self.media_cache_bytes = gauge("media_cache_bytes", "Bytes held by the media cache")
        build_info = gauge("build_info", "Version of the router; always 1", "version")
        native_form = gauge("native", "1 where the compiled form of the hot loops runs, 0 where the Python form does")
        in_flight = gauge("requests_in_flight", "Requests that are being answered")
        parity = counter(
            "parity",
            "Predicted blocks compared with published ones, and prompts with rendered ones",
            *("engine", "family", "result", "cause"),
        )

        self.in_flight = 0  # requests that are being answered; a plain number, because every request changes it twice
        self.deltas = 0  # applied to the index; a plain number, because applying one takes as long as counting one
        in_flight.set_function(lambda: self.in_flight)
        native_form.set(native.form == "native")
        build_info.labels(__version__).set(1)
        for reason in OVERLOADED:
            self.overload.labels(reason)  # at 0: the first of a kind is an increase
        registry.register(self)
        self.parity = Parity(parity)

    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily("mmrouter_feed_deltas", "Deltas applied to the index", self.deltas)


class Parity:
    """``mmrouter_parity_total`` with the labels of the deployment, which :meth:`describe` sets."""

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self._engine, self._family = "", ""

    def describe(self, engine: str, family: str) -> None:
        self._engine, self._family = engine, family
        for cause in PARITY_CAUSES:
            self.labels("False", cause)  # at 0: the first one is an increase

    def labels(self, result: str, cause: str) -> Counter:
        cause = cause if cause in PARITY_CAUSES else "unknown"
        return self._counter.labels(self._engine, self._family, result, cause)
