"""Names and labels of everything the router counts (facts on Kubernetes 10: bounded labels, base units)."""

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, Metric

from mmrouter_lib import native

_LATENCY = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_FIRST_BYTE = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


RENDERER_CAUSES = frozenset(f"renderer_{cause}" for cause in ("nobody", "timeout", "lost", "refused", "unusable"))
"""Why a renderer gave no prompt."""
PARITY_CAUSES = RENDERER_CAUSES | {
    *("", "template", "count", "identity", "block_size", "salt", "truncation", "unknown")
}
"""Values of the label ``cause``; every other cause that is known inside counts as unknown."""


class Parity:
    """``mmrouter_parity_total``: comparisons of predicted with published blocks, and of prompts with renderings.

    A router serves one engine type and one family, which :meth:`describe` tells once they are known.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._counter = Counter(
            "mmrouter_parity_total",
            "Predicted against published blocks and rendered prompts, by result and cause",
            ["engine", "family", "result", "cause"],
            registry=registry,
        )
        self._engine, self._family = "", ""

    def describe(self, engine: str, family: str) -> None:
        """Name the deployment's engine type and the model's family."""
        self._engine, self._family = engine, family

    def labels(self, result: str, cause: str) -> Counter:
        """Return the counter of a result (True, False, Unknown) and its cause."""
        cause = cause if cause in PARITY_CAUSES else "unknown"
        return self._counter.labels(self._engine, self._family, result, cause)


class _Collector:
    """Exposes what hot paths count by themselves, when it is asked for."""

    def __init__(self, collect: Callable[[], Iterator[Metric]]) -> None:
        self.collect = collect


class Metrics:
    """The router's metrics, in a registry of their own so that tests can have several routers in one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        r = self.registry
        Gauge(
            "mmrouter_native", "1 where the compiled form does the work, 0 where the one in Python does", registry=r
        ).set(native.form == "native")
        self.requests = Counter(
            "mmrouter_requests_total", "Client requests by path and status", ["path", "code"], registry=r
        )
        self.control_refusals = Counter(
            "mmrouter_control_refusals_total",
            "Requests refused on the control port, by whether the token is missing or wrong, and client requests whose "
            "header has a wrong one",
            ["reason"],
            registry=r,
        )
        self.decisions = Counter(
            "mmrouter_decisions_total", "Routing decisions by exactness and reason", ["exactness", "reason"], registry=r
        )
        self.unresolved = Counter(
            "mmrouter_unresolved_images_total",
            "Images that were served and not predicted, by cause",
            ["reason"],
            registry=r,
        )
        self.prompt_blocks = Counter(
            "mmrouter_prompt_blocks_total", "Complete prompt blocks of routed requests", registry=r
        )
        self.overlap_blocks = Counter(
            "mmrouter_overlap_blocks_total", "Prompt blocks that the chosen worker held", registry=r
        )
        self.stage = Histogram(
            "mmrouter_stage_seconds", "Time spent per stage of a request", ["stage"], buckets=_LATENCY, registry=r
        )
        self.first_byte = Histogram(
            "mmrouter_first_byte_seconds", "Request received to first answer byte", buckets=_FIRST_BYTE, registry=r
        )
        self.chain = Counter(
            "mmrouter_chain_total",
            "Stages before an answer (encode, prefill), done or gone without, by why",
            ["stage", "outcome"],
            registry=r,
        )
        self.chain_seconds = Histogram(
            "mmrouter_chain_seconds", "Seconds that a stage took", ["stage"], buckets=_FIRST_BYTE, registry=r
        )
        self.degraded = Counter(
            "mmrouter_degraded_total",
            "Requests, once each, that had to do without a pool because none of its pods could take work",
            ["missing"],
            registry=r,
        )
        self.handovers = Counter(
            "mmrouter_handover_total",
            "Images to engines: with an empty reason how they came, else a way that they did not come by and why",
            ["how", "reason"],
            registry=r,
        )
        self.handover_bytes = Counter(
            "mmrouter_handover_bytes_total", "Encoded bytes of images that came, by how", ["how"], registry=r
        )
        self.handover_seconds = Histogram(
            "mmrouter_handover_seconds",
            "Seconds until an image was there, in a file, or in the body",
            ["how"],
            buckets=_LATENCY,
            registry=r,
        )
        self.retries = Counter(
            "mmrouter_retries_total", "Requests sent to another worker, by cause", ["cause"], registry=r
        )
        self.quarantined = Counter(
            "mmrouter_quarantined_total", "Requests refused because they ended engines", registry=r
        )
        self.overload = Counter(
            "mmrouter_overload_refusals_total",
            "Requests answered 429 because too many wait for engines (queue_full) or too many bytes are held "
            "(router_full)",
            ["reason"],
            registry=r,
        )
        self.stripped = Counter(
            "mmrouter_stripped_fields_total", "Request fields that clients may not set, removed", ["field"], registry=r
        )
        self.disconnects = Counter("mmrouter_client_disconnects_total", "Clients that left before the end", registry=r)
        self.in_flight = 0
        """Requests that are being answered; a plain number, as every request changes it twice."""
        Gauge("mmrouter_requests_in_flight", "Requests that are being answered", registry=r).set_function(
            lambda: self.in_flight
        )
        self.workers = Gauge("mmrouter_workers", "Workers by standing", ["standing"], registry=r)
        self.discovery_errors = Counter(
            "mmrouter_discovery_errors_total", "Failed lists and watches of pods, by reason", ["reason"], registry=r
        )
        self.discovery_synced = Gauge("mmrouter_discovery_synced", "1 while the watch of pods works", registry=r)
        self.index_keys = Gauge("mmrouter_index_keys", "Distinct block keys in the index", registry=r)
        self.deltas = 0
        """Deltas applied to the index. A plain number, because one is applied in the time that a counter takes."""
        r.register(_Collector(self._counted))
        self.feed_events = Counter(
            "mmrouter_feed_events_total", "Feed transitions and questions", ["event"], registry=r
        )
        self.feed_ignored = Counter(
            "mmrouter_feed_ignored_total", "Feed frames not indexed, by reason", ["reason"], registry=r
        )
        self.sightings = Counter("mmrouter_feed_sightings_total", "First sightings of an image in the feed", registry=r)
        self.work = Counter(
            "mmrouter_work_told_total",
            "Times that what this router has under way at an engine was told to other routers",
            registry=r,
        )
        self.sentinels = Counter(
            "mmrouter_sentinels_total",
            "What became known of SGLang's sentinels: a fingerprint calibrated or demoted, an image proven, learned, "
            "ambiguous, asked about or unanswered",
            ["event"],
            registry=r,
        )
        self.rendered = Counter(
            "mmrouter_rendered_total",
            "Prompts asked of renderers, by where they came from or why not",
            ["source"],
            registry=r,
        )
        self.spans = Counter(
            "mmrouter_spans_total", "Spans of traces by what became of them, where they are on", ["result"], registry=r
        )
        self.parity = Parity(r)
        self.parity_dropped = Counter(
            "mmrouter_parity_dropped_total",
            "Samples that were not compared, because too many or too large ones wait",
            registry=r,
        )

    def _counted(self) -> Iterator[Metric]:
        yield CounterMetricFamily("mmrouter_feed_deltas", "Deltas applied to the index", self.deltas)
