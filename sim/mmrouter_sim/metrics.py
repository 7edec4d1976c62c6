"""``/metrics`` with the names and labels of vLLM and SGLang, read at each scrape.

They have what the sidecar and tests of deployments read: load, caches, geometry (docs/engine-facts/vllm.md#metrics,
docs/engine-facts/sglang.md#http-endpoints). ``mmrouter_sim_visual_tokens`` is the simulator's own.
"""

from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from mmrouter_sim.core.scheduler import Scheduler
from mmrouter_sim.encoders import ImageEncoder
from mmrouter_sim.settings import Settings

Gauge, Counter = GaugeMetricFamily, CounterMetricFamily


class Row(NamedTuple):
    """One metric. ``value``: of a rank's scheduler, or of the encoder of an encode-only engine."""

    kind: type[GaugeMetricFamily | CounterMetricFamily]
    name: str
    text: str
    value: Callable[[Any], float]


_VLLM: tuple[Row, ...] = (
    Row(Gauge, "vllm:num_requests_running", "Requests in the running batch", lambda s: len(s.running)),
    Row(Gauge, "vllm:num_requests_waiting", "Requests waiting to run", lambda s: len(s.waiting)),
    Row(Gauge, "vllm:kv_cache_usage_perc", "Share of the KV cache in use, 0 to 1", attrgetter("pool.usage")),
    Row(Counter, "vllm:prefix_cache_queries", "Prompt tokens looked up", attrgetter("counters.prefix_queries")),
    Row(Counter, "vllm:prefix_cache_hits", "Prompt tokens found", attrgetter("counters.prefix_hits")),
    Row(Counter, "vllm:nixl_num_kv_expired_reqs", "Blocks not fetched in time", attrgetter("counters.expired")),
    Row(Counter, "mmrouter_sim_visual_tokens", "Visual tokens encoded here", attrgetter("counters.visual_tokens")),
)
_VLLM_ENCODER: tuple[Row, ...] = (
    Row(Gauge, "vllm:num_requests_running", "Requests in the running batch", attrgetter("running")),
    Row(Gauge, "vllm:num_requests_waiting", "Requests waiting to run", attrgetter("waiting")),
    Row(Counter, "mmrouter_sim_visual_tokens", "Visual tokens encoded here", attrgetter("visual_tokens")),
)
_SGLANG: tuple[Row, ...] = (
    Row(Gauge, "sglang:num_running_reqs", "Running requests", lambda s: len(s.running)),
    Row(Gauge, "sglang:num_queue_reqs", "Requests in the waiting queue", lambda s: len(s.waiting)),
    Row(Gauge, "sglang:token_usage", "Share of the token slots in use, 0 to 1", attrgetter("pool.usage")),
    Row(Gauge, "sglang:page_size", "Tokens per page", attrgetter("limits.block_size")),
    Row(Counter, "sglang:prompt_tokens", "Prompt tokens processed", attrgetter("counters.prompt_tokens")),
    Row(Counter, "sglang:cached_tokens", "Prompt tokens found in the cache", attrgetter("counters.prefix_hits")),
)
_SGLANG_ENCODER: tuple[Row, ...] = (
    Row(Counter, "sglang:encoder_cache_total_files", "Images requested", attrgetter("images")),
    Row(Counter, "sglang:encoder_cache_hit_files", "Images in the cache", attrgetter("hits")),
)


class EngineMetrics(Collector):
    """The metrics of one process: one set of samples per data-parallel rank, or one of its encoder."""

    def __init__(self, settings: Settings, ranks: Sequence[Scheduler], encoder: ImageEncoder | None) -> None:
        self.registry = CollectorRegistry()
        self._settings, self._ranks = settings, ranks
        self._sources: Sequence[Scheduler | ImageEncoder] = ranks if encoder is None else [encoder]
        self._labels, self._rank_label = {"model_name": settings.served_names[0]}, "engine"
        if settings.engine == "vllm":
            self._rows = _VLLM if encoder is None else _VLLM_ENCODER
        elif encoder is None:
            self._rows, self._rank_label = _SGLANG, "dp_rank" if len(ranks) > 1 else ""
            self._labels |= {"engine_type": "unified", "tp_rank": "0", "pp_rank": "0"}
        else:
            self._rows, self._rank_label, self._labels = _SGLANG_ENCODER, "", {"modality": "image"}
        self.registry.register(self)

    def collect(self) -> Iterator[Metric]:
        rank_label = [self._rank_label] if self._rank_label else []
        for kind, name, text, value in self._rows:
            family = kind(name, text, labels=(*self._labels, *rank_label))
            for rank, source in enumerate(self._sources):
                family.add_metric([*self._labels.values(), *(str(rank) for _ in rank_label)], value(source))
            yield family
        if self._settings.engine == "vllm" and self._ranks:
            yield self._geometry()

    def _geometry(self) -> Metric:
        names = ("engine", "block_size", "num_gpu_blocks", "enable_prefix_caching", "prefix_caching_hash_algo")
        info = Gauge("vllm:cache_config_info", "Geometry of the KV cache", labels=names)
        caching = (self._settings.prefix_caching, self._settings.hash_algorithm)
        for rank, scheduler in enumerate(self._ranks):
            values = (rank, scheduler.limits.block_size, scheduler.limits.blocks, *caching)
            info.add_metric([str(value) for value in values], 1)
        return info
