"""Candidates of a decision as columns, one entry per rank, grouped by the form of their keys.

Values that do not depend on a request are computed once per change of the fleet; :meth:`CandidateGroup.table` adds the
others. That runs over the whole fleet in every decision, so each column is built by calls that loop in C.
"""

from array import array
from collections.abc import Sequence
from functools import cached_property
from itertools import chain, compress, repeat
from operator import contains, indexOf, itemgetter
from typing import Any, NamedTuple, Self

from mmrouter_lib.block_keys import Span
from mmrouter_router.fleet.cache_query import CacheQuery, cache_entry
from mmrouter_router.fleet.holder_table import Slot
from mmrouter_router.fleet.index import NOWHERE, HitRule
from mmrouter_router.fleet.workers import Fleet, KeyForm, Target
from mmrouter_router.scheduling.scoring import CandidateTable


class CandidateRow(NamedTuple):
    """One rank, and what of it does not depend on a request. Valid until its worker changes.

    ``slot``: of its counts, ``NOWHERE`` without an index slot; ``hits`` and ``rule``: of :func:`cache_entry`.
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

    @classmethod
    def of(cls, fleet: Fleet, target: Target, *, scored: bool) -> Self:
        worker, rank, size = target
        usage, member = fleet.usage(worker, rank), worker.member
        slot, cache = worker.slots.get(rank, NOWHERE), cache_entry(worker, rank, size)
        name = f"{worker.id}#{rank}"
        return cls(target, scored, name, member.name, member.pool, slot, usage.row, usage.promised, *cache)


class CandidateGroup:
    """Ranks with one form of keys, each with whether its overlap counts. Valid until the fleet changes.

    ``held`` and ``loads`` take these ranks' entries out of the index's columns by slot and out of a column of the
    fleet's loads.
    """

    def __init__(self, fleet: Fleet, form: KeyForm, rows: Sequence[CandidateRow]) -> None:
        self.fleet, self.form, self.size, self._rows = fleet, form, form[0], rows
        columns = tuple(zip(*rows, strict=True))
        self.targets, self.scored, self.ids, self.names, self.pools, slots, loads, self.promised, hits, rules = columns
        self.held, self.loads = column_getter(slots), column_getter(loads)
        self.caches = CacheQuery.of(hits, rules, self.size)

    @cached_property
    def ring(self) -> list[int]:
        """The rows in the order of their turns."""
        return sorted(range(len(self.ids)), key=self.ids.__getitem__)

    def with_free_queue(self, queued: int) -> "CandidateGroup | None":
        """Return the ranks where fewer than ``queued`` requests wait for a first byte; ``None`` where all are full."""
        unanswered = self.loads(self.fleet.loads.unanswered)
        if max(unanswered) < queued:
            return self
        rows = list(compress(self._rows, [number < queued for number in unanswered]))
        return CandidateGroup(self.fleet, self.form, rows) if rows else None

    def table(self, keys: "array[int]", tokens: int, spans: Sequence[Span], visual: float) -> CandidateTable:
        """Return the candidates for a prompt of ``tokens`` with these keys and images.

        ``visual``: cost of encoding one visual token, in prompt tokens.
        """
        count, blocks, loads, now = len(self.targets), len(keys), self.loads, self.fleet.loads
        overlap = self.held(self.fleet.lookup(keys, tokens, self.caches))
        prefill, others = loads(now.prefill), loads(now.others)
        coming = self._coming(keys, overlap) if any(prefill) else ()
        return CandidateTable(
            self.ids,
            self.names,
            self.pools,
            overlap,
            (blocks,) * count,
            prefill,
            loads(now.active),
            [waiting * blocks for waiting in others] if any(others) else (),
            self.fleet.index.held_by(self.held),
            self.scored,
            coming,
            self._encode(overlap, coming, spans, visual) if spans and visual else (),
        )

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


def column_getter(rows: Sequence[int]) -> "itemgetter[Any]":
    """Return a getter of these rows' entries in a column, as a sequence; consecutive rows become one slice.

    A row may be -1, the last entry of a column.
    """
    first, end = rows[0], rows[-1] + 1
    if len(rows) == 1 or (first >= 0 and list(rows) == list(range(first, end))):
        return itemgetter(slice(first, end or None))
    return itemgetter(*rows)


def _to_encode(spans: Sequence[Span], hit: int) -> int:
    """Return the visual tokens of images that do not end within the first ``hit`` tokens; none is encoded in part."""
    return sum([span.length for span in spans if span.offset + span.length > hit])
