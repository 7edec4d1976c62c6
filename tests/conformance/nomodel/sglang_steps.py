"""Run requests through SGLang's own radix tree and page allocator, without a model. Runs in the engine's environment.

    python sglang_steps.py

A request finds, allocates, inserts and frees as SGLang's scheduler lets it, one request at a time; tokens are a
function of their place. Messages are those of ``vllm_steps.py``, in fewer words: ``block_size`` and ``blocks`` replace
the engine; all others are requests. An image's placeholder tokens are overwritten by the engine's function of its
identity, and the answer has the prompt with them (``ids``), which is all that the engine's cache holds of an image.
Releases before 0.5.23 get no adapters, whose blocks their events do not tell from the model's.
"""

import os
import time
from array import array
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")

import msgspec
import torch
from frames import serve
from sglang.srt.disaggregation.kv_events import KVEventBatch
from sglang.srt.managers import schedule_batch
from sglang.srt.mem_cache import events
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.runtime_context import get_context

NAMES_REQUESTS = hasattr(events, "KvEventLoraNames")  # since 0.5.23
MAX_LENGTH, CHUNK = 4_096, 1_024  # tokens of a prompt, and of one step


def adapter_id(name: str) -> str:
    """The id of a loaded adapter: 32 characters, which end the key of its requests."""
    return name.rjust(32, "0")


def sentinels(identity: bytes) -> tuple[int, ...]:
    """What the engine writes over an image's placeholder tokens; one value before 0.5.23."""
    if NAMES_REQUESTS:
        return tuple(schedule_batch._compute_pad_values(identity))
    return (schedule_batch._compute_pad_value(int.from_bytes(identity, "big")),)


class OlderTree(UnifiedRadixCache):
    """The tree before 0.5.22, called as later ones are."""

    def lock(self, node: Any) -> Any:
        return self.inc_lock_ref(node).to_dec_params()

    def unlock(self, receipt: Any) -> None:
        """Nothing is left to do: the last ``checkpoint`` has given the lock back."""

    def checkpoint(self, request: Any, up_to: int) -> None:
        """Keep what was computed; of a finished request, leave the caller the pages from ``cache_protected_len`` on."""
        if not request.finished():
            self.cache_unfinished_req(request, chunked=up_to < len(request.origin_input_ids))
        elif hasattr(self, "insert_req"):  # 0.5.21
            self.insert_req(request, up_to=up_to)
            self.unpin(request)
        else:
            self.cache_finished_req(request, kv_len_to_handle=up_to)
            request.kv.cache_protected_len = -(-up_to // self.page_size) * self.page_size  # it has freed the rest


def pools(block_size: int, blocks: int) -> tuple[ReqToTokenPool, PagedTokenToKVPoolAllocator]:
    """Return room for one request, and for pages."""
    pages = PagedTokenToKVPoolAllocator(blocks * block_size, block_size, torch.bfloat16, "cpu", None, need_sort=False)
    return ReqToTokenPool(2, MAX_LENGTH + 64, "cpu", False), pages


def next_step(request: Any) -> int:
    """Return the tokens that are computed after one more step."""
    done, prompt = request.computed, len(request.origin_input_ids)
    return min(done + CHUNK, prompt) if done < prompt else done + 1


class Engine:
    """SGLang's prefix cache of full attention. ``params``: more of the tree's parameters."""

    def __init__(self, rows: ReqToTokenPool, pages: Any, **params: Any) -> None:
        self._rows, self._pages, self._size = rows, pages, pages.page_size
        self._params = CacheInitParams(
            disable=False,
            req_to_token_pool=rows,
            token_to_kv_pool_allocator=pages,
            page_size=self._size,
            enable_kv_cache_events=True,
            **params,
        )
        self._tree = (UnifiedRadixCache if hasattr(UnifiedRadixCache, "checkpoint") else OlderTree)(self._params)
        self._encode = msgspec.msgpack.Encoder().encode

    def request(self, asked: dict[str, Any]) -> Any:
        """Return a request as the tree reads it. ``ended``: whether it is finished."""
        ids = array("q", asked["ids"])
        for identity, offset, length in asked["images"]:
            values = sentinels(bytes.fromhex(identity)[:8])
            ids[offset : offset + length] = (array("q", values) * (length // len(values) + 1))[:length]
        output = array("q", [1000 + (len(ids) + n) * 7 % 997 for n in range(asked["output"])])
        adapter = adapter_id(asked["lora"]) if asked["lora"] else None
        request = SimpleNamespace(
            ended=False,
            computed=0,
            origin_input_ids=ids,
            output_ids=output,
            full_untruncated_fill_ids=ids + output,
            get_fill_ids=lambda: (ids + output)[: request.computed],
            extra_key=adapter,
            lora_id=adapter,
            cache_salt=asked["salt"],
            kv=SimpleNamespace(req_pool_idx=1, cache_protected_len=0, cache_inserted_len=0, swa_evicted_seqlen=0),
            swa_uuid_for_lock=None,
            skip_lock_node_ids={},
            swa_prefix_lock_released=False,
            kv_rotation_base=None,
            priority=0,
            session=None,
            session_id=None,
            rid="r",
            finished=lambda: request.ended,
        )
        if NAMES_REQUESTS:
            self._params.kv_event_lora_names.register(request, asked["lora"])
        else:
            assert adapter is None, "events of this release do not name adapters"
        return request

    def run(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Run a request to its end, or abort it after some steps, and keep what was computed."""
        request = self.request(asked)
        ids, output = request.origin_input_ids, request.output_ids
        steps = 0
        key = RadixKey(
            request.full_untruncated_fill_ids, request.extra_key, limit=len(ids) - 1, cache_salt=request.cache_salt
        )
        match = self._tree.match_prefix(MatchPrefixParams(key=key))
        request.last_node = match.last_device_node
        request.lock = request.lock_receipt = self._tree.lock(request.last_node)
        if isinstance(self._tree, OlderTree):
            places = match.device_indices
        else:
            places = self._tree.path_device_indices(request.last_node)[: match.device_prefix_len]
        cached = request.kv.cache_protected_len = len(places)
        row = self._rows.req_to_token[1]
        row[:cached] = places
        request.computed = held = cached
        wanted = len(ids) + len(output) - 1  # the last token is computed by no step
        while request.computed < wanted and not request.ended:
            request.computed = next_step(request)
            held = self._hold(row, held, request.computed)
            steps += 1
            request.ended = steps == asked["steps"]
            if request.computed <= len(ids) and not request.ended:
                self._tree.checkpoint(request, up_to=request.computed)
        request.ended = True
        self._tree.checkpoint(request, up_to=request.computed)
        self._pages.free(row[request.kv.cache_protected_len : held].to(torch.int64))
        self._tree.unlock(request.lock)
        return self.answer(request, cached)

    def answer(self, request: Any, cached: int) -> dict[str, Any]:
        ids, done = request.origin_input_ids, request.computed
        made = request.output_ids[: done - len(ids) + 1] if done >= len(ids) else array("q")
        batch = KVEventBatch(ts=time.time(), events=self._tree.take_events())
        batches = [self._encode(batch)] if batch.events else []
        return {"cached": cached, "output": list(made), "batches": batches, "ids": ids.tolist()}

    def _hold(self, row: torch.Tensor, held: int, tokens: int) -> int:
        """Allocate whole pages for the tokens of a request, after the least recently used; return what it has."""
        more = -(-tokens // self._size) * self._size - held
        if more <= 0:
            return held
        while (pages := self._pages.alloc(more)) is None:
            freed = self._tree.evict(EvictParams(num_tokens=more - self._pages.available_size()))
            assert freed.num_tokens_evicted, "the cache is smaller than a request"
        row[held : held + more] = pages
        return held + more


def main() -> None:
    engine: Engine | None = None

    def answer(message: dict[str, Any]) -> dict[str, Any]:
        nonlocal engine
        if "blocks" in message:
            engine = Engine(*pools(**message), tree_components=(ComponentType.FULL,))
            return {"groups": ["FullAttention"], "lookahead": 0}
        assert engine is not None, "a request before any cache"
        return engine.run(message)

    with get_context().override_server_args(page_size=1):
        serve(answer)


if __name__ == "__main__":
    main()
