"""What to ask the index about the caches of ranks: their slots, and the rules of caches with several groups. No I/O."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Self

from mmrouter_lib.cache_layout import CacheLayout, window_blocks
from mmrouter_router.fleet.holder_table import Slot, mask_of
from mmrouter_router.fleet.index import NOWHERE, HitRule, TailRule
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
    layout = worker.layout
    if layout.leading:
        return slot, None

    def mask(groups: Iterable[int]) -> int:
        return mask_of(worker.slots[rank] if g == layout.primary else worker.beside[rank, g] for g in groups)

    return slot, hit_rule(layout, block_size, mask)


def cache_query(targets: Iterable[Target]) -> CacheQuery:
    """Build the query for targets. A cache whose layout promises nothing is left out."""
    targets = list(targets)
    entries = [cache_entry(*target) for target in targets]
    slots, rules = [slot for slot, _ in entries], [rule for _, rule in entries]
    return CacheQuery.of(slots, rules, targets[-1].block_size if targets else 0)


def hit_rule(layout: CacheLayout, block_size: int, mask: Callable[[Iterable[int]], int]) -> HitRule:
    """Return the rule of a layout for keys of blocks of that size. ``mask``: groups -> bits of their slots."""
    tails = []
    for tail in layout.tails:
        size = tail.block_size or block_size
        blocks, keys = window_blocks(tail.tokens, size), max(1, size // block_size)
        # Smaller blocks are held as the blocks that they are parts of.
        tails.append(TailRule(blocks * size // (keys * block_size), mask(tail.groups), keys))
    return HitRule(
        mask(layout.whole),
        tuple(tails),
        mask(layout.recomputed),
        layout.sees_last,
        mask(layout.chunked),
        layout.chunk,
        block_size,
        layout.hit_step(block_size),
    )
