"""Candidates of a decision as columns, one entry per rank, grouped by block size and sentinel scope.

Values that do not depend on a request are computed once per change of the fleet; :meth:`CandidateGroup.table` adds the
others. That runs over the whole fleet in every decision, so each column is built by calls that loop in C.
"""

from array import array
from collections.abc import Sequence
from itertools import chain, compress, repeat
from operator import contains, indexOf, itemgetter
from typing import Any

from mmrouter_lib.block_keys import Span
from mmrouter_router.fleet.index import NOWHERE
from mmrouter_router.fleet.workers import Fleet, Target, cache_query
from mmrouter_router.scheduling.scoring import CandidateTable
from mmrouter_router.sentinels.table import Scope


class CandidateGroup:
    """Ranks with one block size and one scope, each with whether its overlap counts. Valid until the fleet changes.

    ``slots``: ``NOWHERE`` for a rank without an index slot. ``held`` and ``loads`` take these ranks' entries out of the
    index's counts by slot and out of a column of the fleet's loads.
    """

    def __init__(self, fleet: Fleet, size: int, scope: Scope | None, rows: Sequence[tuple[Target, bool]]) -> None:
        self.fleet, self.size, self.scope = fleet, size, scope
        self.targets = tuple([target for target, _ in rows])
        self.scored = tuple([scored for _, scored in rows])
        workers = [target.worker for target in self.targets]
        usages = [fleet.usage(target.worker, target.rank) for target in self.targets]
        self.ids = tuple([f"{target.worker.id}#{target.rank}" for target in self.targets])
        self.names = tuple([worker.member.name for worker in workers])
        self.pools = tuple([worker.member.pool for worker in workers])
        self.slots = tuple([target.worker.slots.get(target.rank, NOWHERE) for target in self.targets])
        self.held, self.loads = column_getter(self.slots), column_getter([usage.row for usage in usages])
        self.promised = tuple([usage.promised for usage in usages])
        self.caches = cache_query(self.targets)

    def with_free_queue(self, queued: int) -> "CandidateGroup | None":
        """Return the ranks where fewer than ``queued`` requests wait for a first byte; ``None`` where all are full."""
        unanswered = self.loads(self.fleet.loads.unanswered)
        if max(unanswered) < queued:
            return self
        free = [number < queued for number in unanswered]
        rows = list(compress(zip(self.targets, self.scored, strict=True), free))
        return CandidateGroup(self.fleet, self.size, self.scope, rows) if rows else None

    def table(self, keys: "array[int]", tokens: int, spans: Sequence[Span], visual: float) -> CandidateTable:
        """Return the candidates for a prompt of ``tokens`` with these keys and images.

        ``visual``: cost of encoding one visual token, in prompt tokens.
        """
        count, blocks, loads, now = len(self.targets), len(keys), self.loads, self.fleet.loads
        overlap, prefill, others = self._overlap(keys, tokens), loads(now.prefill), loads(now.others)
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

    def _overlap(self, keys: "array[int]", tokens: int) -> list[int]:
        hits = self.fleet.lookup(keys, tokens, self.caches)
        if len(hits) == len(self.slots) == len(self.caches.slots):
            return list(hits.values())  # the query has all slots in this order
        return list(map(hits.get, self.slots, repeat(0)))

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
