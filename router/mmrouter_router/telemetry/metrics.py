"""The table of the router's Prometheus metrics: one line declares one metric with its help text and labels.

docs/observability.md is made from these lines. Labels are bounded and units are base units.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, Metric

from mmrouter_lib import native

_MILLISECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_FETCH = (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)

RENDERER_CAUSES = frozenset(f"renderer_{cause}" for cause in ("nobody", "timeout", "lost", "refused", "unusable"))
"""Why a renderer gave no prompt."""
PARITY_CAUSES = RENDERER_CAUSES | {
    *("", "template", "count", "identity", "block_size", "salt", "truncation", "unknown")
}
"""Values of the label ``cause``; any other cause counts as unknown."""


@dataclass(frozen=True)
class _Declared:
    """A line of the table; :class:`Metrics` replaces it by the metric that it declares."""

    kind: type[Counter] | type[Gauge] | type[Histogram]
    name: str
    help: str
    labels: Sequence[str]
    options: dict[str, Any]


def _counter(name: str, text: str, *labels: str) -> Counter:
    return cast(Counter, _Declared(Counter, name, text, labels, {}))


def _gauge(name: str, text: str, *labels: str) -> Gauge:
    return cast(Gauge, _Declared(Gauge, name, text, labels, {}))


def _histogram(name: str, text: str, *labels: str, buckets: Sequence[float]) -> Histogram:
    return cast(Histogram, _Declared(Histogram, name, text, labels, {"buckets": buckets}))


class _Table:
    """All metrics of the router that are counted through prometheus-client."""

    requests = _counter("requests_total", "Client requests by path and status", "path", "code")
    control_refusals = _counter(
        "control_refusals_total",
        "Requests without the control token or with a wrong one, on the control port or in a header",
        "reason",
    )
    decisions = _counter("decisions_total", "Routing decisions by exactness and reason", "exactness", "reason")
    unresolved = _counter("unresolved_images_total", "Images that were served without a prediction, by cause", "reason")
    prompt_blocks = _counter("prompt_blocks_total", "Complete prompt blocks of routed requests")
    overlap_blocks = _counter("overlap_blocks_total", "Prompt blocks that the chosen worker held")
    stage = _histogram("stage_seconds", "Time spent per stage of a request", "stage", buckets=_MILLISECONDS)
    first_byte = _histogram("first_byte_seconds", "Time from the request to the answer's first byte", buckets=_SECONDS)
    chain = _counter(
        "chain_total", "Stages before an answer (encode, prefill), by outcome: done, or why skipped", "stage", "outcome"
    )
    chain_seconds = _histogram("chain_seconds", "Time that a stage before an answer took", "stage", buckets=_SECONDS)
    degraded = _counter(
        "degraded_total", "Requests served without a pool because none of its pods could take work", "missing"
    )
    handovers = _counter(
        "handover_total", "Images sent to engines, by way; with a reason: a way not taken, and why", "how", "reason"
    )
    handover_bytes = _counter("handover_bytes_total", "Encoded bytes of images sent to engines, by way", "how")
    handover_seconds = _histogram(
        "handover_seconds", "Time to put an image into its file or into the body", "how", buckets=_MILLISECONDS
    )
    retries = _counter("retries_total", "Requests sent to another worker, by cause", "cause")
    quarantined = _counter("quarantined_total", "Requests refused because they ended engines")
    overload = _counter(
        "overload_refusals_total",
        "Requests answered 429: full queues of engines (queue_full) or bytes held (router_full)",
        "reason",
    )
    stripped = _counter(
        "stripped_fields_total", "Fields removed from requests because clients may not set them", "field"
    )
    disconnects = _counter("client_disconnects_total", "Clients that disconnected before the end of their answer")
    workers = _gauge("workers", "Workers by standing", "standing")
    discovery_errors = _counter("discovery_errors_total", "Failed lists and watches of pods, by reason", "reason")
    discovery_synced = _gauge("discovery_synced", "1 while the watch of pods works")
    index_keys = _gauge("index_keys", "Distinct block keys in the index")
    feed_events = _counter("feed_events_total", "State changes of feeds and requests to sidecars, by event", "event")
    feed_ignored = _counter("feed_ignored_total", "Feed frames that were not indexed, by reason", "reason")
    sightings = _counter("feed_sightings_total", "First sightings of an image in the feed")
    work = _counter("work_told_total", "Messages to other routers about the requests that this router has at an engine")
    sentinels = _counter(
        "sentinels_total",
        "SGLang's sentinels: fingerprints calibrated or demoted; images by how they became known",
        "event",
    )
    rendered = _counter("rendered_total", "Prompts requested from renderers, by source or cause of failure", "source")
    spans = _counter("spans_total", "Spans of traces by result, where tracing is on", "result")
    parity_dropped = _counter("parity_dropped_total", "Samples dropped because too many or too large ones wait")
    media_resolved = _counter("media_resolved_total", "Media resolved, by source of the bytes", "source")
    media_bytes = _counter("media_bytes_total", "Bytes of resolved media, by source", "source")
    media_refused = _counter("media_refused_total", "Media that was not resolved, by reason", "reason")
    media_joined = _counter("media_joined_total", "Requests for media that joined a fetch in progress")
    media_fetch_seconds = _histogram("media_fetch_seconds", "Time of one fetch with its redirects", buckets=_FETCH)
    media_fetching = _gauge("media_fetching", "Fetches in progress")
    media_cache_bytes = _gauge("media_cache_bytes", "Bytes held by the media cache")
    _native = _gauge("native", "1 where the compiled form of the hot loops runs, 0 where the Python form does")
    _in_flight = _gauge("requests_in_flight", "Requests that are being answered")
    _parity = _counter(
        "parity_total",
        "Predicted blocks compared with published ones, and prompts with rendered ones",
        "engine",
        "family",
        "result",
        "cause",
    )


class Metrics(_Table):
    """The metrics of one router, in a registry of their own: tests run several routers in one process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        for attribute, line in vars(_Table).items():
            if isinstance(line, _Declared):
                name = f"mmrouter_{line.name}"
                metric = line.kind(name, line.help, line.labels, registry=self.registry, **line.options)
                setattr(self, attribute, metric)
        self._native.set(native.form == "native")
        self.in_flight = 0
        """Requests that are being answered; a plain number, because every request changes it twice."""
        self._in_flight.set_function(lambda: self.in_flight)
        self.deltas = 0
        """Deltas applied to the index; a plain number, because applying one takes as long as counting one."""
        self.registry.register(_Collector(self._collect_deltas))
        self.parity = Parity(self._parity)

    def _collect_deltas(self) -> Iterator[Metric]:
        yield CounterMetricFamily("mmrouter_feed_deltas", "Deltas applied to the index", self.deltas)


class Parity:
    """``mmrouter_parity_total`` with the labels of the deployment, which :meth:`describe` sets."""

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self._engine, self._family = "", ""

    def describe(self, engine: str, family: str) -> None:
        """Set the deployment's engine type and the model's family."""
        self._engine, self._family = engine, family

    def labels(self, result: str, cause: str) -> Counter:
        """Return the counter of a result (True, False, Unknown) and its cause."""
        cause = cause if cause in PARITY_CAUSES else "unknown"
        return self._counter.labels(self._engine, self._family, result, cause)


class _Collector:
    """Exposes what hot paths count as plain numbers."""

    def __init__(self, collect: Callable[[], Iterator[Metric]]) -> None:
        self.collect = collect
