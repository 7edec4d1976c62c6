"""What the simulated SGLang has beside every simulated engine: its pages, its names of images, and its metrics."""

from functools import cached_property
from operator import attrgetter
from typing import Final

from mmrouter_sim.engine import SimulatedEngine
from mmrouter_sim.metrics import Counter, Gauge, Row, Samples
from mmrouter_sim.model import Model
from mmrouter_sim.settings import Settings
from mmrouter_sim.sglang.pages import WRAPPERS, SglangDialect, fingerprint

# docs/engine-facts/sglang.md#http-endpoints
ROWS: Final = (
    Row(Gauge, "sglang:num_running_reqs", "Running requests", lambda s: len(s.running)),
    Row(Gauge, "sglang:num_queue_reqs", "Requests in the waiting queue", lambda s: len(s.waiting)),
    Row(Gauge, "sglang:token_usage", "Share of the token slots in use, 0 to 1", attrgetter("pool.usage")),
    Row(Gauge, "sglang:page_size", "Tokens per page", attrgetter("limits.block_size")),
    Row(Counter, "sglang:prompt_tokens", "Prompt tokens processed", attrgetter("counters.prompt_tokens")),
    Row(Counter, "sglang:cached_tokens", "Prompt tokens found in the cache", attrgetter("counters.prefix_hits")),
    Row(Counter, "sglang:generation_tokens", "Tokens generated", attrgetter("counters.generated")),
)
ENCODER_ROWS: Final = (
    Row(Counter, "sglang:encoder_cache_total_files", "Images requested", attrgetter("images")),
    Row(Counter, "sglang:encoder_cache_hit_files", "Images in the cache", attrgetter("hits")),
)


class Engine(SimulatedEngine):
    tells_when_idle = True

    def __init__(self, settings: Settings, model: Model) -> None:
        super().__init__(settings, model)
        for runner in self.runners:
            runner.scheduler.reset()  # the engine announces its empty cache

    def dialect(self) -> SglangDialect:
        return SglangDialect(self.settings.block_size)

    def samples(self) -> Samples:
        if self.encoder is not None:
            return Samples([self.encoder], ENCODER_ROWS, {"modality": "image"})
        ranks = [runner.scheduler for runner in self.runners]
        labels = {"engine_type": "unified", "tp_rank": "0", "pp_rank": "0"}
        labels = {"model_name": self.settings.served_names[0], **labels}
        return Samples(ranks, ROWS, labels, "dp_rank" if len(ranks) > 1 else "")

    @cached_property
    def fingerprint(self) -> str | None:  # type: ignore[override]
        settings, model = self.settings, self.model
        if model.model_type not in WRAPPERS or not (
            model.model_type in ("qwen3_vl", "qwen3_vl_moe") or settings.preprocess_cache_mb
        ):
            return None
        process = settings.arguments.get("mm_process_config") or {}
        return fingerprint(model.model_type, list(model.architectures) or None, settings.revision, process)
