"""Who may serve, at one block size and to engines that make the same of an image: columns, one entry per rank.

What does not change with a request is worked out once per change of the fleet; :meth:`Group.table` adds what does. The
loops of a decision run here, over the whole fleet, so each is one pass with few calls.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress, repeat
from typing import Self

from mmrouter.blocks import Span
from mmrouter_router.fleet import Caches, Fleet, Target, caches
from mmrouter_router.index import NOWHERE, Slot
from mmrouter_router.schedule import Table
from mmrouter_router.sentinels import Scope
from mmrouter_router.usage import Usage


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Ranks with one block size and one scope. Good until :attr:`~mmrouter_router.fleet.Fleet.version` rises."""

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
    usages: tuple[Usage, ...]
    caches: Caches

    @classmethod
    def of(cls, size: int, scope: Scope | None, rows: Sequence[tuple[Target, bool]]) -> Self:
        """Return the group of targets, each with whether its overlap counts."""
        targets = tuple([target for target, _ in rows])
        workers = [target.worker for target in targets]
        return cls(
            size,
            scope,
            targets,
            tuple([scored for _, scored in rows]),
            tuple([f"{target.worker.id}#{target.rank}" for target in targets]),
            tuple([worker.member.name for worker in workers]),
            tuple([worker.member.pool for worker in workers]),
            tuple([target.worker.slots.get(target.rank, NOWHERE) for target in targets]),
            tuple([target.worker.usage.setdefault(target.rank, Usage()) for target in targets]),
            caches(targets),
        )

    def room(self, queued: int) -> Self | None:
        """Return those where fewer than ``queued`` requests wait for a first byte; ``None`` where all are full."""
        free = [usage.unanswered < queued for usage in self.usages]
        if all(free):
            return self
        rows = list(compress(zip(self.targets, self.scored, strict=True), free))
        return self.of(self.size, self.scope, rows) if rows else None

    def table(self, fleet: Fleet, keys: "array[int]", tokens: int, spans: Sequence[Span], visual: float) -> Table:
        """Return the candidates of a prompt of ``tokens`` with these keys and images.

        ``visual``: what encoding one visual token costs, in prompt tokens.
        """
        count, blocks, usages = len(self.targets), len(keys), self.usages
        found = fleet.lookup(keys, tokens, self.caches)
        overlap = list(map(found.get, self.slots, repeat(0)))
        prefill = [len(usage.promised) + usage.encode + usage.their_prefill for usage in usages]
        coming: Sequence[int] = (0,) * count
        if any(prefill):
            coming = [
                _coming(keys, hit, usage.promised) if usage.promised and scored else 0
                for hit, usage, scored in zip(overlap, usages, self.scored, strict=True)
            ]
        return Table(
            self.ids,
            self.names,
            self.pools,
            overlap,
            (blocks,) * count,
            prefill,
            [usage.active + usage.their_active for usage in usages],
            [usage.others * blocks for usage in usages],
            fleet.index.held_by(self.slots),
            self.scored,
            coming,
            self._encode(overlap, coming, spans, visual) if spans and visual else (0.0,) * count,
        )

    def _encode(
        self, overlap: Sequence[int], coming: Sequence[int], spans: Sequence[Span], visual: float
    ) -> list[float]:
        """Blocks that encoding the images behind each hit costs; hits of a fleet are few different ones."""
        hits = [held + more if scored else 0 for held, more, scored in zip(overlap, coming, self.scored, strict=True)]
        costs = {hit: visual * _to_encode(spans, hit * self.size) / self.size for hit in set(hits)}
        return [costs[hit] for hit in hits]


def _coming(keys: "array[int]", hit: int, promised: set[int]) -> int:
    """Return how many blocks right behind a hit are being computed there."""
    end = hit
    while end < len(keys) and keys[end] in promised:
        end += 1
    return end - hit


def _to_encode(spans: Sequence[Span], hit: int) -> int:
    """Return the visual tokens of images that do not end within the first ``hit`` tokens: one is encoded whole."""
    return sum([span.length for span in spans if span.offset + span.length > hit])
