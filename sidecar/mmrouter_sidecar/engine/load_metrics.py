"""What an engine says of its load, for whoever may not ask it: its HTTP port is open to routers only.

Autoscalers want one value per pod, so the ranks of an engine are one here.
"""

from collections import deque
from collections.abc import Iterable, Mapping

from prometheus_client.core import GaugeMetricFamily, Metric

from mmrouter_lib.engines.base.metrics import RankLoad

LOOKS = 60
"""Looks over which ``mmrouter_sidecar_busy_ratio`` is taken: a minute, at one look a second."""


class EngineLoad:
    """The last look at an engine's metrics, as a collector for a registry; an engine that is down has none."""

    def __init__(self) -> None:
        self.text = ""
        """The engine's own metrics, as it wrote them; empty while it is down."""
        self._ranks: Mapping[int, RankLoad] = {}
        self._busy: deque[bool] = deque(maxlen=LOOKS)

    def saw(self, text: str, ranks: Mapping[int, RankLoad]) -> None:
        """Keep a look: the text and each rank's load in it."""
        self.text, self._ranks = text, ranks
        if ranks:
            self._busy.append(any(load.running or load.waiting for load in ranks.values()))

    def lost(self) -> None:
        """Forget all: the engine is down, and an old load would be taken for the load of now."""
        self.text, self._ranks = "", {}
        self._busy.clear()

    def collect(self) -> Iterable[Metric]:
        """Return the gauges; none before the first look."""
        ranks = self._ranks.values()
        if not ranks:
            return
        usage = sum(load.kv_usage for load in ranks) / len(ranks)
        yield GaugeMetricFamily("mmrouter_sidecar_kv_usage_ratio", "Share of the engine's KV blocks in use.", usage)
        waiting = sum(load.waiting for load in ranks)
        yield GaugeMetricFamily("mmrouter_sidecar_queue_depth", "Requests that wait in the engine.", waiting)
        busy = sum(self._busy) / len(self._busy)
        yield GaugeMetricFamily(
            "mmrouter_sidecar_busy_ratio", "Share of the last minute in which the engine had a request.", busy
        )
