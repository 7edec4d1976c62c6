"""Compute the keys of sliding-window blocks: find which blocks an event names by recomputing engine hashes.

A sliding-window group keeps only the blocks that a later hit can use, and the engine's events name only these. The key
of a named block depends on all blocks before it, kept or not. Its position is found by recomputing the engine's hash,
which needs the whole digest of the block before (:mod:`mmrouter_lib.engines.vllm.block_hashes`). Events contain 64-bit
hashes, too short to continue from, so keys and digests of all followed blocks are remembered.

Whole digests in the events would not replace this memory, because the keys of blocks that were never stored have no
other source. Only groups that decide by a window pay, about 6 us of hashing per block. Pure; no I/O.
"""

from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple

from mmrouter_lib.block_keys import Key, chain
from mmrouter_lib.engines.base.events import EventError, Ragged, Stored
from mmrouter_lib.engines.vllm.block_hashes import align, root, short
from mmrouter_lib.engines.vllm.events import published_extras

MAX_KNOWN = 131_072  # number of remembered blocks, about 250 bytes each; the oldest are dropped
DIGEST_BYTES = 32

Seed = Callable[[str | None, str | None], Key]  # (LoRA, salt) -> seed of a chain of keys


class LocatedBlocks(NamedTuple):
    """The hashes of a ragged event: located ones with their keys, and the ``rest``."""

    hashes: tuple[int, ...]
    keys: "array[int]"
    rest: tuple[int, ...]


class WindowBlocks:
    """Keys and digests of followed blocks, by engine hash."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Key, bytes]] = {}  # key and digest: the chain is known from the prompt's start
        self._root = root()
        self._keys = array("Q")
        self._digests: list[bytes] = []

    def __len__(self) -> int:
        return len(self._known)

    def key(self, number: int) -> Key | None:
        known = self._known.get(number)
        return known[0] if known else None

    def clear(self) -> None:
        """Drop everything, including what was not taken."""
        self._known.clear()
        self._keys, self._digests = array("Q"), []

    def take(self) -> tuple["array[int]", bytes]:
        """Return the keys and concatenated digests of blocks that are new since the last call."""
        keys, digests = self._keys, b"".join(self._digests)
        self._keys, self._digests = array("Q"), []
        return keys, digests

    def recall(self, keys: Sequence[Key], digests: bytes) -> None:
        for number, key in enumerate(keys):
            self._remember(key, digests[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES])

    def dump(self) -> tuple["array[int]", bytes]:
        """Return the keys and concatenated digests of all remembered blocks, oldest first."""
        known = self._known.values()
        return array("Q", [key for key, _ in known]), b"".join([digest for _, digest in known])

    def follow(self, event: Stored, keys: Sequence[Key]) -> None:
        """Follow the blocks of an event that names all of them, as far as their recomputed hashes match."""
        parent = self._parent(event)
        if parent is None or event.lora is not None or event.lookahead:
            return
        hashes, first = event.hashes[: len(keys)], event.parent is None
        try:
            aligned = align(hashes, event.ids, event.block_size, event.published, parent, first=first)
        except ValueError:
            return
        for number, digest in zip(aligned.blocks, aligned.digests, strict=False):
            self._follow(keys[number], digest)

    def place(self, event: Ragged, seed: Seed) -> LocatedBlocks:
        """Locate the blocks that an event names, and follow all its blocks, stored or not."""
        parent = self._parent(event)
        start = None if event.parent is None else self.key(event.parent)
        unlocated = LocatedBlocks((), array("Q"), event.hashes)
        if parent is None or event.lora is not None or event.lookahead or (event.parent is not None and start is None):
            return unlocated
        size, first = event.block_size, event.parent is None
        try:
            aligned = align(event.hashes, event.ids, size, event.published, parent, first=first)
            extras, _, salt = published_extras(aligned.extra_keys, lora=None, starts_prompt=first)
        except (EventError, ValueError):
            return unlocated
        if start is None:
            start = seed(None, salt)
        keys = chain(event.ids, size, len(aligned.digests), extras, start)
        for key, digest in zip(keys, aligned.digests, strict=True):
            self._follow(key, digest)
        count = len(aligned.blocks)
        return LocatedBlocks(event.hashes[:count], array("Q", [keys[n] for n in aligned.blocks]), event.hashes[count:])

    def _parent(self, event: Stored | Ragged) -> bytes | None:
        if event.parent is None:
            return self._root
        known = self._known.get(event.parent)
        return known[1] if known else None

    def _follow(self, key: Key, digest: bytes) -> None:
        if self._remember(key, digest):
            self._keys.append(key)
            self._digests.append(digest)

    def _remember(self, key: Key, digest: bytes) -> bool:
        number = short(digest)
        fresh = self._known.pop(number, None) is None
        self._known[number] = (key, digest)
        if len(self._known) > MAX_KNOWN:
            del self._known[next(iter(self._known))]
        return fresh
