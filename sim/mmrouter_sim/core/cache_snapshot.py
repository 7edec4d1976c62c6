"""Contents of one rank's cache: each block with everything that its hash covers, for tests that mirror a cache.

Real engines do not report this. A block refers to its parent, so the beginning of a prompt is kept for as long as any
later block of it is held.
"""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from weakref import WeakValueDictionary

from mmrouter_sim.core.request import Request


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Block:
    """One full block. ``media``: identifier and start - block start of each image in it."""

    digest: bytes
    parent: "Block | None"
    ids: "array[int]"
    media: tuple[tuple[str, int], ...]
    salt: str | None
    lora: str | None


class CacheContents:
    """The held blocks, each once, regardless of copies."""

    def __init__(self, block_size: int) -> None:
        self._size = block_size
        self._held: dict[bytes, Block] = {}
        self._known: WeakValueDictionary[bytes, Block] = WeakValueDictionary()

    def fill(self, request: Request, first: int, last: int) -> None:
        """Add blocks [first, last) of a request."""
        start = first
        while start and request.digests[start - 1] not in self._known:
            start -= 1  # a copy of another request, which is gone
        before = self._known[request.digests[start - 1]] if start else None
        for number in range(start, last):
            before = self._block(request, number, before)
            if number >= first:
                self._held[before.digest] = before

    def forget(self, digest: bytes) -> None:
        """Remove a block whose last copy is gone."""
        del self._held[digest]

    def clear(self) -> None:
        """Remove all blocks."""
        self._held.clear()

    def with_ancestors(self) -> Iterator[tuple[Block, bool]]:
        """Return held blocks with ``True`` and their ancestors that are not held with ``False``, parents first."""
        seen: set[bytes] = set()
        for block in self._held.values():
            line: list[Block] = []
            each: Block | None = block
            while each is not None and each.digest not in seen:
                seen.add(each.digest)
                line.append(each)
                each = each.parent
            yield from ((each, each.digest in self._held) for each in reversed(line))

    def _block(self, request: Request, number: int, parent: Block | None) -> Block:
        digest, start = request.digests[number], number * self._size
        known = self._known.get(digest)
        if known is None:
            end = start + self._size
            media = tuple((m.identifier, m.offset - start) for m in request.media if m.offset < end and m.end > start)
            lora = request.lora[0] if request.lora else None
            known = Block(digest, parent, request.ids[start:end], media, request.salt, lora)
            self._known[digest] = known
        return known
