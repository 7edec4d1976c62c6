"""Which candidate holds which block: block key -> set of candidates, as one bit per candidate.

A candidate is one rank of one worker in one epoch and owns one bit (its *slot*). Looking a prompt up is one dictionary
access per block, whatever the number of candidates; it stops at the first block that nobody holds. A key stands for its
block and all before it, but an engine may drop a block in the middle: a candidate's overlap ends at the first block
that it does not hold, never later.

A cache whose only group has a sliding window hits otherwise (:meth:`Index.match_windows`): it needs the blocks of one
window before the end of the hit, and drops the ones before.

Equal sets are one object (:meth:`Index._shared`). Neighbouring blocks of a prompt mostly have the same holders, so
every loop here works out a set once per run of blocks and passes over the rest of the run by identity; and no key needs
an integer of its own. Identity is only a shortcut: two objects with equal bits give the same answers, slower.

A candidate that leaves is *retired*: its bit no longer matches at once, and is wiped from the table in small steps
(:meth:`Index.sweep`), because wiping a million entries in one go would stall every request in flight.
"""

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import compress, count, islice

Slot = int
"""Number of a candidate's bit."""
NOWHERE: Slot = -1
"""The slot of what is not in the index."""

MAX_SETS = 65_536
"""Distinct holder sets that are shared; beyond it gossip starts anew, which costs memory and time but no answer."""
SPARSE = 16
"""Where at most one bit in so many is set, they are looked for one by one."""
_DIGITS = bytes.maketrans(b"01", b"\0\1")


class Index:
    """Block key -> candidates. Not thread-safe; every method but ``sweep`` is bounded by the size of its argument."""

    def __init__(self) -> None:
        self._holders: dict[int, int] = {}
        self._sets: dict[int, int] = {}
        self._live = 0
        self._retired = 0
        self._held = array("q", (0,))  # by slot; the last entry is that of NOWHERE, which is the last of any array
        self._sweep: Iterator[int] | None = None
        self._sweeping = 0

    def __len__(self) -> int:
        """Number of distinct keys, retired candidates' included until they are swept."""
        return len(self._holders)

    def join(self) -> Slot:
        """Add a candidate that holds nothing and return its slot."""
        used = self._live | self._retired
        slot = (~used & (used + 1)).bit_length() - 1  # lowest zero bit
        self._live |= 1 << slot
        if slot == len(self._held) - 1:
            self._held.append(0)
        return slot

    def retire(self, slot: Slot) -> None:
        """Remove a candidate: it matches nothing from now on. Retiring twice is harmless."""
        bit = 1 << slot
        if self._live & bit:
            self._live ^= bit
            self._held[slot] = 0
            self._retired |= bit

    def store(self, slot: Slot, keys: Iterable[int]) -> None:
        """Add keys to a candidate; keys that it holds already change nothing."""
        bit = 1 << slot
        if not self._live & bit:
            raise KeyError(f"slot {slot} is not in the index")
        holders, added = self._holders, 0
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
        self._held[slot] += added

    def remove(self, slot: Slot, keys: Iterable[int]) -> None:
        """Take keys from a candidate; keys that it does not hold change nothing."""
        bit = 1 << slot
        if not self._live & bit:
            raise KeyError(f"slot {slot} is not in the index")
        holders, gone = self._holders, 0
        get = holders.get
        seen, rest, shrinks = -1, 0, False
        for key in keys:
            have = get(key, 0)
            if have is not seen:
                seen, shrinks = have, bool(have & bit)
                rest = self._shared(have & ~bit)
            if shrinks:
                gone += 1
                if rest:
                    holders[key] = rest
                else:
                    del holders[key]
        self._held[slot] -= gone

    def held(self, slot: Slot) -> int:
        """Number of keys that a candidate holds."""
        return self._held[slot]

    def held_by(self, take: Callable[["array[int]"], Sequence[int]]) -> Sequence[int]:
        """The same of many: what is taken out of the numbers by slot. A slot that is not in the index has 0."""
        return take(self._held)

    def holds(self, slot: Slot, key: int) -> bool:
        """Whether a live candidate holds a key."""
        return bool(self._holders.get(key, 0) & self._live & (1 << slot))

    def keys(self, slot: Slot) -> set[int]:
        """All keys of one candidate: a scan of the whole table, for tests and the control API."""
        bit = 1 << slot
        return {key for key, have in self._holders.items() if have & bit} if self._live & bit else set()

    def match(self, keys: Sequence[int], slots: Iterable[Slot], mask: int | None = None) -> dict[Slot, int]:
        """Return slot -> number of leading blocks of ``keys`` that the candidate holds, for the given live slots.

        In their order, where all of them are live. Callers that ask for the same ones again and again have them as a
        dictionary of zeros, and ``mask``: :func:`mask_of` them.
        """
        asked = slots.copy() if isinstance(slots, dict) else dict.fromkeys(slots, 0)
        wanted = mask_of(asked) if mask is None else mask
        alive = wanted & self._live
        overlap = asked if alive == wanted else dict.fromkeys(bits(alive), 0)
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

    def match_windows(self, keys: Sequence[int], needs: Mapping[Slot, int]) -> dict[Slot, int]:
        """Return slot -> longest hit, for live slots whose cache has a sliding window.

        ``needs`` has the blocks that a hit needs before its end (:func:`window_blocks`): a hit of n blocks is possible
        where the last ``min(n, need)`` of them are held. ``keys`` are those of the blocks that can be hit: an engine
        computes a prompt's last token anew, so the block that ends with it is not among them.
        """
        get, length = self._holders.get, len(keys)
        if any(need < length for need in needs.values()):
            holders = [get(key, 0) for key in keys]
        overlap: dict[Slot, int] = {}
        whole: list[Slot] = []  # windows that reach over the whole prompt: a hit is a prefix
        for slot, need in needs.items():
            if need >= length:
                whole.append(slot)
            elif self._live >> slot & 1:
                overlap[slot] = _last_run(holders, 1 << slot, need)
        return overlap | self.match(keys, whole) if whole else overlap

    def sweep(self, budget: int = 20_000) -> bool:
        """Wipe up to ``budget`` keys of retired candidates. Return True while there is more to do."""
        if self._sweep is None:
            if not self._retired:
                return False
            # Keys stored from now on cannot carry these bits: the slots are not given out before the sweep ends.
            self._sweeping = self._retired
            self._sweep = iter(list(self._holders))
        holders, keep = self._holders, ~self._sweeping
        batch = list(islice(self._sweep, budget))
        for key in batch:
            have = holders.get(key, 0)
            if have & self._sweeping:
                rest = self._shared(have & keep)
                if rest:
                    holders[key] = rest
                else:
                    del holders[key]
        if len(batch) < budget:
            self._sweep = None
            self._retired &= keep
            self._sweeping = 0
        return bool(self._retired)

    def _shared(self, mask: int) -> int:
        """Return the one object that stands for this set of candidates."""
        if len(self._sets) >= MAX_SETS:
            self._sets.clear()
        return self._sets.setdefault(mask, mask)


def window_blocks(window: int, block_size: int) -> int:
    """Return how many blocks before its end a hit needs with a window of this many tokens.

    See docs/engine-facts/vllm.md#sliding-windows.
    """
    return max(1, -(-(window - 1) // block_size))


def _last_run(holders: Sequence[int], bit: int, need: int) -> int:
    """Return the end of the last ``need`` blocks in a row that are held, else the length of the leading run."""
    run = 0
    for number in range(len(holders) - 1, -1, -1):
        if holders[number] & bit:
            run += 1
            if run == need:
                return number + need
        else:
            run = 0
    return run


def mask_of(slots: Iterable[Slot]) -> int:
    """Return the set of these slots."""
    mask = 0
    for slot in slots:
        mask |= 1 << slot
    return mask


def bits(mask: int) -> list[Slot]:
    """Return the numbers of the bits that are set, lowest first."""
    if mask.bit_count() * SPARSE > mask.bit_length():
        return list(compress(count(), f"{mask:b}"[::-1].encode().translate(_DIGITS)))
    numbers = []
    while mask:  # a pass over all digits is not worth it for a few bits
        low = mask & -mask
        numbers.append(low.bit_length() - 1)
        mask ^= low
    return numbers
