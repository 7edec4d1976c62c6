"""What the simulated vLLM has beside every simulated engine: its hashes, its plugin, and its metrics."""

import os
from collections.abc import Mapping
from operator import attrgetter
from typing import Final

from mmrouter_handover.plugin.item_exchange import read_settings
from mmrouter_sim.core.events import VllmDialect
from mmrouter_sim.core.requests import ALGORITHMS, published_int
from mmrouter_sim.core.scheduler import Scheduler
from mmrouter_sim.engine import SimulatedEngine
from mmrouter_sim.metrics import Counter, Gauge, Row, Samples, constant
from mmrouter_sim.model import Model
from mmrouter_sim.settings import Settings
from mmrouter_sim.vllm.flags import VERSION
from mmrouter_sim.vllm.plugin import Plugin

# docs/engine-facts/vllm.md#metrics
ROWS: Final = (
    Row(Gauge, "vllm:num_requests_running", "Requests in the running batch", lambda s: len(s.running)),
    Row(Gauge, "vllm:num_requests_waiting", "Requests waiting to run", lambda s: len(s.waiting)),
    Row(Gauge, "vllm:kv_cache_usage_perc", "Share of the KV cache in use, 0 to 1", attrgetter("pool.usage")),
    Row(Counter, "vllm:prefix_cache_queries", "Prompt tokens looked up", attrgetter("counters.prefix_queries")),
    Row(Counter, "vllm:prefix_cache_hits", "Prompt tokens found", attrgetter("counters.prefix_hits")),
    Row(Counter, "vllm:generation_tokens", "Tokens generated", attrgetter("counters.generated")),
    Row(Counter, "vllm:nixl_num_kv_expired_reqs", "Blocks not fetched in time", attrgetter("counters.expired")),
    Row(Counter, "mmrouter_sim_visual_tokens", "Visual tokens encoded here", attrgetter("counters.visual_tokens")),
)
ENCODER_ROWS: Final = (
    Row(Gauge, "vllm:num_requests_running", "Requests in the running batch", attrgetter("running")),
    Row(Gauge, "vllm:num_requests_waiting", "Requests waiting to run", attrgetter("waiting")),
    Row(Counter, "mmrouter_sim_visual_tokens", "Visual tokens encoded here", attrgetter("visual_tokens")),
)
GEOMETRY: Final = Row(Gauge, "vllm:cache_config_info", "Geometry of the KV cache", constant)


class Engine(SimulatedEngine):
    def __init__(self, settings: Settings, model: Model) -> None:
        super().__init__(settings, model)
        if "mmrouter" in os.environ.get("VLLM_PLUGINS", "").split(","):
            # Image processing depends on the model type and this flag, not on the folder's path.
            processing = f"{model.model_type} {sorted(settings.processor.items())}"
            role = "renderer" if settings.renders else "engine"
            self.plugin = Plugin(read_settings(os.environ), role, processing, self.images, VERSION)

    def dialect(self) -> VllmDialect:
        published = published_int if self.settings.int_hashes else bytes
        hash_ = ALGORITHMS[self.settings.hash_algorithm]
        return VllmDialect(self.settings.block_size, hash_=hash_, published=published)

    def samples(self) -> Samples:
        labels = {"model_name": self.settings.served_names[0]}
        if self.encoder is not None:
            return Samples([self.encoder], ENCODER_ROWS, labels, "engine")
        ranks = [runner.scheduler for runner in self.runners]
        return Samples(ranks, ROWS, labels, "engine", {GEOMETRY: self._geometry})

    def _geometry(self, rank: int, scheduler: Scheduler) -> Mapping[str, str]:
        return {
            "engine": str(rank),
            "block_size": str(scheduler.limits.block_size),
            "num_gpu_blocks": str(scheduler.limits.blocks),
            "kv_cache_memory_bytes": str(self.settings.cache_bytes),
            "enable_prefix_caching": str(self.settings.prefix_caching),
            "prefix_caching_hash_algo": self.settings.hash_algorithm,
        }
