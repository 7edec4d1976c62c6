"""The engine's processor cache with handed-over images in front of it, and the store of images not used yet.

vLLM looks up each image of a chat in its cache: a cached one needs no bytes; another one is processed, added to the
cache and sent to the engine core, whose cache mirrors this one (docs/engine-facts/vllm.md#image-uuid). A handed-over
image is reported as cached, and at the moment vLLM fetches it, it is added like a newly processed one. So both caches
stay mirrored, whichever kind of cache vLLM uses.

``InputProcessor.inject_into_mm_cache`` of vLLM 0.32 is no alternative: it marks an image as known to the core, which
never received it, and drops the image's prompt updates.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from mmrouter_handover.shm import HandOverError

V = TypeVar("V")
Processed = tuple[Any, Sequence[Any]]
"""An item and its prompt updates, as vLLM's processor returns them."""


class PendingItems(Generic[V]):
    """Received items that no chat has named yet, bounded by ``limit_bytes``, each with a deadline.

    Usable from several threads. ``now``: monotonic seconds.
    """

    def __init__(self, limit_bytes: int, now: Callable[[], float]) -> None:
        self._limit, self._now = limit_bytes, now
        self._values: dict[str, tuple[V, int, float]] = {}
        self._mutex = threading.RLock()
        self.bytes = 0

    def put(self, name: str, value: V, length: int, seconds: float) -> None:
        """Keep a value for ``seconds``, replacing one of the same name. Raises :class:`HandOverError` ``full``.

        Pending items are never evicted, because their chats would have to be sent twice.
        """
        with self._mutex:
            self.expire()
            before = self._values.get(name)
            new_bytes = self.bytes + length - (before[1] if before else 0)
            if new_bytes > self._limit:
                raise HandOverError("full", f"{self.bytes} of {self._limit} bytes are pending")
            self._values[name] = (value, length, self._now() + seconds)
            self.bytes = new_bytes

    def get(self, name: str) -> V | None:
        with self._mutex:
            item = self._values.get(name)
            return item[0] if item and item[2] > self._now() else None

    def extend(self, name: str, seconds: float) -> bool:
        """Keep a value for at least ``seconds`` from now; return whether it exists."""
        with self._mutex:
            self.expire()
            item = self._values.get(name)
            if item:
                self._values[name] = (item[0], item[1], max(item[2], self._now() + seconds))
            return item is not None

    def drop(self, name: str) -> None:
        with self._mutex:
            item = self._values.pop(name, None)
            if item:
                self.bytes -= item[1]

    def clear(self) -> None:
        with self._mutex:
            self._values.clear()
            self.bytes = 0

    def expire(self) -> None:
        with self._mutex:
            now = self._now()
            for name in [name for name, (_, _, until) in self._values.items() if until <= now]:
                self.drop(name)

    def __len__(self) -> int:
        return len(self._values)


class HandedOverCache:
    """Wraps vLLM's own cache. Only :meth:`holds` may be called outside of the thread that processes images."""

    def __init__(self, cache: Any, pending: PendingItems[Processed]) -> None:
        self._cache, self._pending = cache, pending
        self._claimed: dict[str, Processed] = {}
        self.used = 0
        """Number of handed-over items that chats used."""

    def holds(self, mm_hash: str, seconds: float) -> bool:
        """Whether a chat may name an image without its bytes; a pending one is kept for ``seconds`` from now."""
        return bool(self._cache.is_cached_item(mm_hash)) or self._pending.extend(mm_hash, seconds)

    def is_cached_item(self, mm_hash: str) -> bool:
        if self._cache.is_cached_item(mm_hash):
            return True
        item = self._pending.get(mm_hash)
        if item is None:
            return False
        # An image reported as cached must stay available until it is fetched, even if it expires in between.
        self._claimed[mm_hash] = item
        return True

    def is_cached(self, mm_hashes: list[str]) -> list[bool]:
        return [self.is_cached_item(mm_hash) for mm_hash in mm_hashes]

    def get_and_update_item(self, mm_item: Any, mm_hash: str) -> Any:
        claimed = self._claimed.get(mm_hash)  # an image may occur twice in a prompt
        if mm_item is None and claimed is not None and not self._cache.is_cached_item(mm_hash):
            mm_item = claimed
            self._pending.drop(mm_hash)
            self.used += 1
        return self._cache.get_and_update_item(mm_item, mm_hash)

    def get_and_update(self, mm_items: Sequence[Any], mm_hashes: list[str]) -> list[Any]:
        return [self.get_and_update_item(item, name) for item, name in zip(mm_items, mm_hashes, strict=True)]

    def release_sender_touches(self) -> None:
        self._claimed.clear()
        self._cache.release_sender_touches()

    def clear_cache(self) -> None:
        self._claimed.clear()
        self._pending.clear()
        self._cache.clear_cache()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)
