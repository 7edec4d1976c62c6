"""``/metrics`` with the names and labels of the simulated engine, read at each scrape.

It has what the sidecar and tests of deployments read: load, caches, geometry. ``mmrouter_sim_visual_tokens`` is the
simulator's own.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

Gauge, Counter = GaugeMetricFamily, CounterMetricFamily


class Row(NamedTuple):
    """One metric. ``value``: of a rank's scheduler, or of the encoder of an encode-only engine."""

    kind: type[GaugeMetricFamily | CounterMetricFamily]
    name: str
    text: str
    value: Callable[[Any], float]


def constant(_source: Any) -> float:
    return 1


@dataclass(frozen=True)
class Samples:
    """The metrics of one process: one set of rows per source, which is a data-parallel rank or an encoder.

    ``rank_label`` names the label with a source's index, if there is one. ``described`` are rows of value 1 with labels
    that depend on the source and its index.
    """

    sources: Sequence[Any]
    rows: Sequence[Row]
    labels: Mapping[str, str]
    rank_label: str = ""
    described: Mapping[Row, Callable[[int, Any], Mapping[str, str]]] = field(default_factory=dict)


class EngineMetrics(Collector):
    def __init__(self, samples: Samples) -> None:
        self.registry = CollectorRegistry()
        self._samples = samples
        self.registry.register(self)

    def collect(self) -> Iterator[Metric]:
        samples = self._samples
        for row in samples.rows:
            yield self._family(row, lambda rank, _source: self._labels(rank))
        for row, labels in samples.described.items():
            yield self._family(row, labels)

    def _labels(self, rank: int) -> dict[str, str]:
        samples = self._samples
        return {**samples.labels, samples.rank_label: str(rank)} if samples.rank_label else dict(samples.labels)

    def _family(self, row: Row, labels: Callable[[int, Any], Mapping[str, str]]) -> Metric:
        values = [(labels(rank, source), row.value(source)) for rank, source in enumerate(self._samples.sources)]
        family = row.kind(row.name, row.text, labels=tuple(values[0][0]) if values else ())
        for names, value in values:
            family.add_metric(list(names.values()), value)
        return family
