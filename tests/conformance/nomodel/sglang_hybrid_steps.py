"""Run requests through SGLang's own tree for models with states or windows beside full attention, without a model.

    python sglang_hybrid_steps.py

As ``sglang_steps.py``, from 0.5.23 on. The first message has also ``window``, the tokens of a sliding window, and
``states``, the number of places for states; 0 for a model without. A page of one token goes with states at the end of
what was computed, a larger one with states at multiples of :data:`STEP` tokens, as the engine chooses.
"""

import math
from types import SimpleNamespace
from typing import Any

import torch
from frames import serve
from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateShape
from sglang.srt.managers.schedule_batch import ReqKvInfo, ScheduleBatch
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.common import match_kv_cache, release_kv_cache
from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.runtime_context import get_context
from sglang_steps import MAX_LENGTH, Engine, next_step, pools

STEP = 64  # tokens of a chunk of linear attention
TRACKED = 256  # an answer has a state at multiples of as many tokens


FULL, SWA, MAMBA = ComponentType.FULL, ComponentType.SWA, ComponentType.MAMBA


def rows_with(states: int, buffers: bool) -> HybridReqToTokenPool:
    """Return room for one request and for states. ``buffers``: a request has two more, in turn."""
    shape = Mamba2StateShape.create(
        tp_world_size=1, intermediate_size=8, n_groups=1, num_heads=1, head_dim=8, state_size=8, conv_kernel=4
    )
    return HybridReqToTokenPool(
        size=2,
        mamba_size=states,
        mamba_spec_state_size=2,
        max_context_len=MAX_LENGTH + 64,
        device="cpu",
        enable_memory_saver=False,
        cache_params=Mamba2CacheParams(shape=shape, layers=[0]),
        mamba_layer_ids=[0],
        enable_mamba_extra_buffer=buffers,
    )


def pages_with_windows(block_size: int, blocks: int) -> SWATokenToKVPoolAllocator:
    """Return room for pages, and for half as many within windows."""
    size = (blocks * block_size, blocks // 2 * block_size, block_size, torch.bfloat16)
    layers = {"swa_attention_layer_ids": [0], "full_attention_layer_ids": [1]}
    memory = SWAKVPool(*size, head_num=1, head_dim=1, **layers, device="cpu")
    return SWATokenToKVPoolAllocator(*size, "cpu", memory, need_sort=False)


class HybridEngine(Engine):
    """SGLang's prefix cache of full attention with states, windows or both."""

    def __init__(self, block_size: int, blocks: int, window: int, states: int) -> None:
        rows, pages = pools(block_size, blocks)
        self._window, self._buffers = window, states > 0 and block_size > 1
        super().__init__(
            rows_with(states, self._buffers) if states else rows,
            pages_with_windows(block_size, blocks) if window else pages,
            tree_components=(FULL, *(SWA,) * (window > 0), *(MAMBA,) * (states > 0)),
            enable_mamba_extra_buffer=self._buffers,
            sliding_window_size=window or None,
        )

    def run(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Run a request to its end, or abort it after some steps, and keep what was computed."""
        request, tree = self.request(asked), self._tree
        prompt, wanted = len(request.origin_input_ids), len(request.full_untruncated_fill_ids) - 1
        kv = request.kv = ReqKvInfo()
        request.mamba_branching_seqlen = None
        request.skip_radix_cache_insert = False
        request._compute_max_prefix_len = lambda length: prompt - 1
        request.owned_kv_len = lambda: request.computed
        request.refresh_fill_ids = lambda: None
        request.finished_len = None
        match_kv_cache(
            request, tree, request.full_untruncated_fill_ids, cow_mamba=tree.supports_mamba(), max_prefix_len=prompt - 1
        )
        request.lock = tree.lock(request.last_node)
        cached = kv.cache_protected_len = request.prefix_len
        self._make_room_for_states()
        assert self._rows.alloc([request]), "no row is free"
        row = self._rows.req_to_token[kv.req_pool_idx]
        row[:cached] = tree.path_device_indices(request.last_node)[:cached]
        request.computed = cached
        held, steps = cached, 0
        while request.computed < wanted and not request.ended:
            self._before(request)
            held = self._hold(row, held, request.extend_end)
            request.computed = kv.kv_allocated_len = kv.kv_committed_len = request.extend_end
            steps += 1
            request.ended = steps == asked["steps"]
            if request.computed > prompt:
                self._answered(request)
            elif not request.ended:
                tree.checkpoint(request, up_to=request.computed)
        request.ended = True
        release_kv_cache(request, tree, checkpoint=True)
        return self.answer(request, cached)

    def _before(self, request: Any) -> None:
        """Prepare the next step as a batch does: say where a state is kept, and free what a window has left."""
        done, request.extend_end = request.computed, next_step(request)
        request.prefix_len, request.extend_len = done, request.extend_end - done
        if done >= len(request.origin_input_ids):
            if self._window:
                self._tree.evict_sliding_windows(request, done - 1)
        elif self._buffers:
            config = SimpleNamespace(hf_text_config=SimpleNamespace())
            batch = SimpleNamespace(model_config=config, tree_cache=self._tree, req_to_token_pool=self._rows)
            ScheduleBatch._mamba_radix_cache_v2_req_prepare_for_extend(batch, request)

    def _answered(self, request: Any) -> None:
        """Note a state of an answer, as the engine does after a step that ends where one is kept."""
        kv = request.kv
        if self._buffers and request.computed % math.lcm(STEP, self._size, TRACKED) == 0:
            kv.mamba_prev_track_seqlen, kv.mamba_last_track_seqlen = kv.mamba_last_track_seqlen, request.computed
            kv.mamba_last_track_idx = kv.mamba_next_track_idx
            kv.mamba_next_track_idx = self._rows.get_mamba_ping_pong_other_idx(kv.mamba_next_track_idx)

    def _make_room_for_states(self) -> None:
        if self._tree.supports_mamba():
            missing = 3 - self._rows.mamba_allocator.available_size()
            if missing > 0:
                self._tree.evict_for_alloc(EvictParams(num_tokens=0, mamba_num=missing))

    def _hold(self, row: torch.Tensor, held: int, tokens: int) -> int:
        """Allocate whole pages for the tokens of a request, after the least recently used; return what it has."""
        if not self._window:
            return super()._hold(row, held, tokens)
        more = -(-tokens // self._size) * self._size - held
        if more <= 0:
            return held
        full, within = self._pages.full_attn_allocator, self._pages.swa_attn_allocator
        missing = [max(0, more - each.available_size()) for each in (full, within)]
        if any(missing):
            self._tree.evict_for_alloc(EvictParams(num_tokens=missing[0], swa_num_tokens=missing[1]))
        pages, windowed = full.alloc(more), within.alloc(more)
        assert pages is not None, "the cache is smaller than a request"
        assert windowed is not None, "the windows' cache is smaller than a request"
        self._pages.set_full_to_swa_mapping(pages, windowed)
        row[held : held + more] = pages
        return held + more


def main() -> None:
    engine: HybridEngine | None = None

    def answer(message: dict[str, Any]) -> dict[str, Any]:
        nonlocal engine
        if "blocks" in message:
            engine = HybridEngine(**message)
            return {}
        assert engine is not None, "a request before any cache"
        return engine.run(message)

    with get_context().override_server_args(page_size=1, _mamba_cache_chunk_size=STEP):
        serve(answer)


if __name__ == "__main__":
    main()
