"""What is counted of requests, their decisions and their answers.

Children of metrics are kept, because looking one up by its labels costs more than counting.
"""

import collections

from prometheus_client import Counter

from mmrouter_router.core.errors import OVERLOADED, RequestError
from mmrouter_router.dispatch.engine_client import EngineReply
from mmrouter_router.request.prepared import Prepared
from mmrouter_router.telemetry.metrics import Metrics


class RequestCounts:
    """Counts in the metrics of a router. ``totals``: named as in :data:`.operator_report.COUNTS`, since the start."""

    def __init__(self, metrics: Metrics) -> None:
        self.totals: collections.Counter[str] = collections.Counter()
        self._metrics = metrics
        self._children: dict[tuple[Counter, *tuple[str, ...]], Counter] = {}
        self._first_byte = {cached: metrics.first_byte.labels(cached) for cached in ("hit", "miss", "unknown")}

    def refused(self, error: RequestError) -> None:
        if error.code in OVERLOADED:
            self._metrics.overload.labels(error.code).inc()

    def ended(self, path: str, code: str, seconds: float) -> None:
        """Count a request. ``code``: its status, or why its answer is not complete; ``seconds``: since it arrived."""
        self._child(self._metrics.requests, path, code).inc()
        if code.startswith("2"):
            self._metrics.request_seconds.observe(seconds)

    def answered(self, prepared: Prepared, reply: EngineReply, seconds: float) -> None:
        """Count the decision of a request whose answer has begun ``seconds`` after it arrived."""
        metrics, decision = self._metrics, reply.decision
        # Causes without their fields, to bound the label; several images of one cause count once.
        for cause in {reason.split(":")[0] for reason in decision.reasons} or {""}:
            self._child(metrics.decisions, decision.exactness, cause).inc()
        for image in prepared.images:
            if not image.resolved:
                metrics.unresolved.labels(image.unresolved.split(":")[0]).inc()
        if prepared.unseen:
            self._first_byte["unknown"].observe(seconds)
            return  # shares are of predicted prompts only
        choice = decision.choice
        blocks, hits = choice.winner.blocks, choice.winner.overlap
        self._first_byte["hit" if 2 * hits >= blocks > 0 else "miss"].observe(seconds)
        worker = choice.winner.name
        self._child(metrics.prompt_blocks, worker).inc(blocks)
        self._child(metrics.overlap_blocks, worker).inc(hits)
        for metric, more in (
            (metrics.unproved_blocks, choice.winner.unproved),
            (metrics.tier_blocks, choice.winner.tier),
        ):
            if more:
                self._child(metric, worker).inc(more)
        metrics.round_robin_blocks.inc(choice.round_robin)
        if blocks:
            metrics.hit_ratio.observe(hits / blocks)
            metrics.regret.observe(choice.regret)
        self.totals["decisions"] += 1
        self.totals["exact_decisions"] += decision.exactness == "exact"
        self.totals["prompt_blocks"] += blocks
        self.totals["hit_blocks"] += hits

    def forget_worker(self, name: str) -> None:
        """Drop the series of a worker that is gone."""
        of = self._metrics
        for metric in (of.prompt_blocks, of.overlap_blocks, of.unproved_blocks, of.tier_blocks):
            if self._children.pop((metric, name), None) is not None:
                metric.remove(name)

    def _child(self, metric: Counter, *labels: str) -> Counter:
        key: tuple[Counter, *tuple[str, ...]] = (metric, *labels)
        child = self._children.get(key)
        if child is None:
            child = self._children[key] = metric.labels(*labels)
        return child
