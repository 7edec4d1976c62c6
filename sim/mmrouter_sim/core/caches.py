"""One rank's blocks (reference counts, hash index, free queue), their contents, and its encoder outputs.

As in the engine, several physical blocks may hold the same hash if they were computed side by side. Each is announced
when it is filled and when it is evicted, so a mirror of the pool must count copies. Unused blocks stay in the free
queue with their contents until they are needed. The queue yields empty blocks first, then the least recently used;
a request's blocks enter it tail first, so leaves are evicted before their parents (seen in the capture
``qwen2vl_evict_byteshash``).
"""

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from weakref import WeakValueDictionary

from mmrouter_sim.core.requests import Media, Request


class BlockPool:
    """``size`` blocks. Block 0 is reserved: the engine points unused table entries at it and never hands it out.
    ``on_evict`` is called with the digest of every evicted copy.
    """

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
        """Allocate ``count`` blocks and evict their contents. Raises ``ValueError`` if fewer are free."""
        if count > len(self._free):
            raise ValueError(f"{count} blocks wanted, {len(self._free)} free")
        taken = []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            digest = self._digests[block]
            if digest is not None:
                copies = self._copies[digest]
                del copies[block]
                if not copies:
                    del self._copies[digest]
                self._digests[block] = None
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
        return {digest: len(copies) for digest, copies in self._copies.items()}


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
    """The held blocks, each once, regardless of copies, for tests that mirror a cache; real engines do not report them.
    A block refers to its parent, so the beginning of a prompt is kept for as long as any later block of it is held.
    """

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
        del self._held[digest]

    def clear(self) -> None:
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
            lora = request.lora.name if request.lora else None
            known = Block(digest, parent, request.ids[start:end], media, request.salt, lora)
            self._known[digest] = known
        return known


class EncoderCache:
    """Encoder outputs of one rank, at most ``room`` visual tokens. ``room`` is also the budget of one step. The engine
    encodes an image in the step in which its first placeholder is computed, keeps the output until its last one is
    computed, and after that until the space is needed. An image that does not fit into the budget or the space ends the
    step's tokens right before it, which splits a prompt of two large images into more BlockStored events than its
    length alone would (capture ``phi3v-nosw``, "two images A B").
    """

    def __init__(self, room: int) -> None:
        self.room = room
        self._users: dict[str, set[str]] = {}  # identifier -> requests that still need it
        self._size: dict[str, int] = {}
        self._idle: OrderedDict[str, None] = OrderedDict()  # kept but not needed, oldest first
        self._kept = 0
        self.held = 0  # visual tokens that requests still need

    def plan(
        self, request: str, media: Sequence[Media], computed: int, wanted: int, budget: int
    ) -> tuple[int, list[Media]]:
        """Return how many of the ``wanted`` tokens after ``computed`` can run, and the images to encode for them. Marks
        images that are already encoded as needed by this request. ``budget`` is what is left of this step's.
        """
        fresh: list[Media] = []
        planned = 0
        for item in media:
            if item.offset >= computed + wanted:
                break
            if item.end <= computed or any(item.identifier == other.identifier for other in fresh):
                continue
            if item.identifier in self._size:
                if item.identifier in self._idle:
                    del self._idle[item.identifier]
                    self.held += self._size[item.identifier]
                self._users[item.identifier].add(request)
                continue
            if planned + item.length > budget or self.held + planned + item.length > self.room:
                return max(item.offset - computed, 0), fresh
            planned += item.length
            fresh.append(item)
        return wanted, fresh

    def add(self, request: str, item: Media) -> None:
        """Keep an image's output for a request; idle outputs are dropped, least recently used first."""
        while self._kept + item.length > self.room:
            name, _ = self._idle.popitem(last=False)
            self._kept -= self._size.pop(name)
            del self._users[name]
        self._size[item.identifier] = item.length
        self._users[item.identifier] = {request}
        self._kept += item.length
        self.held += item.length

    def done(self, request: str, identifier: str) -> None:
        users = self._users.get(identifier)
        if users is None or request not in users:
            return
        users.remove(request)
        if not users:
            self._idle[identifier] = None
            self.held -= self._size[identifier]
