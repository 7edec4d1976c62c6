"""Candidates of a decision as columns, one entry per rank, grouped by the form of their keys.

Values that do not depend on a request are computed once per change of the fleet; :meth:`CandidateGroup.table` adds the
others. That runs over the whole fleet in every decision, so each column is built by calls that loop in C.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import chain, compress, repeat
from operator import add, attrgetter, contains, indexOf, itemgetter
from typing import Any, Final, NamedTuple, Self

from mmrouter_lib.block_keys import Span
from mmrouter_lib.cache_layout import LOWER_TIERS
from mmrouter_router.fleet.cache_query import CacheQuery, cache_entry
from mmrouter_router.fleet.holder_table import Slot, mask_of
from mmrouter_router.fleet.index import NOWHERE, HitRule
from mmrouter_router.fleet.workers import Fleet, KeyForm, Target
from mmrouter_router.scheduling.scoring import FETCH, CandidateTable

FEW_GAPS: Final = 16  # up to this number, rows of a column are taken as a slice of which some are removed


class CandidateRow(NamedTuple):
    """One rank, and what of it does not depend on a request. Valid until its worker changes.

    ``slot``: of its counts, ``NOWHERE`` without an index slot; ``hits`` and ``rule``: of :func:`cache_entry`;
    ``below``: medium -> slot of its lower tiers, none where its overlap does not count.
    """

    target: Target
    scored: bool  # its overlap counts
    id: str
    name: str
    pool: str
    slot: Slot
    load: int  # its row of the fleet's loads
    promised: set[int]
    hits: Slot
    rule: HitRule | None
    below: Mapping[str, Slot]

    @classmethod
    def of(cls, fleet: Fleet, target: Target, *, scored: bool) -> Self:
        worker, rank, size = target
        usage, member = fleet.usage(worker, rank), worker.member
        slot, cache = worker.slots.get(rank, NOWHERE), cache_entry(worker, rank, size)
        name = f"{worker.id}#{rank}"
        below = {medium: at for (of, medium), at in worker.below.items() if of == rank} if scored else {}
        return cls(target, scored, name, member.name, member.pool, slot, usage.row, usage.promised, *cache, below)


class LowerTier(NamedTuple):
    """One medium below the device: the slot of each rank, ``NOWHERE`` without one, and the cost of loading a block."""

    mask: int
    slots: Sequence[Slot]
    cost: float  # in computed blocks

    @classmethod
    def of(cls, medium: str, below: Sequence[Mapping[str, Slot]]) -> Self:
        slots = [media.get(medium, NOWHERE) for media in below]
        return cls(mask_of({*slots} - {NOWHERE}), slots, FETCH[LOWER_TIERS[medium]])


class CandidateGroup:
    """Ranks with one form of keys, in the order of their loads' rows. Valid until one of their workers changes.

    ``held`` and ``loads`` take these ranks' entries out of the index's columns by slot and out of a column of the
    fleet's loads.
    """

    def __init__(self, fleet: Fleet, form: KeyForm, columns: Sequence[list[Any]], caches: CacheQuery) -> None:
        """``columns``: as in :class:`CandidateRow`; they are not changed any more."""
        self.fleet, self.form, self.size, self.caches, self._columns = fleet, form, form[0], caches, columns
        self.targets, self.scored, self.ids, self.names, self.pools, slots, loads, self.promised = columns[:8]
        below = columns[10]
        self.held, self.loads = column_getter(slots), column_getter(loads)
        media = {medium for media in below for medium in media} if any(below) else ()
        self.tiers = [LowerTier.of(medium, below) for medium in LOWER_TIERS if medium in media]

    @classmethod
    def of(cls, fleet: Fleet, form: KeyForm, rows: Iterable[CandidateRow]) -> Self:
        """Return the group of these rows, of which there is one at least."""
        columns = [list(column) for column in zip(*sorted(rows, key=attrgetter("load")), strict=True)]
        _, _, _, _, _, _, _, _, hits, rules, _ = columns
        return cls(fleet, form, columns, CacheQuery.of(hits, rules, form[0]))

    def replaced(self, gone: Sequence[CandidateRow], come: Sequence[CandidateRow]) -> "CandidateGroup | None":
        """Return the group without some of its rows and with others; ``None`` if none is left."""
        columns = [column.copy() for column in self._columns]  # decisions keep the previous ones
        loads = columns[6]
        for row in gone:
            at = bisect_left(loads, row.load)
            for column in columns:
                del column[at]
        for row in come:
            at = bisect_left(loads, row.load)
            for column, value in zip(columns, row, strict=True):
                column.insert(at, value)
        caches = self.caches.replaced([r.hits for r in gone], [r.hits for r in come], [r.rule for r in come])
        return CandidateGroup(self.fleet, self.form, columns, caches) if loads else None

    @cached_property
    def ring(self) -> list[int]:
        """The rows in the order of their turns."""
        return sorted(range(len(self.ids)), key=self.ids.__getitem__)

    def with_free_queue(self, queued: int) -> "CandidateGroup | None":
        """Return the ranks where fewer than ``queued`` requests wait for a first byte; ``None`` where all are full."""
        unanswered = self.loads(self.fleet.loads.unanswered)
        if max(unanswered) < queued:
            return self
        full = [row for row, number in enumerate(unanswered) if number >= queued]
        return self.replaced([CandidateRow(*[column[row] for column in self._columns]) for row in full], ())

    def table(
        self, keys: "array[int]", tokens: int, spans: Sequence[Span], visual: float, *, proved: bool = True
    ) -> CandidateTable:
        """Return the candidates for a prompt of ``tokens`` with these keys and images.

        ``visual``: cost of encoding one visual token, in prompt tokens. ``proved``: a block that is held is hit.
        """
        size, blocks, loads, now = len(self.targets), len(keys), self.loads, self.fleet.loads
        held = self.held(self.fleet.lookup(keys, tokens, self.caches))
        overlap, unproved = (held, ()) if proved else ((0,) * size, held)
        tier, fetch = self._below(keys, tokens, overlap) if self.tiers and proved else ((), ())
        stored = list(map(add, held, tier)) if tier else held
        prefill, others = loads(now.prefill), loads(now.others)
        coming = () if _is_zero(prefill) else self._coming(keys, stored)
        return CandidateTable(
            self.ids,
            self.names,
            self.pools,
            overlap,
            (blocks,) * size,
            prefill,
            loads(now.active),
            () if _is_zero(others) else [waiting * blocks for waiting in others],
            self.fleet.index.held_by(self.held),
            self.scored,
            coming,
            self._encode(stored, coming, spans, visual) if spans and visual else (),
            tier,
            fetch,
            unproved,
        )

    def _below(self, keys: "array[int]", tokens: int, overlap: Sequence[int]) -> tuple[Sequence[int], Sequence[float]]:
        """Return the blocks right after each overlap that lower tiers hold, and the cost of loading them in blocks.

        An engine continues in the fastest tier, then in the next one. It computes a prompt's last token anew, so a copy
        of that block saves nothing.
        """
        usable = keys[: max(0, tokens - 1) // self.size]
        tier, fetch = [0] * len(overlap), [0.0] * len(overlap)
        for mask, slots, cost in self.tiers:
            starts = list(map(add, overlap, tier))
            leading = {start: self.fleet.index.leading(usable[start:], mask) for start in set(starts)}
            more = [leading[start][slot] for start, slot in zip(starts, slots, strict=True)]
            tier, fetch = list(map(add, tier, more)), [cost * n + before for n, before in zip(more, fetch, strict=True)]
        return (tier, fetch) if any(tier) else ((), ())

    def _coming(self, keys: "array[int]", overlap: Sequence[int]) -> Sequence[int]:
        """Return the blocks right after each hit that are being computed there; a fleet has few distinct hits."""
        following = {hit: keys[hit] for hit in set(overlap) if hit < len(keys)}
        begun = map(contains, self.promised, map(following.get, overlap))
        rows = [row for row in compress(range(len(overlap)), begun) if self.scored[row]]
        coming = [0] * len(overlap) if rows else []
        for row in rows:
            promised = map(self.promised[row].__contains__, keys[overlap[row] :])
            coming[row] = indexOf(chain(promised, (False,)), False)
        return coming

    def _encode(
        self, overlap: Sequence[int], coming: Sequence[int], spans: Sequence[Span], visual: float
    ) -> list[float]:
        """Return the cost in blocks of encoding the images after each hit; a fleet has few distinct hits."""
        columns = zip(overlap, coming or repeat(0), self.scored)  # noqa: B905
        hits = [held + more if scored else 0 for held, more, scored in columns]
        costs = {hit: visual * _to_encode(spans, hit * self.size) / self.size for hit in set(hits)}
        return [costs[hit] for hit in hits]


def column_getter(rows: Sequence[int]) -> Callable[[Any], Any]:
    """Return a getter of these rows' entries in a column, a list or an array.

    Rows in order become a slice without the few entries between them. A row may be -1, the last entry of a column.
    """
    first, end = rows[0], rows[-1] + 1
    if len(rows) == 1:
        return itemgetter(slice(first, end or None))
    missing = end - first - len(rows)
    if first < 0 or not 0 <= missing <= FEW_GAPS or list(rows) != sorted(rows):
        return itemgetter(*rows)
    gaps: list[int] = []
    while len(gaps) < missing:
        # The entries before the next gap are as many places further on as there were gaps before it.
        at = bisect_right(range(len(rows)), len(gaps), key=lambda at: rows[at] - first - at)
        gaps += range(rows[at - 1] + 1 - first, rows[at] - first)
    gaps.reverse()

    def take(column: Any) -> Any:
        part = column[first:end]
        for gap in gaps:
            del part[gap]
        return part

    return take if gaps else itemgetter(slice(first, end))


def _is_zero(column: Sequence[float]) -> bool:
    """Whether all entries are 0; bytes are compared, where it is an array, because floats would be made to look at."""
    return column.tobytes() == bytes(8 * len(column)) if isinstance(column, array) else not any(column)


def _to_encode(spans: Sequence[Span], hit: int) -> int:
    """Return the visual tokens of images that do not end within the first ``hit`` tokens; none is encoded in part."""
    return sum([span.length for span in spans if span.offset + span.length > hit])
