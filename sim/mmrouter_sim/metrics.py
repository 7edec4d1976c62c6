"""``/metrics`` with the names and labels of vLLM and SGLang, read at each scrape.

They have the metrics that the simulator can fill: load, caches, tokens, latency, geometry
(docs/engine-facts/vllm.md#metrics, docs/engine-facts/sglang.md#http-endpoints). ``mmrouter_sim_visual_tokens`` is the
simulator's own.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from mmrouter_sim.core.requests import Request
from mmrouter_sim.core.scheduler import Scheduler
from mmrouter_sim.encoders import ImageEncoder
from mmrouter_sim.media import ProcessorCache
from mmrouter_sim.rank_runner import Runner
from mmrouter_sim.settings import Settings
from mmrouter_sim.vllm.connectors import ConnectorTransfers

Gauge, Counter = GaugeMetricFamily, CounterMetricFamily


class Row(NamedTuple):
    """One metric. ``of_rank``: its value for a rank or that attribute, by value of the additional ``label`` if
    there is one.
    """

    kind: type[GaugeMetricFamily | CounterMetricFamily]
    name: str
    text: str
    of_rank: Callable[[Scheduler], Any] | str | None = None  # None: one value for all ranks
    label: str = ""


def _reasons(scheduler: Scheduler) -> dict[str, int]:
    return {"capacity": len(scheduler.waiting), "deferred": 0}


def _sources(scheduler: Scheduler) -> dict[str, int]:
    counters = scheduler.counters
    computed = counters.prefix_queries - counters.prefix_hits - counters.external_hits
    kinds = {"local_cache_hit": counters.prefix_hits, "local_compute": computed}
    return kinds | {"external_kv_transfer": counters.external_hits}


_VLLM: tuple[Row, ...] = (
    Row(Gauge, "vllm:num_requests_running", "Requests in the running batch", lambda s: len(s.running)),
    Row(Gauge, "vllm:num_requests_waiting", "Requests waiting to run", lambda s: len(s.waiting)),
    Row(Gauge, "vllm:num_requests_waiting_by_reason", "Requests waiting to run, by reason", _reasons, "reason"),
    Row(Gauge, "vllm:kv_cache_usage_perc", "Share of the KV cache in use, 0 to 1", "pool.usage"),
    Row(Counter, "vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache", "counters.prefix_queries"),
    Row(Counter, "vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache", "counters.prefix_hits"),
    Row(Counter, "vllm:mm_cache_queries", "Images looked up in the processor cache"),
    Row(Counter, "vllm:mm_cache_hits", "Images found in the processor cache"),
    Row(Counter, "vllm:prompt_tokens", "Prompt tokens processed", "counters.prompt_tokens"),
    Row(Counter, "vllm:generation_tokens", "Tokens generated", "counters.generation_tokens"),
    Row(Counter, "vllm:num_preemptions", "Preemptions", "counters.preemptions"),
    Row(Counter, "vllm:prompt_tokens_by_source", "Prompt tokens by where they came from", _sources, "source"),
    Row(Counter, "vllm:request_success", "Requests that ended, by reason", "counters.finished", "finished_reason"),
    Row(
        Counter, "vllm:external_prefix_cache_hits", "Prompt tokens computed by another engine", "counters.external_hits"
    ),
    Row(Counter, "vllm:nixl_num_kv_expired_reqs", "Requests whose blocks were not fetched in time"),
    Row(Counter, "vllm:nixl_num_failed_transfers", "Failed transfers"),
    Row(Counter, "mmrouter_sim_visual_tokens", "Visual tokens encoded here", "counters.visual_tokens"),
)
_VLLM_HISTOGRAMS = {
    "first token": ("vllm:time_to_first_token_seconds", "Time to the first token"),
    "between": ("vllm:inter_token_latency_seconds", "Time between two tokens of an answer"),
    "queue": ("vllm:request_queue_time_seconds", "Time spent waiting"),
    "prefill": ("vllm:request_prefill_time_seconds", "Time from the first step to the first token"),
    "whole": ("vllm:e2e_request_latency_seconds", "Time from arrival to the last token"),
}
_VLLM_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_SGLANG: tuple[Row, ...] = (
    Row(Gauge, "sglang:num_running_reqs", "Running requests", lambda s: len(s.running)),
    Row(Gauge, "sglang:num_queue_reqs", "Requests in the waiting queue", lambda s: len(s.waiting)),
    Row(Gauge, "sglang:token_usage", "Share of the token slots in use, 0 to 1", "pool.usage"),
    Row(Gauge, "sglang:num_used_tokens", "Token slots in use", lambda s: s.pool.used * s.limits.block_size),
    Row(Gauge, "sglang:max_total_num_tokens", "Token slots", lambda s: (s.pool.size - 1) * s.limits.block_size),
    Row(Gauge, "sglang:page_size", "Tokens per page", "limits.block_size"),
    Row(Counter, "sglang:prompt_tokens", "Prompt tokens processed", "counters.prompt_tokens"),
    Row(Counter, "sglang:cached_tokens", "Prompt tokens found in the cache", "counters.prefix_hits"),
    Row(Counter, "sglang:generation_tokens", "Tokens generated", "counters.generation_tokens"),
)
_SGLANG_ENCODER: tuple[Row, ...] = (
    Row(Counter, "sglang:encoder_cache_total_files", "Images requested"),
    Row(Counter, "sglang:encoder_cache_hit_files", "Images in the cache"),
)
_SGLANG_HISTOGRAMS = {
    "first token": ("sglang:time_to_first_token_seconds", "Time to the first token"),
    "queue": ("sglang:queue_time_seconds", "Time spent waiting"),
    "whole": ("sglang:e2e_request_latency_seconds", "Time from arrival to the last token"),
}
_SGLANG_SECONDS = (0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 2.0, 4.0, 6.0, 8.0, 10.0, 20.0, 40.0, 60.0, 80.0, 100.0, 200.0, 400.0)


class EngineMetrics(Collector):
    """The metrics of one process: one set of samples per data-parallel rank, if the engine's table has such."""

    def __init__(
        self,
        settings: Settings,
        runners: Sequence[Runner],
        images: ProcessorCache,
        handover: ConnectorTransfers,
        encoder: ImageEncoder | None,
    ) -> None:
        self.registry = CollectorRegistry()
        self._settings, self._runners, self._encoder = settings, runners, encoder
        self._images, self._handover = images, handover
        self._vllm = settings.engine == "vllm"
        self._labels = {"model_name": settings.served_names[0]}
        self._rank_label = ["engine"] if self._vllm else ["dp_rank"] if len(runners) > 1 else []
        seconds: Sequence[float] = _VLLM_SECONDS
        self._table, histograms = _VLLM, _VLLM_HISTOGRAMS
        if not self._vllm:
            self._table, histograms, seconds = _SGLANG, _SGLANG_HISTOGRAMS, _SGLANG_SECONDS
            self._labels |= {"engine_type": "unified", "tp_rank": "0", "pp_rank": "0"}
            if encoder is not None:
                self._table, self._labels = _SGLANG_ENCODER, {"modality": "image"}
        self._names = (*self._labels, *self._rank_label)
        self._histograms = {
            what: Histogram(name, text, self._names, buckets=seconds, registry=self.registry)
            for what, (name, text) in histograms.items()
        }
        if self._vllm:
            for histogram in self._histograms.values():
                for rank in range(len(runners)):
                    histogram.labels(*self._of_rank(rank))
        self.registry.register(self)

    def token(self, rank: int, request: Request, now: float, last: float | None) -> None:
        """Record a token of a request; ``last``: time of the token before."""
        if last is not None:
            self._observe("between", rank, now - last)
            return
        started = request.arrived if request.started is None else request.started
        self._observe("first token", rank, now - request.arrived)
        self._observe("queue", rank, started - request.arrived)
        self._observe("prefill", rank, now - started)

    def ended(self, rank: int, request: Request, now: float) -> None:
        self._observe("whole", rank, now - request.arrived)

    def collect(self) -> Iterator[Metric]:
        shared = self._shared()
        for kind, name, text, source, label in self._table:
            of_rank = attrgetter(source) if isinstance(source, str) else source
            family = kind(name, text, labels=(*self._names, *([label] if label else [])))
            for rank, runner in enumerate(self._runners):
                value: Any = of_rank(runner.scheduler) if of_rank is not None else {}
                for more, number in value.items() if label or of_rank is None else [("", value)]:
                    family.add_metric([*self._of_rank(rank), *([more] if label else [])], number)
            if name in shared:
                family.add_metric(self._of_rank(0), shared[name])
            yield family
        if self._vllm and self._runners:
            yield self._geometry()

    def _shared(self) -> Mapping[str, float]:
        """Return what all ranks share, or an encoder has; its rank is 0, or it would be counted twice."""
        encoder = self._encoder
        if not self._vllm:
            names = [row.name for row in _SGLANG_ENCODER]
            return dict(zip(names, (encoder.images, encoder.hits), strict=True)) if encoder is not None else {}
        values = {
            "vllm:mm_cache_queries": self._images.queries,
            "vllm:mm_cache_hits": self._images.hits,
            "vllm:nixl_num_kv_expired_reqs": self._handover.expired,
            "vllm:nixl_num_failed_transfers": self._handover.failed,
        }
        if encoder is not None:
            values["vllm:num_requests_running"] = encoder.running
            values["vllm:num_requests_waiting"] = encoder.waiting
            values["mmrouter_sim_visual_tokens"] = encoder.visual_tokens
        return values

    def _geometry(self) -> Metric:
        rows = []
        for rank, runner in enumerate(self._runners):
            limits = runner.scheduler.limits
            values = {
                "block_size": limits.block_size,
                "cache_dtype": "auto",
                "enable_prefix_caching": self._settings.prefix_caching,
                "engine": rank,
                "hash_block_size": limits.block_size,
                "kv_cache_size_tokens": (limits.blocks - 1) * limits.block_size,
                "num_gpu_blocks": limits.blocks,
                "num_gpu_blocks_override": self._settings.blocks,
                "prefix_caching_hash_algo": self._settings.hash_algorithm,
            }
            rows.append(values)
        info = Gauge("vllm:cache_config_info", "Geometry of the KV cache", labels=tuple(rows[0]))
        for values in rows:
            info.add_metric([str(value) for value in values.values()], 1)
        return info

    def _of_rank(self, rank: int) -> list[str]:
        return [*self._labels.values(), *([str(rank)] if self._rank_label else [])]

    def _observe(self, what: str, rank: int, seconds: float) -> None:
        if what in self._histograms:
            self._histograms[what].labels(*self._of_rank(rank)).observe(seconds)
