"""Index of KV cache blocks: block key -> set of candidates that hold it, one bit per candidate.

A candidate is one rank of one worker in one epoch and owns one bit (its *slot*). Which slots hold a key is in a table
(:mod:`mmrouter_router.fleet.holder_table`), of which there is a compiled form (docs/native.md). A prompt lookup stops
at the first block without a holder. A key stands for its block and all before it, but an engine may evict a block in
the middle: a candidate's overlap ends at the first block that it does not hold. A cache of several groups has a slot
for each, and hits otherwise (:meth:`Index.match_groups`).

A removed candidate is *retired*: its bit stops matching at once, and is wiped from the table in small steps
(:meth:`Index.sweep`), because wiping a million entries at once would stall every request in flight.
"""

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from mmrouter_lib import native
from mmrouter_router.fleet.holder_table import HolderTable, Slot, mask_of

NOWHERE: Slot = -1  # the slot of a rank that is not in the index


class TailRule(NamedTuple):
    """Groups that hold as many ``blocks`` at a hit's end; ``keys``: how many keys such a block is long."""

    blocks: int
    groups: int
    keys: int = 1


class HitRule(NamedTuple):
    """What a hit needs of a cache's groups (``mmrouter_lib.cache_layout``), as bits of their slots.

    ``whole``: groups that hold every block of the hit. ``tails``: what others hold at its end. ``recomputed``: groups
    that hold one block more than the hit, which the engine computes anew. ``sees_last``: that one may end with the
    prompt's last token. ``chunked``: groups that hold every block of the hit since the begin of its last chunk, which
    has ``chunk`` tokens, in blocks of ``block_size``. ``align``: the number of keys that a hit is a multiple of.
    """

    whole: int
    tails: tuple[TailRule, ...]
    recomputed: int = 0
    sees_last: bool = False
    chunked: int = 0
    chunk: int = 0
    block_size: int = 0
    align: int = 1

    def of_length(self, blocks: int) -> "HitRule":
        """Return the rule for prompts of ``blocks``, of which a tail of that length is the whole."""
        if self.align > 1 or all(tail.blocks < blocks for tail in self.tails):
            return self
        whole, tails = self.whole, []
        for tail in self.tails:
            if tail.blocks < blocks:
                tails.append(tail)
            else:
                whole |= tail.groups
        return self._replace(whole=whole, tails=tuple(tails))


class Index:
    """Block key -> candidates. Not thread-safe; every method but ``sweep`` is bounded by the size of its argument."""

    def __init__(self) -> None:
        self._table = (native.HolderTable or HolderTable)()
        self._live = 0
        self._retired = 0
        self._held = array("q", (0,))  # by slot; the last entry is that of NOWHERE (-1)
        self._sweeping = 0

    def __len__(self) -> int:
        """Number of distinct keys, retired candidates' included until they are swept."""
        return len(self._table)

    def join(self) -> Slot:
        used = self._live | self._retired
        slot = (~used & (used + 1)).bit_length() - 1  # lowest zero bit
        self._live |= 1 << slot
        if slot == len(self._held) - 1:
            self._held.append(0)
        return slot

    def retire(self, slot: Slot) -> None:
        """Remove a candidate: it no longer matches. Idempotent."""
        bit = 1 << slot
        if self._live & bit:
            self._live ^= bit
            self._held[slot] = 0
            self._retired |= bit

    def store(self, slot: Slot, keys: Iterable[int]) -> None:
        """Add keys to a candidate; held keys are ignored. Raises ``KeyError`` for a slot that is not live."""
        self._require(slot)
        self._held[slot] += self._table.add(slot, keys)

    def remove(self, slot: Slot, keys: Iterable[int]) -> None:
        """Remove keys from a candidate; keys that it does not hold are ignored. Raises ``KeyError`` as ``store``."""
        self._require(slot)
        self._held[slot] -= self._table.discard(slot, keys)

    def _require(self, slot: Slot) -> None:
        if not self._live >> slot & 1:
            raise KeyError(f"slot {slot} is not in the index")

    def held(self, slot: Slot) -> int:
        return self._held[slot]

    def held_by(self, take: Callable[["array[int]"], Sequence[int]]) -> Sequence[int]:
        """Return the numbers of many candidates: ``take`` picks from the counts by slot. ``NOWHERE`` has 0."""
        return take(self._held)

    def holds(self, slot: Slot, key: int) -> bool:
        return bool(self.holders(key) >> slot & 1)

    def holders(self, key: int) -> int:
        """Return the candidates that hold a block, as bits of their slots."""
        return self._table.holders((key,))[0] & self._live

    def keys(self, slot: Slot) -> set[int]:
        """Return all keys of one candidate by a scan of the whole table, for tests and the control API."""
        return self._table.keys(slot) if self._live >> slot & 1 else set()

    def leading(self, keys: Sequence[int], wanted: int) -> list[int]:
        """Return the leading blocks held, by slot: 0 for those not in the mask ``wanted``, and for ``NOWHERE``."""
        return self._table.leading(keys, wanted & self._live, len(self._held))

    def match(self, keys: Sequence[int], slots: Iterable[Slot]) -> dict[Slot, int]:
        """Return slot -> leading blocks held, for live ``slots``."""
        slots = [slot for slot in slots if self._live >> slot & 1]
        overlap = self.leading(keys, mask_of(slots))
        return {slot: overlap[slot] for slot in slots}

    def match_groups(self, keys: Sequence[int], rules: Mapping[Slot, HitRule]) -> dict[Slot, int]:
        """Return slot -> longest hit, for live slots of caches with several groups or a window, by their primary slot.

        ``keys`` exclude a block that ends with the prompt's last token, except for rules that see it.
        """
        holders: list[int] | None = None
        overlap: dict[Slot, int] = {}
        leading: list[Slot] = []  # a hit is what the primary group holds from the start
        for slot, general in rules.items():
            rule = general.of_length(len(keys))
            if not (rule.tails or rule.chunked or rule.recomputed) and rule.whole == 1 << slot:
                leading.append(slot)
            elif self._live >> slot & 1:
                holders = self._table.holders(keys) if holders is None else holders
                overlap[slot] = _longest_hit(holders, rule)
        return overlap | self.match(keys, leading) if leading else overlap

    def sweep(self, budget: int = 20_000) -> bool:
        """Wipe about ``budget`` keys of retired candidates; return whether keys are left."""
        if not self._sweeping:
            if not self._retired:
                return False
            # Keys stored from now on cannot have these bits: the slots are reused only after the sweep.
            self._sweeping = self._retired
            self._table.begin_wipe(self._sweeping, len(self._held))
        if not self._table.wipe(budget):
            self._retired &= ~self._sweeping
            self._sweeping = 0
        return bool(self._retired)


def _longest_hit(holders: Sequence[int], rule: HitRule) -> int:
    """Shorten the hit to what each group allows, until all agree: every group allows 0 blocks."""
    whole, recomputed, align = rule.whole, rule.recomputed, rule.align
    hit, agreed = len(holders), -1
    if whole:
        hit = next((number for number, have in enumerate(holders) if have & whole != whole), hit)
        hit = max(0, hit - bool(whole & recomputed))
    hit -= hit % align
    while hit != agreed:
        agreed = hit
        if rule.chunked:
            begin = hit * rule.block_size // rule.chunk * rule.chunk // rule.block_size
            missing = (n for n in range(begin, hit) if holders[n] & rule.chunked != rule.chunked)
            hit = next(missing, hit)
            hit -= hit % align
        for need, groups, keys in rule.tails:
            more = bool(groups & recomputed)
            blocks = holders if keys == 1 else holders[keys - 1 :: keys]  # a block's key is that of its end
            most = min(hit // keys + more, len(blocks))
            hit = max(0, _last_run(blocks, most, groups, need + more, align // keys) - more) * keys
    return hit


def _last_run(holders: Sequence[int], end: int, groups: int, need: int, align: int) -> int:
    """Return the end of the last run of ``need`` held blocks among the first ``end``, else the leading run's length.

    A run ends at a multiple of ``align``.
    """
    run = 0
    for number in range(end - 1, -1, -1):
        if holders[number] & groups == groups and (run or not (number + 1) % align):
            run += 1
            if run == need:
                return number + need
        else:
            run = 0
    return run
