"""What to ask the index about the caches of ranks: their slots, and the rules of caches with several groups. No I/O."""

from collections.abc import Iterable, Sequence
from math import gcd, lcm
from typing import NamedTuple, Self

from mmrouter_router.fleet.holder_table import Slot, mask_of
from mmrouter_router.fleet.index import NOWHERE, HitRule, TailRule, window_blocks
from mmrouter_router.fleet.workers import Target, Worker


class CacheQuery(NamedTuple):
    """What to look up for targets with one block size; valid until their fleet changes."""

    leading: int  # mask of the slots whose caches hit leading blocks
    rules: dict[Slot, HitRule]  # of caches that hit by more
    block_size: int

    @classmethod
    def of(cls, slots: Sequence[Slot], rules: Sequence[HitRule | None], block_size: int) -> Self:
        """Return the query for columns of :func:`cache_entry`."""
        with_rule = {slot: rule for slot, rule in zip(slots, rules, strict=True) if rule} if any(rules) else {}
        return cls(mask_of({*slots} - with_rule.keys() - {NOWHERE}), with_rule, block_size)

    def replaced(self, gone: Iterable[Slot], slots: Sequence[Slot], rules: Sequence[HitRule | None]) -> "CacheQuery":
        """Return the query without some slots and with those of other targets."""
        without = {*gone} - {NOWHERE}
        left = {slot: rule for slot, rule in self.rules.items() if slot not in without}
        more = CacheQuery.of(slots, rules, self.block_size)
        return CacheQuery(self.leading & ~mask_of(without) | more.leading, left | more.rules, self.block_size)


def cache_entry(worker: Worker, rank: int, block_size: int) -> tuple[Slot, HitRule | None]:
    """Return the slot of a rank, ``NOWHERE`` without hits, and its rule where it hits by more than leading blocks."""
    slot = worker.slots.get(rank)
    if slot is None or not worker.layout.comparable:
        return NOWHERE, None
    return slot, None if worker.layout.leading else _hit_rule(worker, rank, block_size)


def cache_query(targets: Iterable[Target]) -> CacheQuery:
    """Build the query for targets. A cache whose layout promises nothing is left out."""
    targets = list(targets)
    entries = [cache_entry(*target) for target in targets]
    slots, rules = [slot for slot, _ in entries], [rule for _, rule in entries]
    return CacheQuery.of(slots, rules, targets[-1].block_size if targets else 0)


def _hit_rule(worker: Worker, rank: int, block_size: int) -> HitRule:
    layout = worker.layout

    def bits_of(groups: Iterable[int]) -> int:
        return mask_of(worker.slots[rank] if g == layout.primary else worker.beside[rank, g] for g in groups)

    sizes = {block_size, *(tail.block_size for tail in layout.tails)} - {0}
    unit, most = gcd(*sizes), lcm(*sizes)
    tails = []
    for tail in layout.tails:
        size = tail.block_size or block_size
        tails.append(TailRule(window_blocks(tail.tokens, size), bits_of(tail.groups), size // unit))
    return HitRule(
        bits_of(layout.whole),
        tuple(tails),
        bits_of(layout.recomputed),
        layout.sees_last,
        bits_of(layout.chunked),
        layout.chunk,
        unit,
        block_size // unit,
        most // unit,
    )
