"""The sidecar's own metrics, all named ``mmrouter_sidecar_*``."""

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from mmrouter_lib import native
from mmrouter_sidecar.engine.load_metrics import EngineLoad

PREFIX = "mmrouter_sidecar"


class Counted(NamedTuple):
    """What is counted in plain numbers, because a metric object costs as much as several blocks."""

    batches: int
    events: Mapping[str, int]
    held: int
    aside: int


class Metrics:
    """One registry per process, so that tests can have several."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"{PREFIX}_{name}", text, labels, registry=self.registry)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"{PREFIX}_{name}", text, registry=self.registry)

        self.duplicates = counter("duplicates", "Event batches that came again and were known.")
        self.gaps = counter("gaps", "Replays asked for because a number was missing.")
        self.skipped = counter("skipped_batches", "Event batches that the engine no longer had.")
        self.replays = counter("replays", "Replays, by outcome.", "outcome")
        self.lost = counter("lost", "Losses of history that ended an epoch, by reason.", "reason")
        self.epochs = counter("epochs", "Epochs begun, by reason.", "reason")
        self.connections = counter("engine_connections", "Connections of the engine's publisher, by event.", "event")
        self.frames = counter("engine_frames_refused", "Messages on an engine socket that are no event frame.")
        self.deltas = counter("deltas", "Deltas published.")
        self.requests = counter("requests", "Questions of routers, by kind.", "kind")
        self.refusals = counter("refusals", "Questions and handshakes refused, by reason.", "reason")
        self.unsent = counter("answers_unsent", "Answers that a slow or vanished router did not take.")
        self.probes = counter("probe_failures", "Engine HTTP probes that failed, by path.", "path")
        self.journal_errors = counter("journal_errors", "Failures of the journal; it is off after one.")
        self.journal_bytes = gauge("journal_bytes", "Size of the journal.")
        self.lag = gauge("lag_seconds", "Age of the last event batch when it was applied.")
        self.up = gauge("engine_up", "1 while the engine answers.")
        gauge("native", "1 where the compiled form does the work, 0 where the one in Python does.").set(
            native.form == "native"
        )
        self.encodes = counter(
            "encodes", "Images passed to encoders for the engine, by what became of them.", "outcome"
        )
        self.encode_failures = counter("encode_failures", "Encoders that failed with an image, by cause.", "cause")
        self.encoders = Gauge(
            f"{PREFIX}_encoders", "Encoders that routers told of, by state.", ["state"], registry=self.registry
        )
        self.shm: Mapping[str, int] = {}
        """Bytes of the node's shared directory by state."""
        self.shm_pressure = gauge("shm_pressure_ratio", "Share of the node's shared directory that is taken.")
        self.shm_reclaimed = counter("shm_reclaimed", "Files removed from the node's shared directory.", "reason")
        self.shm_reclaimed_bytes = counter("shm_reclaimed_bytes", "Bytes that they had.", "reason")
        self.shm_errors = counter("shm_errors", "Steps of the janitor that the file system did not let it do.")
        self.load = EngineLoad()
        self.registry.register(self.load)

    def watch(self, counted: Callable[[], Counted]) -> None:
        """Expose what the hot path counts by itself, when it is asked for."""
        self.registry.register(_Collector(counted, lambda: self.shm))


class _Collector:
    def __init__(self, counted: Callable[[], Counted], shm: Callable[[], Mapping[str, int]]) -> None:
        self._counted, self._shm = counted, shm

    def collect(self) -> Iterable[Metric]:
        """Counts by reason (blocks for stored, removed and quarantined ones, else events), and what is held."""
        counted = self._counted()
        yield CounterMetricFamily(f"{PREFIX}_batches", "Event batches applied.", counted.batches)
        events = CounterMetricFamily(f"{PREFIX}_events", "Blocks and events by what became of them.", labels=["what"])
        for what, number in sorted(counted.events.items()):
            events.add_metric([what], number)
        yield events
        yield GaugeMetricFamily(f"{PREFIX}_blocks", "Distinct block keys held.", counted.held)
        yield GaugeMetricFamily(f"{PREFIX}_blocks_aside", "Blocks held whose key is not known.", counted.aside)
        shm = GaugeMetricFamily(
            f"{PREFIX}_shm_bytes", "Bytes in the node's shared directory, the same from all its pods.", labels=["state"]
        )
        for state, size in sorted(self._shm().items()):
            shm.add_metric([state], size)
        yield shm
