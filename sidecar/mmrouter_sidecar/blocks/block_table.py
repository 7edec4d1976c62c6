"""Blocks of one rank, cache group and medium: engine hash -> block key, with copies counted. Pure; no I/O."""

from array import array
from collections import Counter, deque
from collections.abc import Collection, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from mmrouter_lib.block_keys import Key


class Joined(NamedTuple):
    """A block of several parts: its key, the parts before the last one, which names it, and whether others share it."""

    key: Key
    parts: tuple[int, ...]
    shareable: bool


@dataclass(slots=True)
class BlockTable:
    """The blocks held, and the changes since the last call of :meth:`net`.

    ``blocks``: engine hash -> key. ``copies``: engine hash -> copies, if more than one. ``owners``: key -> number of
    its hashes, for keys that several hashes may share. ``aside``: engine hash -> copies, for blocks without a key.
    ``partial``: every event so far had one block, so the entries may be parts of the group's blocks. ``joined``: blocks
    that have a key while the parts before them, which stay aside, are held; ``wholes_of``: part -> these blocks.

    An engine hash and a key stand for the same content, so each hash has its own key. Only with LoRA adapters may
    several hashes share one, because the engine also hashes the path of the adapter, which its events do not contain
    (docs/engine-facts/vllm.md#block-hashes).
    """

    blocks: dict[int, Key] = field(default_factory=dict)
    copies: dict[int, int] = field(default_factory=dict)
    owners: dict[Key, int] = field(default_factory=dict)
    aside: dict[int, int] = field(default_factory=dict)
    block_size: int = 0
    partial: bool = True
    joined: dict[int, "Joined"] = field(default_factory=dict)
    wholes_of: dict[int, set[int]] = field(default_factory=dict)
    stored: "array[int]" = field(default_factory=lambda: array("Q"))
    removed: "array[int]" = field(default_factory=lambda: array("Q"))

    @property
    def held(self) -> int:
        return len(self.blocks) - sum(self.owners.values()) + len(self.owners)

    def keys(self) -> Collection[Key]:
        keys = self.blocks.values()
        return dict.fromkeys(keys) if self.owners else keys

    def add(self, hashes: Sequence[int], keys: "array[int]", *, shareable: bool = False) -> int:
        """Add one copy of each block. Returns how many known hashes came with another key (the first key stays)."""
        blocks = self.blocks
        if len(hashes) == 1:  # the usual event during decoding
            number, key = hashes[0], keys[0]
            if shareable or number in blocks or self.aside:
                return int(self._add_one(number, key, shareable))
            blocks[number] = key
            self.stored.append(key)
            return 0
        # Usually all blocks are new: one pass in C with one lookup per block.
        if not shareable and (not self.aside or self.aside.keys().isdisjoint(hashes)):
            before = len(blocks)
            deque(map(blocks.setdefault, hashes, keys.tolist()), maxlen=0)
            new = len(blocks) - before
            if new == len(keys) == len(hashes):
                self.stored.extend(keys)
                return 0
            for number in list(islice(reversed(blocks), new)):  # some were known: undo, and add one by one
                del blocks[number]
        return sum(self._add_one(number, key, shareable) for number, key in zip(hashes, keys, strict=True))

    def _add_one(self, number: int, key: Key, shareable: bool) -> bool:
        known = self.blocks.get(number)
        if known is not None:
            self.copies[number] = self.copies.get(number, 1) + 1
            return known != key
        self.blocks[number] = key
        waiting = self.aside.pop(number, 0)
        if waiting:
            self.copies[number] = waiting + 1
        if shareable:
            owners = self.owners.get(key, 0)
            self.owners[key] = owners + 1
            if owners:
                return False
        self.stored.append(key)
        return False

    def put_aside(self, hashes: Iterable[int]) -> None:
        """Add one copy of each block without a key; a block with a known key gets one more copy."""
        for number in hashes:
            if number in self.blocks:
                self.copies[number] = self.copies.get(number, 1) + 1
            else:
                self.aside[number] = self.aside.get(number, 0) + 1
                if self.wholes_of:
                    for other in (number, *self.wholes_of.get(number, ())):
                        if other in self.joined:
                            self._publish_if_whole(other)

    def join(self, number: int, parts: tuple[int, ...], key: Key, *, shareable: bool = False) -> None:
        """Let a block that was put aside have a key while it and the ``parts`` before it are held."""
        self.partial = False
        self.joined[number] = Joined(key, parts, shareable)
        for part in parts:
            self.wholes_of.setdefault(part, set()).add(number)
        self._publish_if_whole(number)

    def _publish_if_whole(self, number: int) -> None:
        key, parts, shareable = self.joined[number]
        if number in self.aside and all(part in self.aside for part in parts):
            copies = self.aside.pop(number)
            self._add_one(number, key, shareable)
            if copies > 1:
                self.copies[number] = copies

    def _break_up(self, hashes: Sequence[int]) -> None:
        """Put joined blocks aside of which a part is gone, and forget those that are gone themselves."""
        for number in hashes:
            if number in self.blocks or number in self.aside:
                continue
            for other in self.wholes_of.get(number, ()):
                if other in self.blocks:
                    key = self.blocks.pop(other)
                    self.aside[other] = self.copies.pop(other, 1)
                    self._release(key)
            if (gone := self.joined.pop(number, None)) is not None:
                for part in gone.parts:
                    self.wholes_of[part].discard(number)
                    if not self.wholes_of[part]:
                        del self.wholes_of[part]

    def _release(self, key: Key) -> None:
        if self.owners and (sharing := self.owners.pop(key, 1)) > 1:
            self.owners[key] = sharing - 1
        else:
            self.removed.append(key)

    def resize(self, block_size: int) -> None:
        """Put all blocks aside, because their keys belong to another block size."""
        for number in tuple(self.blocks):
            self.aside[number] = self.aside.get(number, 0) + self.copies.get(number, 1)
        self.removed.extend(self.keys())
        self.blocks.clear()
        self.copies.clear()
        self.owners.clear()
        self.joined.clear()
        self.wholes_of.clear()
        self.block_size = block_size

    def drop(self, hashes: Sequence[int]) -> int:
        """Remove one copy of each block. Returns how many hashes were unknown."""
        copies = self.copies
        single = (
            hashes
            if not copies or copies.keys().isdisjoint(hashes)
            else [n for n in hashes if not _drop_one(copies, n, 2)]
        )
        pop, owners, gone = self.blocks.pop, self.owners, self.removed.append
        unknown = 0
        for number in single:
            key = pop(number, None)
            if key is None:
                unknown += not _drop_one(self.aside, number, 1)
                continue
            if owners:
                self._release(key)
            else:
                gone(key)
        if self.wholes_of:
            self._break_up(hashes)
        return unknown

    def net(self) -> tuple["array[int]", "array[int]"]:
        """Return and reset the net changes: stored and removed keys.

        ``stored`` and ``removed`` list the appearances and disappearances of each key, which alternate. So a key in
        both lists has changed only if it occurs more often in one of them.
        """
        stored, removed = self.stored, self.removed
        self.stored, self.removed = array("Q"), array("Q")
        if stored and removed:
            came, went = set(stored), set(removed)
            both = came & went
            if both and len(came) == len(stored) and len(went) == len(removed):
                stored = array("Q", [key for key in stored if key not in both])
                removed = array("Q", [key for key in removed if key not in both])
            elif both:
                balance = Counter(stored)
                balance.subtract(removed)
                stored = array("Q", [key for key, times in balance.items() if times > 0])
                removed = array("Q", [key for key, times in balance.items() if times < 0])
        return stored, removed


def _drop_one(counts: dict[int, int], number: int, least: int) -> bool:
    """Take one off a count, of which ``least`` is the lowest that is written down; return whether there was a count."""
    count = counts.get(number)
    if count is None:
        return False
    if count == least:
        del counts[number]
    else:
        counts[number] = count - 1
    return True


def whole_blocks(hashes: Sequence[int], ends: Container[int], parts: int) -> Iterator[tuple[int, ...]]:
    """Yield the ``parts`` that make up each block of full attention, in an event of a group with smaller blocks.

    ``ends``: hashes of full attention's blocks, each that of its last part. A window keeps whole blocks of full
    attention and names their parts in order (docs/engine-facts/vllm.md#cache-groups), so those before an end belong to
    it.
    """
    begun: tuple[int, ...] = ()
    for number in hashes:
        begun = (*begun, number)
        if number in ends:
            if len(begun) == parts:
                yield begun
            begun = ()
