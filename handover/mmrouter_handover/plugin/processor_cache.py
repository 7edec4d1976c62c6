"""An engine's processor cache that also knows what was handed over.

vLLM asks its cache for each image of a chat: one that is there needs no bytes, one that is not is processed, and what
came of it is put in and sent to the engine core, whose cache mirrors this one
(docs/engine-facts/vllm.md#image-uuid). An image that was
handed over is a third case: it is *there*, and at the moment in which it is asked for it takes the way of one that was
processed just now. So both caches stay mirrored, whichever kind of cache it is, and the core gets what it would have
got.

``InputProcessor.inject_into_mm_cache`` of 0.32 does not serve for that: it marks an image as held by the core, which
never got it, and forgets what the image becomes in the prompt.
"""

from collections.abc import Sequence
from typing import Any

from mmrouter_handover.plugin.pending_items import Kept

Processed = tuple[Any, Sequence[Any]]
"""An item and its prompt updates, as vLLM's processor returns them."""


class HandedOverCache:
    """Stands before vLLM's own cache. All but :class:`Kept` belongs to the one thread that processes images."""

    def __init__(self, cache: Any, kept: Kept[Processed]) -> None:
        self._cache, self._kept = cache, kept
        self._claimed: dict[str, Processed] = {}
        self.used = 0
        """Items that a chat took."""

    def holds(self, mm_hash: str, seconds: float) -> bool:
        """Whether a chat may name an image without its bytes; one that waits goes on to do so for ``seconds``.

        For any thread.
        """
        return bool(self._cache.is_cached_item(mm_hash)) or self._kept.extend(mm_hash, seconds)

    def is_cached_item(self, mm_hash: str) -> bool:
        if self._cache.is_cached_item(mm_hash):
            return True
        found = self._kept.get(mm_hash)
        if found is None:
            return False
        # It was called cached: it must be there when it is asked for, also if its time ends in between.
        self._claimed[mm_hash] = found
        return True

    def is_cached(self, mm_hashes: list[str]) -> list[bool]:
        return [self.is_cached_item(mm_hash) for mm_hash in mm_hashes]

    def get_and_update_item(self, mm_item: Any, mm_hash: str) -> Any:
        claimed = self._claimed.get(mm_hash)  # an image may stand in a prompt twice
        if mm_item is None and claimed is not None and not self._cache.is_cached_item(mm_hash):
            mm_item = claimed
            self._kept.drop(mm_hash)
            self.used += 1
        return self._cache.get_and_update_item(mm_item, mm_hash)

    def get_and_update(self, mm_items: Sequence[Any], mm_hashes: list[str]) -> list[Any]:
        return [self.get_and_update_item(item, name) for item, name in zip(mm_items, mm_hashes, strict=True)]

    def release_sender_touches(self) -> None:
        self._claimed.clear()
        self._cache.release_sender_touches()

    def clear_cache(self) -> None:
        self._claimed.clear()
        self._kept.clear()
        self._cache.clear_cache()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)
