"""The router's model of what one encoder's cache holds: what it encoded for us, least recently used out first.

Engines publish nothing about it (docs/engine-facts/vllm.md#encoder-disaggregation), so this can be wrong in both
directions: what an encoder dropped
early is forgotten when somebody finds out, what other routers had encoded is not known.
"""

from collections import OrderedDict
from typing import Any


class Held:
    """Embeddings by key, bounded in number and bytes."""

    def __init__(self, entries: int, size: int) -> None:
        self._entries, self._limit = entries, size
        self._held: OrderedDict[bytes, tuple[int, Any]] = OrderedDict()
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, key: bytes) -> bool:
        return key in self._held

    def use(self, key: bytes) -> Any:
        """Return what the encoder answered, and count the embedding as used. Raises ``KeyError`` if it is not held."""
        self._held.move_to_end(key)
        return self._held[key][1]

    def add(self, key: bytes, size: int, value: Any) -> None:
        """Note an embedding of ``size`` bytes; one that alone is above the bound is not kept."""
        self.forget(key)
        if size > self._limit or not self._entries:
            return
        self._held[key] = (size, value)
        self.bytes += size
        self._evict()

    def rebound(self, entries: int, size: int) -> None:
        """Its cache has other bounds than before."""
        self._entries, self._limit = entries, size
        self._evict()

    def forget(self, key: bytes) -> None:
        """The encoder does not hold it (any more)."""
        if key in self._held:
            self.bytes -= self._held.pop(key)[0]

    def _evict(self) -> None:
        while self.bytes > self._limit or len(self._held) > self._entries:
            _, (gone, _) = self._held.popitem(last=False)
            self.bytes -= gone
