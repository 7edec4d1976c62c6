"""Block key -> the slots that hold the block, in the form that works without ``mmrouter_native`` (docs/native.md).

A lookup costs one dictionary access per block, whatever the number of slots. Equal sets of slots are one object
(:meth:`HolderTable._shared`). Neighbouring blocks of a prompt mostly have the same holders, so every loop here computes
a set once per run of blocks and skips the rest of the run by identity, a mere shortcut.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import compress, count, islice

Slot = int  # number of a candidate's bit

MAX_SETS = 65_536  # distinct holder sets that are shared; beyond it sharing starts anew, at a cost in memory only
SPARSE = 16  # with at most one of this many bits set, bits are extracted one by one
_DIGITS = bytes.maketrans(b"01", b"\0\1")


class HolderTable:
    """Block key (unsigned 64 bit) -> slots. Methods but ``keys`` are bounded by the size of their arguments.

    ``mmrouter_native.HolderTable`` has the same methods and gives the same answers. Masks have a bit per slot; a
    ``width`` is above every slot of the mask beside it.
    """

    def __init__(self) -> None:
        self._holders: dict[int, int] = {}
        self._sets: dict[int, int] = {}
        self._wiped = 0
        self._left: Iterator[int] = iter(())  # keys to look at while slots are wiped

    def __len__(self) -> int:
        return len(self._holders)

    def add(self, slot: Slot, keys: Iterable[int], /) -> int:
        """Add a slot to the holders of keys; return the number of those that lacked it."""
        bit, holders, added = 1 << slot, self._holders, 0
        get = holders.get
        seen, joined, grows = -1, 0, False
        for key in keys:
            have = get(key, 0)
            if have is not seen:
                seen, grows = have, not have & bit
                joined = self._shared(have | bit)
            if grows:
                holders[key] = joined
                added += 1
        return added

    def discard(self, slot: Slot, keys: Iterable[int], /) -> int:
        """Remove a slot from the holders of keys; return the number of those that had it."""
        bit, holders, removed = 1 << slot, self._holders, 0
        get = holders.get
        seen, rest, shrinks = -1, 0, False
        for key in keys:
            have = get(key, 0)
            if have is not seen:
                seen, shrinks = have, bool(have & bit)
                rest = self._shared(have & ~bit)
            if shrinks:
                removed += 1
                if rest:
                    holders[key] = rest
                else:
                    del holders[key]
        return removed

    def holders(self, keys: Iterable[int], /) -> list[int]:
        """Return a mask for each key."""
        get = self._holders.get
        return [get(key, 0) for key in keys]

    def keys(self, slot: Slot, /) -> set[int]:
        """Return the keys of a slot by a scan of the whole table."""
        return {key for key, have in self._holders.items() if have >> slot & 1}

    def leading(self, keys: Sequence[int], wanted: int, width: int, /) -> list[int]:
        """Return for each slot below ``width`` how many leading keys it holds, 0 for those not in ``wanted``."""
        overlap = [0] * width
        alive = wanted
        depth, seen = 0, -1
        for depth, have in enumerate(map(self._holders.get, keys)):
            if have is not seen:
                if have is None:
                    break
                seen, still = have, have & alive
                if still != alive:
                    if depth:
                        for slot in bits(alive ^ still):
                            overlap[slot] = depth
                    alive = still
                    if not alive:
                        return overlap
        else:
            depth = len(keys)
        if depth:
            for slot in bits(alive):
                overlap[slot] = depth
        return overlap

    def begin_wipe(self, slots: int, width: int, /) -> None:
        """Begin to remove the slots of a mask from all keys; none of them is added until :meth:`wipe` has ended."""
        self._wiped, self._left = slots, iter(list(self._holders))

    def wipe(self, budget: int, /) -> bool:
        """Look at about ``budget`` more keys; return whether any are left."""
        holders, keep = self._holders, ~self._wiped
        batch = list(islice(self._left, budget))
        for key in batch:
            have = holders.get(key, 0)
            if have & self._wiped:
                rest = self._shared(have & keep)
                if rest:
                    holders[key] = rest
                else:
                    del holders[key]
        return len(batch) == budget

    def _shared(self, mask: int) -> int:
        if len(self._sets) >= MAX_SETS:
            self._sets.clear()
        return self._sets.setdefault(mask, mask)


def mask_of(slots: Iterable[Slot]) -> int:
    numbers = list(slots)
    digits = bytearray(b"0") * (max(numbers, default=0) + 1)  # a mask of a thousand bits, shifted in, costs the square
    for slot in numbers:
        digits[slot] = ord("1")
    digits.reverse()
    return int(digits, 2)


def bits(mask: int) -> list[Slot]:
    """Return the numbers of the bits that are set, lowest first."""
    if mask.bit_count() * SPARSE > mask.bit_length():
        return list(compress(count(), f"{mask:b}"[::-1].encode().translate(_DIGITS)))
    numbers = []
    while mask:  # few bits: a pass over all digits would cost more
        low = mask & -mask
        numbers.append(low.bit_length() - 1)
        mask ^= low
    return numbers
