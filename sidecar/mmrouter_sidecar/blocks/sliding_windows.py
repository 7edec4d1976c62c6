"""Blocks of sliding-window groups: which ones an event names, and what their keys are. Pure; no I/O.

Such a group keeps only the blocks that a later hit can use, and the engine's events name only these. A named block's
key needs the keys of all blocks before it, kept or not, and its place is found by recomputing the engine's hash, which
needs the whole digest of the block before (:mod:`mmrouter_lib.engines.vllm.block_hashes`). Hashes travel as 64-bit
numbers, too
short to go on from, so both are remembered for every block that the events let us follow.

The alternative, engines that publish whole digests, would spare this memory half of what it holds, and not the memory:
keys of blocks that were never stored cannot come from anywhere else. It would make each hash of *every* engine 34 bytes
instead of 9 on the wire and slower to read, and nobody who writes an engine's command line knows whether its model has
a window. So only groups that decide by a window pay, about 6 us of hashing per block.
"""

from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple

from mmrouter_lib.block_keys import Key, chain
from mmrouter_lib.engines.base.events import EventError, Ragged, Stored
from mmrouter_lib.engines.vllm.block_hashes import align, root, short
from mmrouter_lib.engines.vllm.events import published_extras

MAX_KNOWN = 131_072
"""Blocks remembered, about 250 bytes each; the oldest go."""
DIGEST_BYTES = 32

Seed = Callable[[str | None, str | None], Key]
"""(LoRA, salt) -> where a chain of keys starts."""


class Known(NamedTuple):
    """A block that was followed from its prompt's start."""

    key: Key
    digest: bytes


class Placed(NamedTuple):
    """What a ragged event's hashes are: the explained ones with their keys, and those that are not explained."""

    hashes: tuple[int, ...]
    keys: "array[int]"
    rest: tuple[int, ...]


class Windows:
    """Memory of followed blocks by engine hash. ``learned`` collects what is new since :meth:`take`."""

    def __init__(self) -> None:
        self._known: dict[int, Known] = {}
        self._root = root()
        self._keys = array("Q")
        self._digests: list[bytes] = []

    def __len__(self) -> int:
        return len(self._known)

    def key(self, number: int) -> Key | None:
        """Return a followed block's key."""
        known = self._known.get(number)
        return known.key if known else None

    def clear(self) -> None:
        """Forget everything, with what was not taken."""
        self._known.clear()
        self._keys, self._digests = array("Q"), []

    def take(self) -> tuple["array[int]", bytes]:
        """Return keys and digests, back to back, of what was learned since the last call."""
        keys, digests = self._keys, b"".join(self._digests)
        self._keys, self._digests = array("Q"), []
        return keys, digests

    def recall(self, keys: Sequence[Key], digests: bytes) -> None:
        """Remember what another process learned."""
        for number, key in enumerate(keys):
            self._remember(key, digests[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES])

    def dump(self) -> tuple["array[int]", bytes]:
        """Return keys and digests of everything that is remembered, oldest first."""
        held = self._known.values()
        return array("Q", [known.key for known in held]), b"".join([known.digest for known in held])

    def follow(self, event: Stored, keys: Sequence[Key]) -> None:
        """Learn from an event that names all of its blocks, as far as its hashes are what we make of its tokens."""
        parent = self._parent(event)
        if parent is None or event.lora is not None:
            return
        try:
            found = align(
                event.hashes[: len(keys)],
                event.ids,
                event.block_size,
                event.published,
                parent,
                first=event.parent is None,
            )
        except ValueError:
            return
        for number, digest in zip(found.blocks, found.digests, strict=False):
            self._learn(keys[number], digest)

    def place(self, event: Ragged, seed: Seed) -> Placed:
        """Find what an event's hashes name, and learn its blocks, the ones that were not stored too."""
        parent = self._parent(event)
        start = None if event.parent is None else self.key(event.parent)
        nothing = Placed((), array("Q"), event.hashes)
        if parent is None or event.lora is not None or (event.parent is not None and start is None):
            return nothing
        size, first = event.block_size, event.parent is None
        try:
            found = align(event.hashes, event.ids, size, event.published, parent, first=first)
            extras, _, salt = published_extras(found.extra_keys, lora=None, starts_prompt=first)
        except (EventError, ValueError):
            return nothing
        if start is None:
            start = seed(None, salt)
        keys = chain(event.ids, size, len(found.digests), extras, start)
        for key, digest in zip(keys, found.digests, strict=True):
            self._learn(key, digest)
        count = len(found.blocks)
        return Placed(event.hashes[:count], array("Q", [keys[n] for n in found.blocks]), event.hashes[count:])

    def _parent(self, event: Stored | Ragged) -> bytes | None:
        if event.parent is None:
            return self._root
        known = self._known.get(event.parent)
        return known.digest if known else None

    def _learn(self, key: Key, digest: bytes) -> None:
        if self._remember(key, digest):
            self._keys.append(key)
            self._digests.append(digest)

    def _remember(self, key: Key, digest: bytes) -> bool:
        number = short(digest)
        fresh = self._known.pop(number, None) is None
        self._known[number] = Known(key, digest)
        if len(self._known) > MAX_KNOWN:
            del self._known[next(iter(self._known))]
        return fresh
