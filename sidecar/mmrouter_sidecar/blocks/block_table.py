"""The blocks of one place (rank, group, medium): engine hash -> block key, with copies counted. Pure; no I/O."""

from array import array
from collections import Counter, deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from mmrouter_lib.block_keys import Key


@dataclass(slots=True)
class Cache:
    """What is held, and what changed since :meth:`net` was last called.

    ``blocks``: engine hash -> key. ``copies``: engine hash -> copies, where there are several. ``owners``: key ->
    number of hashes that have it, for keys that several may have. ``aside``: engine hash -> copies, without a key.
    ``partial``: every event so far was about one block, so these may have been parts of blocks of the group.

    An engine's hash and our key stand for the same content, so each hash has a key of its own; only with LoRA adapters
    may several hashes share one, because the engine also hashes the path that an adapter was loaded from, which its
    events do not tell (docs/engine-facts/vllm.md#block-hashes).
    """

    blocks: dict[int, Key] = field(default_factory=dict)
    copies: dict[int, int] = field(default_factory=dict)
    owners: dict[Key, int] = field(default_factory=dict)
    aside: dict[int, int] = field(default_factory=dict)
    block_size: int = 0
    partial: bool = True
    stored: "array[int]" = field(default_factory=lambda: array("Q"))
    removed: "array[int]" = field(default_factory=lambda: array("Q"))

    @property
    def held(self) -> int:
        """Distinct keys held."""
        return len(self.blocks) - sum(self.owners.values()) + len(self.owners)

    def keys(self) -> Collection[Key]:
        """Return the distinct keys held."""
        keys = self.blocks.values()
        return dict.fromkeys(keys) if self.owners else keys

    def add(self, hashes: Sequence[int], keys: "array[int]", *, shareable: bool = False) -> int:
        """Count one more copy of each block. Returns how many known hashes came with another key (the first stays).

        ``shareable``: other hashes may have the same keys.
        """
        blocks = self.blocks
        if len(hashes) == 1:  # what engines announce while they decode
            number, key = hashes[0], keys[0]
            if shareable or number in blocks or self.aside:
                return int(self._add_one(number, key, shareable))
            blocks[number] = key
            self.stored.append(key)
            return 0
        # Nearly always everything is new; then one pass in C does it, which looks for each block once.
        if not shareable and (not self.aside or self.aside.keys().isdisjoint(hashes)):
            before = len(blocks)
            deque(map(blocks.setdefault, hashes, keys.tolist()), maxlen=0)
            new = len(blocks) - before
            if new == len(keys) == len(hashes):
                self.stored.extend(keys)
                return 0
            for number in list(islice(reversed(blocks), new)):  # some were known: one by one after all
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
        """Count one more copy of each block without knowing its key; a known block simply has one copy more."""
        for number in hashes:
            if number in self.blocks:
                self.copies[number] = self.copies.get(number, 1) + 1
            else:
                self.aside[number] = self.aside.get(number, 0) + 1

    def resize(self, block_size: int) -> None:
        """Put everything aside: its keys are those of blocks of another size."""
        for number in tuple(self.blocks):
            self.aside[number] = self.aside.get(number, 0) + self.copies.get(number, 1)
        self.removed.extend(self.keys())
        self.blocks.clear()
        self.copies.clear()
        self.owners.clear()
        self.block_size, self.partial = block_size, False

    def drop(self, hashes: Sequence[int]) -> int:
        """Count one copy of each block less. Returns how many hashes were not known at all."""
        copies = self.copies
        single = hashes if not copies or copies.keys().isdisjoint(hashes) else [n for n in hashes if self._last_copy(n)]
        pop, owners, gone = self.blocks.pop, self.owners, self.removed.append
        unknown = 0
        for number in single:
            key = pop(number, None)
            if key is None:
                unknown += self._drop_aside(number)
                continue
            if owners and (sharing := owners.pop(key, 1)) > 1:
                owners[key] = sharing - 1
                continue
            gone(key)
        return unknown

    def _last_copy(self, number: int) -> bool:
        """Count one copy less where there are several; else the one that is left has to go."""
        copies = self.copies.get(number)
        if copies is None:
            return True
        if copies == 2:
            del self.copies[number]
        else:
            self.copies[number] = copies - 1
        return False

    def _drop_aside(self, number: int) -> bool:
        waiting = self.aside.get(number)
        if waiting is None:
            return True
        if waiting == 1:
            del self.aside[number]
        else:
            self.aside[number] = waiting - 1
        return False

    def net(self) -> tuple["array[int]", "array[int]"]:
        """Return and reset what changed.

        ``stored`` and ``removed`` list each key's appearances and disappearances, which alternate: a key in both lists
        changed only if it stands in one of them more often.
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
