"""The physical blocks of one rank: reference counts, the hash index and the free queue.

As in the engine, several physical blocks may hold the same hash if they were computed side by side. Each is announced
when it is filled and when it is evicted, so a mirror of the pool must count copies. Unused blocks stay in the free
queue with their contents until they are needed. The queue yields empty blocks first, then the least recently used;
a request's blocks enter it tail first, so leaves are evicted before their parents (seen in the capture
``qwen2vl_evict_byteshash``).
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

NULL_BLOCK = 0
"""Block 0 is reserved: the engine points unused table entries at it and never hands it out."""


class OutOfBlocksError(RuntimeError):
    """More blocks were requested than are free; the scheduler checks this before."""


class BlockPool:
    """``size`` blocks, block 0 reserved. ``on_evict`` is called with the digest of every evicted copy."""

    def __init__(self, size: int, on_evict: Callable[[bytes], None]) -> None:
        if size < 2:
            raise ValueError(f"a pool needs at least 2 blocks (one is reserved), not {size}")
        self.size = size
        self._on_evict = on_evict
        self._refs = [0] * size
        self._digests: list[bytes | None] = [None] * size
        self._copies: dict[bytes, dict[int, None]] = {}
        self._free: OrderedDict[int, None] = OrderedDict((block, None) for block in range(1, size))

    @property
    def free(self) -> int:
        """Number of blocks that can be allocated, including cached ones."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Number of blocks that requests hold."""
        return self.size - 1 - len(self._free)

    @property
    def usage(self) -> float:
        """Share of the usable blocks that requests hold, 0 to 1."""
        return self.used / (self.size - 1)

    def find(self, digest: bytes) -> int | None:
        """Return a block that holds this hash (the oldest copy), or ``None``."""
        copies = self._copies.get(digest)
        return next(iter(copies)) if copies else None

    def idle(self, blocks: Iterable[int]) -> int:
        """Return how many of these blocks are in the free queue, so that holding them uses a free block each."""
        return sum(self._refs[block] == 0 for block in blocks)

    def hold(self, blocks: Iterable[int]) -> None:
        """Add a reference to cached blocks that a request hit; they leave the free queue."""
        for block in blocks:
            if self._refs[block] == 0:
                del self._free[block]
            self._refs[block] += 1

    def take(self, count: int) -> list[int]:
        """Allocate ``count`` blocks and evict their contents. Raises :class:`OutOfBlocksError`."""
        if count > len(self._free):
            raise OutOfBlocksError(f"{count} blocks wanted, {len(self._free)} free")
        taken = []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            digest = self._digests[block]
            if digest is not None:
                self._forget(block, digest)
                self._on_evict(digest)
            self._refs[block] = 1
            taken.append(block)
        return taken

    def fill(self, blocks: Sequence[int], digests: Sequence[bytes]) -> None:
        """Make full blocks findable by their hash. A block is filled once per allocation."""
        for block, digest in zip(blocks, digests, strict=True):
            if self._digests[block] is not None:
                raise ValueError(f"block {block} is filled already")
            self._digests[block] = digest
            self._copies.setdefault(digest, {})[block] = None

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference to each of a request's blocks, given in prompt order."""
        for block in reversed(blocks):
            self._refs[block] -= 1
            if self._refs[block] < 0:
                raise ValueError(f"block {block} was released more often than it was held")
            if self._refs[block] == 0:
                self._free[block] = None
                if self._digests[block] is None:
                    self._free.move_to_end(block, last=False)

    def clear(self) -> bool:
        """Evict all contents. Returns ``False`` and does nothing while any block is held."""
        if self.used:
            return False
        self._copies.clear()
        self._digests = [None] * self.size
        return True

    def contents(self) -> dict[bytes, int]:
        """Return digest -> number of physical copies."""
        return {digest: len(copies) for digest, copies in self._copies.items()}

    def _forget(self, block: int, digest: bytes) -> None:
        copies = self._copies[digest]
        del copies[block]
        if not copies:
            del self._copies[digest]
        self._digests[block] = None
