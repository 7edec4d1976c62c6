"""Recompute vLLM's block hashes, to align an event's hashes with its tokens.

    digest[i] = SHA-256(canonical CBOR of (digest[i-1], (token ids), extra keys or None))
    digest[-1] = SHA-256(canonical CBOR of the seed text)

Extra keys are published without their kind and hashed with it (docs/engine-facts/vllm.md#block-hashes). On the wire a
hash is the digest or, by default, its low 64 bits.

Groups with a sliding window publish hashes of fewer blocks than their tokens fill, without positions: a prefix, a
suffix, any subset, or none (docs/engine-facts/vllm.md#sliding-windows). :func:`align` recomputes them. Extra keys are
published for the named blocks only. A block in between is assumed to have none, or an image that reaches into it from
its neighbours. A wrong assumption is harmless: no later hash matches it, so the blocks after it stay unaligned.

A LoRA adapter's hash includes the path that it was loaded from, which no event contains: such events cannot be aligned.
"""

import hashlib
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple

import cbor2

SEED = "vllm-none-hash"  # seed of every chain with sha256_cbor, unless the engine's environment sets PYTHONHASHSEED

Published = Sequence[Any]  # extra keys of one block as published
Tagged = tuple[tuple[str, Any] | tuple[str, str, int], ...]  # extra keys of one block as hashed

_LOW_64 = (1 << 64) - 1


class Aligned(NamedTuple):
    """The blocks of an event's tokens.

    ``blocks``: block number of every hash, in order; shorter than the hashes where the rest does not align.
    ``digests`` and ``extra_keys``: of every block up to the last aligned one, then as assumed for the blocks after it.
    """

    blocks: list[int]
    digests: list[bytes]
    extra_keys: list[Published | None]


def root(seed: str = SEED) -> bytes:
    return hashlib.sha256(cbor2.dumps(seed, canonical=True)).digest()


def block_digest(parent: bytes, tokens: Sequence[int], extra_keys: Tagged) -> bytes:
    value = (parent, tuple(tokens), extra_keys or None)
    return hashlib.sha256(cbor2.dumps(value, canonical=True)).digest()


def short(digest: bytes) -> int:
    """Return the form in which engines publish a digest by default: its low 64 bits."""
    return int.from_bytes(digest[-8:], "big") & _LOW_64


def tagged(published: Published | None, *, first: bool) -> Tagged:
    """Return extra keys as they are hashed. ``first``: the block begins a prompt, where the cache salt stands.

    Raises ``ValueError`` for a key of unknown kind, a LoRA's name among them.
    """
    keys: list[tuple[str, Any] | tuple[str, str, int]] = []
    salted = False
    for item in published or ():
        match item:
            case [str(identifier), int(start)]:
                keys.append(("mm", identifier, start))
            case str(salt) if first and not salted:
                keys.append(("cache_salt", salt))
                salted = True
            case bytes(digest):
                keys.append(("prompt_embeds", digest))
            case _:
                raise ValueError(f"an extra key of unknown kind: {item!r}")
    return tuple(keys)


def align(
    hashes: Sequence[int],
    ids: "array[int]",
    block_size: int,
    extra_keys: Sequence[Published | None] | None,
    parent: bytes,
    *,
    first: bool,
) -> Aligned:
    """Find the blocks of ``ids`` that ``hashes`` (64-bit form) name, in order.

    ``extra_keys`` has one entry per hash. ``first``: ``ids`` begins a prompt. Raises ``ValueError`` as :func:`tagged`.
    """
    total = len(ids) // block_size
    walk = _Walk(ids, block_size, parent, first)
    blocks: list[int] = []
    for number, wanted in enumerate(hashes):
        entry = extra_keys[number] if extra_keys else None
        spare = total - len(walk.digests) - (len(hashes) - number)  # blocks that can lie before this one
        gap = walk.gap_before(wanted, entry, spare)
        if gap is None:
            break
        walk.accept(entry, gap)
        blocks.append(len(walk.digests) - 1)
    while len(walk.digests) < total:
        walk.assume(None, 0)
    return Aligned(blocks, walk.digests, walk.extra_keys)


class _Walk:
    """A chain of blocks through one event's tokens."""

    def __init__(self, ids: "array[int]", size: int, parent: bytes, first: bool) -> None:
        self._ids, self._size, self._parent, self._first = ids, size, parent, first
        self.digests: list[bytes] = []
        self.extra_keys: list[Published | None] = []

    def gap_before(self, wanted: int, entry: Published | None, spare: int) -> int | None:
        """Return the number of blocks between the last one and the one that ``wanted`` names, ``None`` without one."""
        mark = len(self.digests)
        reaches_back = any(isinstance(item, list | tuple) and item[1] < 0 for item in entry or ())
        try:
            for gap in range(spare + 1):
                if reaches_back and 0 < gap < spare:
                    # The image began in the gap, so the blocks there depend on its length. Only a suffix is tried:
                    # trying every length would cost the square of the event's blocks.
                    continue
                if reaches_back:
                    for place in range(gap):
                        self.assume(entry, gap - place)
                elif gap:
                    self.assume(None, 0)
                if short(self._digest(entry)) == wanted:
                    return gap
            return None
        finally:
            del self.digests[mark:], self.extra_keys[mark:]

    def accept(self, entry: Published | None, gap: int) -> None:
        """Append ``gap`` assumed blocks and the one that ``entry`` belongs to."""
        for place in range(gap):
            self.assume(entry, gap - place)
        self._append(entry)

    def assume(self, later: Published | None, distance: int) -> None:
        """Append a block that no hash names. ``later``: extra keys of the block ``distance`` blocks further on."""
        entry: list[Any] = self._reaching_here()
        present = {item[0] for item in entry}
        for item in later or ():
            if isinstance(item, list | tuple) and item[1] < 0:
                start = item[1] + distance * self._size
                if start < self._size and item[0] not in present:
                    entry.append([item[0], start])
        self._append(entry or None)

    def _append(self, entry: Published | None) -> None:
        self.digests.append(self._digest(entry))
        self.extra_keys.append(entry)

    def _reaching_here(self) -> list[Any]:
        """Return the last image of the previous block, if its run of one placeholder id continues in this block."""
        number, size = len(self.digests), self._size
        before = self.extra_keys[-1] if self.extra_keys else None
        images = [item for item in before or () if isinstance(item, list | tuple)]
        if not images:
            return []
        identifier, start = images[-1]
        begin, end = (number - 1) * size + max(start, 0), number * size
        token = self._ids[end]
        if any(self._ids[place] != token for place in range(begin, end)):
            return []
        return [[identifier, start - size]]

    def _digest(self, entry: Published | None) -> bytes:
        number, size = len(self.digests), self._size
        parent = self.digests[-1] if self.digests else self._parent
        keys = tagged(entry, first=self._first and number == 0)
        return block_digest(parent, self._ids[number * size : (number + 1) * size], keys)
