"""An executor with which vLLM serves without weights and without a forward pass. Runs in the engine's environment.

    PYTHONPATH=hack/engines/no_model vllm serve MODEL --distributed-executor-backend vllm_executor.NoModelExecutor

Server, processor, scheduler, cache manager and events are vLLM's own. Its model class, built on PyTorch's meta device,
says what each layer keeps in the cache. A generated token is a function of its place.
"""

import tempfile
from concurrent.futures import Future
from typing import Any

import torch
from vllm.config import get_layers_from_vllm_config, set_current_vllm_config
from vllm.distributed.parallel_state import ensure_model_parallel_initialized, init_distributed_environment
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.platforms import current_platform
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.attention.backends.utils import record_kv_cache_layout
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheConfig, KVCacheSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.utils import customize_attention_spec

MEMORY = 1 << 34
"""Bytes of a cache that is never allocated; ``--num-gpu-blocks-override`` gives another number of blocks."""
LAYOUT = "BLNHC"
"""Blocks of all kinds of layers lie together, as groups in one pool require."""


class NoModelExecutor(Executor):
    """Answers what the engine asks of its workers, of which there are none."""

    def _init_executor(self) -> None:
        self._ends: dict[str, int] = {}  # request -> tokens that are known of it
        self._specs = layer_specs(self.vllm_config)

    def get_kv_cache_specs(self) -> list[dict[str, KVCacheSpec]]:
        return [self._specs]

    def get_supported_kv_cache_layouts(self) -> list[list[str]]:
        return [[LAYOUT]]

    def set_kv_cache_layout(self, layout_name: str) -> None:
        record_kv_cache_layout(self.cache_config, layout_name)

    def determine_available_memory(self) -> list[int]:
        return [MEMORY]

    def initialize_from_config(self, kv_cache_configs: list[KVCacheConfig]) -> None:
        pass

    def compile_or_warm_up_model(self) -> None:
        pass

    @property
    def supported_tasks(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("generate",)

    def collective_rpc(self, *_: Any, **__: Any) -> list[Any]:
        return [None]

    def check_health(self) -> None:
        pass

    def execute_model(self, scheduler_output: SchedulerOutput, non_block: bool = False) -> Any:
        output = self._step(scheduler_output)
        if not non_block:
            return output
        future: Future[ModelRunnerOutput] = Future()
        future.set_result(output)
        return future

    def _step(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        """Return a token for every request whose known tokens are all computed after this step."""
        for name in scheduled.finished_req_ids:
            self._ends.pop(name, None)
        computed = dict(
            zip(
                scheduled.scheduled_cached_reqs.req_ids,
                scheduled.scheduled_cached_reqs.num_computed_tokens,
                strict=True,
            )
        )
        for new in scheduled.scheduled_new_reqs:
            computed[new.req_id] = new.num_computed_tokens
            self._ends[new.req_id] = len(new.prefill_token_ids or new.prompt_token_ids)
        tokens: list[list[int]] = []
        for name, count in scheduled.num_scheduled_tokens.items():
            ended = computed[name] + count >= self._ends[name]
            tokens.append([100 + self._ends[name] * 7 % 100] if ended else [])
            self._ends[name] += ended
        names = list(scheduled.num_scheduled_tokens)
        places = {name: place for place, name in enumerate(names)}
        return ModelRunnerOutput(req_ids=names, req_id_to_index=places, sampled_token_ids=tokens)


def layer_specs(config: Any) -> dict[str, KVCacheSpec]:
    """Return what each layer of the model keeps, with the block sizes that vLLM chooses for it."""
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{tempfile.mkdtemp()}/group", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        with set_default_torch_dtype(config.model_config.dtype), torch.device("meta"):
            initialize_model(vllm_config=config)
    current_platform.update_block_size_for_backend(config)
    specs: dict[str, KVCacheSpec] = {}
    for name, layer in get_layers_from_vllm_config(config, AttentionLayerBase).items():
        if getattr(layer, "kv_sharing_target_layer_name", None):
            continue
        spec = layer.get_kv_cache_spec(config)
        if isinstance(spec, AttentionSpec):
            spec = customize_attention_spec(layer.get_attn_backend(), spec)
        if spec is not None:
            specs[name] = spec
    return specs
