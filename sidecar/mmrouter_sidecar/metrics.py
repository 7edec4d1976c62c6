"""Prometheus metrics of the sidecar, all named ``mmrouter_sidecar_*``."""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from mmrouter_lib import native
from mmrouter_lib.engines.base.adapter import RankLoad, TokenCounts

PREFIX = "mmrouter_sidecar"
BUSY_SAMPLES = 60  # samples of mmrouter_sidecar_busy_ratio: a minute at one per second


class HotPathCounts(NamedTuple):
    """Plain numbers of the hot path, where updating a metric object costs as much as several blocks."""

    batches: int
    events: Mapping[str, int]
    held: int
    aside: int


class EngineLoad:
    """The engine's load and tokens, one value per pod, because its own metrics differ by engine type and rank; none
    while it is down."""

    def __init__(self) -> None:
        self.text = ""  # the engine's own exposition; empty while it is down
        self._ranks: Mapping[int, RankLoad] = {}
        self._tokens: TokenCounts | None = None
        self._busy: deque[bool] = deque(maxlen=BUSY_SAMPLES)

    def update(self, text: str, ranks: Mapping[int, RankLoad], tokens: TokenCounts | None = None) -> None:
        self.text, self._ranks, self._tokens = text, ranks, tokens
        if ranks:
            self._busy.append(any(load.running or load.waiting for load in ranks.values()))

    def clear(self) -> None:
        """Drop the last sample: the engine is down."""
        self.text, self._ranks, self._tokens = "", {}, None
        self._busy.clear()

    def collect(self) -> Iterable[Metric]:
        """Yield gauges and counters; none before the first sample."""
        if self._tokens is not None:
            looked_up = "Prompt tokens that the engine looked up in its cache."
            yield CounterMetricFamily(f"{PREFIX}_prompt_tokens", looked_up, self._tokens.prompt)
            cached = "Prompt tokens that the engine found in its cache, as it counts them."
            yield CounterMetricFamily(f"{PREFIX}_cached_tokens", cached, self._tokens.cached)
            yield CounterMetricFamily(f"{PREFIX}_generated_tokens", "Tokens generated.", self._tokens.generated)
        ranks = self._ranks.values()
        if not ranks:
            return
        usage = sum(load.kv_usage for load in ranks) / len(ranks)
        yield GaugeMetricFamily(f"{PREFIX}_kv_usage_ratio", "Share of the engine's KV blocks in use.", usage)
        waiting = sum(load.waiting for load in ranks)
        yield GaugeMetricFamily(f"{PREFIX}_queue_depth", "Requests that wait in the engine.", waiting)
        busy = sum(self._busy) / len(self._busy)
        yield GaugeMetricFamily(
            f"{PREFIX}_busy_ratio", "Share of the last minute in which the engine had a request.", busy
        )


class Metrics:
    """All metrics with a registry of their own, so that tests can have several."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"{PREFIX}_{name}", text, labels, registry=self.registry)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"{PREFIX}_{name}", text, registry=self.registry)

        self.duplicates = counter("duplicates", "Event batches received more than once.")
        self.gaps = counter("gaps", "Replays requested because a sequence number was missing.")
        self.skipped = counter("skipped_batches", "Event batches that the engine no longer had.")
        self.replays = counter("replays", "Replays, by outcome.", "outcome")
        self.lost = counter("lost", "Losses of event history that ended an epoch, by reason.", "reason")
        self.epochs = counter("epochs", "Epochs begun, by reason.", "reason")
        self.connections = counter("engine_connections", "Connections of the engine's publisher, by event.", "event")
        self.frames = counter("engine_frames_refused", "Messages on an engine socket that are not event frames.")
        self.deltas = counter("deltas", "Deltas published.")
        self.requests = counter("requests", "Requests of routers, by kind.", "kind")
        self.refusals = counter("refusals", "Requests and handshakes refused, by reason.", "reason")
        self.unsent = counter("answers_unsent", "Answers dropped because the router was slow or gone.")
        self.probes = counter("probe_failures", "Engine HTTP probes that failed, by path.", "path")
        self.journal_errors = counter("journal_errors", "Failures of the journal, which is switched off after one.")
        self.journal_bytes = gauge("journal_bytes", "Size of the journal.")
        self.lag = gauge("lag_seconds", "Age of the last event batch when it was applied.")
        self.up = gauge("engine_up", "1 while the engine answers.")
        gauge("native", "1 if the compiled form is in use, 0 for the Python one.").set(native.form == "native")
        self.encodes = counter("encodes", "Images forwarded to encoders for the engine, by outcome.", "outcome")
        self.encode_failures = counter("encode_failures", "Failures of encoders with an image, by cause.", "cause")
        self.encoders = Gauge(
            f"{PREFIX}_encoders", "Encoders reported by routers, by state.", ["state"], registry=self.registry
        )
        self.shm: Mapping[str, int] = {}  # bytes of the node's shared directory by state
        self.shm_pressure = gauge("shm_pressure_ratio", "Used share of the node's shared directory.")
        self.shm_reclaimed = counter("shm_reclaimed", "Files removed from the node's shared directory.", "reason")
        self.shm_reclaimed_bytes = counter("shm_reclaimed_bytes", "Bytes of the files removed.", "reason")
        self.shm_errors = counter("shm_errors", "Failed file system operations of the janitor.")
        self.load = EngineLoad()
        self.registry.register(self.load)

    def watch(self, counts: Callable[[], HotPathCounts]) -> None:
        """Expose the counts of the hot path when the registry is scraped."""
        self._counts = counts
        self.registry.register(self)

    def collect(self) -> Iterable[Metric]:
        """Yield counts by reason (of blocks if stored, removed or put aside, else of events), and the blocks held."""
        counts = self._counts()
        yield CounterMetricFamily(f"{PREFIX}_batches", "Event batches applied.", counts.batches)
        events = CounterMetricFamily(f"{PREFIX}_events", "Blocks and events, by outcome.", labels=["what"])
        for what, number in sorted(counts.events.items()):
            events.add_metric([what], number)
        yield events
        yield GaugeMetricFamily(f"{PREFIX}_blocks", "Distinct block keys held.", counts.held)
        yield GaugeMetricFamily(f"{PREFIX}_blocks_aside", "Blocks held whose key is unknown.", counts.aside)
        shm = GaugeMetricFamily(
            f"{PREFIX}_shm_bytes", "Bytes in the node's shared directory, the same from all its pods.", labels=["state"]
        )
        for state, size in sorted(self.shm.items()):
            shm.add_metric([state], size)
        yield shm
