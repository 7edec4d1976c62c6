"""Who may serve, at one block size and to engines that make the same of an image: columns, one entry per rank.

What does not change with a request is worked out once per change of the fleet; :meth:`Group.table` adds what does. That
runs over the whole fleet in every decision, so each column is made by calls that go over all of it in C.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, compress, repeat
from operator import contains, indexOf, itemgetter
from typing import Any, Self

from mmrouter_lib.block_keys import Span
from mmrouter_router.core.types import Scope
from mmrouter_router.fleet.index import NOWHERE, Slot
from mmrouter_router.fleet.workers import Caches, Fleet, Target, caches
from mmrouter_router.scheduling.scoring import Table


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Ranks with one block size and one scope. Valid until :attr:`.Fleet.version` rises."""

    fleet: Fleet
    size: int
    scope: Scope | None
    targets: tuple[Target, ...]
    scored: tuple[bool, ...]
    """Whether a rank's overlap counts."""
    ids: tuple[str, ...]
    names: tuple[str, ...]
    pools: tuple[str, ...]
    slots: tuple[Slot, ...]
    """``NOWHERE`` for a rank of which the index has nothing yet."""
    held: "itemgetter[Any]"
    """Takes these ranks' entries out of the index's numbers by slot."""
    loads: "itemgetter[Any]"
    """Takes these ranks' entries out of a column of the fleet's loads."""
    promised: tuple[set[int], ...]
    caches: Caches

    @classmethod
    def of(cls, fleet: Fleet, size: int, scope: Scope | None, rows: Sequence[tuple[Target, bool]]) -> Self:
        """Return the group of targets, each with whether its overlap counts."""
        targets = tuple([target for target, _ in rows])
        workers = [target.worker for target in targets]
        slots = tuple([target.worker.slots.get(target.rank, NOWHERE) for target in targets])
        usages = [fleet.usage(target.worker, target.rank) for target in targets]
        return cls(
            fleet,
            size,
            scope,
            targets,
            tuple([scored for _, scored in rows]),
            tuple([f"{target.worker.id}#{target.rank}" for target in targets]),
            tuple([worker.member.name for worker in workers]),
            tuple([worker.member.pool for worker in workers]),
            slots,
            taking(slots),
            taking([usage.row for usage in usages]),
            tuple([usage.promised for usage in usages]),
            caches(targets),
        )

    def room(self, queued: int) -> Self | None:
        """Return those where fewer than ``queued`` requests wait for a first byte; ``None`` where all are full."""
        unanswered = self.loads(self.fleet.loads.unanswered)
        if max(unanswered) < queued:
            return self
        free = [number < queued for number in unanswered]
        rows = list(compress(zip(self.targets, self.scored, strict=True), free))
        return self.of(self.fleet, self.size, self.scope, rows) if rows else None

    def table(self, keys: "array[int]", tokens: int, spans: Sequence[Span], visual: float) -> Table:
        """Return the candidates of a prompt of ``tokens`` with these keys and images.

        ``visual``: what encoding one visual token costs, in prompt tokens.
        """
        count, blocks, loads, now = len(self.targets), len(keys), self.loads, self.fleet.loads
        overlap = self._overlap(keys, tokens)
        prefill = loads(now.prefill)
        others = loads(now.others)
        coming = self._coming(keys, overlap) if any(prefill) else ()
        return Table(
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
        """Leading blocks that each rank holds."""
        found = self.fleet.lookup(keys, tokens, self.caches)
        if len(found) == len(self.slots) == len(self.caches.slots):
            return list(found.values())  # all were asked for in this order, and all have answered
        return list(map(found.get, self.slots, repeat(0)))

    def _coming(self, keys: "array[int]", overlap: Sequence[int]) -> Sequence[int]:
        """Blocks right behind each hit that are being computed there; the fleet's hits are few different ones."""
        following = {hit: keys[hit] for hit in set(overlap) if hit < len(keys)}
        begun = map(contains, self.promised, map(following.get, overlap))
        places = [place for place in compress(range(len(overlap)), begun) if self.scored[place]]
        coming = [0] * len(overlap) if places else []
        for place in places:
            coming[place] = _run(keys, overlap[place], self.promised[place])
        return coming

    def _encode(
        self, overlap: Sequence[int], coming: Sequence[int], spans: Sequence[Span], visual: float
    ) -> list[float]:
        """Blocks that encoding the images behind each hit costs; hits of a fleet are few different ones."""
        columns = zip(overlap, coming or repeat(0), self.scored)  # noqa: B905
        hits = [held + more if scored else 0 for held, more, scored in columns]
        costs = {hit: visual * _to_encode(spans, hit * self.size) / self.size for hit in set(hits)}
        return [costs[hit] for hit in hits]


def taking(places: Sequence[int]) -> "itemgetter[Any]":
    """Return what takes the entries at these places out of a column, as a sequence: of neighbours it is one slice.

    A place may be -1, which is the last one of any column.
    """
    first, end = places[0], places[-1] + 1
    if len(places) == 1 or (first >= 0 and list(places) == list(range(first, end))):
        return itemgetter(slice(first, end or None))
    return itemgetter(*places)


def _run(keys: "array[int]", hit: int, promised: set[int]) -> int:
    """Return how many blocks right behind a hit are being computed there."""
    return indexOf(chain(map(promised.__contains__, keys[hit:]), (False,)), False)


def _to_encode(spans: Sequence[Span], hit: int) -> int:
    """Return the visual tokens of images that do not end within the first ``hit`` tokens: one is encoded whole."""
    return sum([span.length for span in spans if span.offset + span.length > hit])
