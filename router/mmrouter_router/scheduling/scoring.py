"""Pure choice of a candidate: one score per candidate, term by term, and the decision that follows from it.

Policy ``kv`` minimises the work that a choice causes, counted in blocks that an engine computes (docs/architecture.md):

    cost = overlapWeight * compute * (prompt blocks - hit + encode) + queue + decode * active + waiting

``hit`` is the overlap and what comes right behind it of requests that are being computed there; ``encode`` is what the
images behind the hit cost; ``queue`` is what was sent there and is not computed yet. The weights are :class:`Weights`.

``leastLoaded`` drops the first term and takes everything else as it is, ``roundRobin`` takes turns, ``consistentHash``
ranks by rendezvous hash. Every tie is broken the same way on every router: fewer blocks held, then rendezvous hash of
the prompt's fingerprint.

A decision needs the winner only, and there is one per request while the candidates are as many as the fleet: so they
stand in columns (:class:`Table`), and their rows, scores and reasons are worked out from the same values when somebody
asks for them.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import repeat
from operator import add, attrgetter, mul, sub
from typing import Any, Final, Literal, Self, overload

import msgspec
from xxhash import xxh3_64_intdigest

Policy = Literal["kv", "leastLoaded", "roundRobin", "consistentHash"]
BLIND: Final[frozenset[Policy]] = frozenset({"roundRobin", "consistentHash"})
"""Policies whose choice is the same whatever the prompt's blocks are."""


class Weights(msgspec.Struct, frozen=True):
    """What the terms of policy ``kv`` weigh, in blocks of somebody else's prompt that wait to be computed.

    Found by ``python -m bench cluster --sweep``. Above 1, ``compute`` says that a block which has to be computed again
    delays not only its own request but all that come after it, the more so the busier the engines are. ``decode`` is
    above what the first token alone would have it: with less, one engine makes the tokens of a hundred answers while
    the others, which lack a system prompt, make none.
    """

    compute: float = 6.0  # per block of the prompt that the engine would have to compute
    decode: float = 0.1  # per block that is in use there: each step that decodes reads it
    visual: float = 0.4  # encoding one visual token, in prompt tokens (vision tower against language model)


WEIGHTS = Weights()
NOTHING: Final = {"coming": 0, "encode": 0.0, "waiting": 0.0}
"""Columns that mostly are all the same, and what they are."""
FEW = 32
"""Candidates that are quicker looked at one by one than the whole fleet in columns."""


class Candidate(msgspec.Struct, frozen=True, gc=False):
    """One rank of one worker, as the router knows it at the moment of the decision. Loads are in blocks."""

    id: str  # <worker id>#<rank>
    name: str  # pod name, for people
    pool: str
    overlap: int  # leading prompt blocks that it holds
    blocks: int  # complete blocks of the prompt at this candidate's block size
    prefill: float = 0.0  # blocks of requests sent there that are not computed yet
    active: float = 0.0  # blocks of requests in flight there
    waiting: float = 0.0  # blocks of requests of others that queue in the engine
    held: int = 0  # blocks in its cache
    scored: bool = True  # False: not verified, so its overlap does not count
    coming: int = 0  # blocks right behind the overlap that requests in flight have it compute
    encode: float = 0.0  # what encoding the prompt's images there costs, in blocks of its prompt


@dataclass(slots=True, eq=False)  # not frozen: one is made per decision, and freezing costs more than the decision
class Table(Sequence[Candidate]):
    """Candidates as columns of equal length, named as in :class:`Candidate`. A row is made when it is looked at.

    Those of :data:`NOTHING` may be empty instead: nobody has any.
    """

    id: Sequence[str]
    name: Sequence[str]
    pool: Sequence[str]
    overlap: Sequence[int]
    blocks: Sequence[int]
    prefill: Sequence[float]
    active: Sequence[float]
    waiting: Sequence[float]
    held: Sequence[int]
    scored: Sequence[bool]
    coming: Sequence[int]
    encode: Sequence[float]

    @classmethod
    def of(cls, candidates: Sequence[Candidate]) -> Self:
        """Return rows as a table."""
        return cls(*[list(map(attrgetter(column.name), candidates)) for column in fields(cls)])

    @classmethod
    def joined(cls, tables: Sequence["Table"]) -> "Table":
        """Return tables one after the other."""
        if len(tables) == 1:
            return tables[0]
        names = [column.name for column in fields(cls)]
        return cls(*[[value for table in tables for value in table._full(name)] for name in names])

    def __len__(self) -> int:
        return len(self.id)

    @overload
    def __getitem__(self, number: int) -> Candidate: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[Candidate]: ...
    def __getitem__(self, number: int | slice) -> Candidate | Sequence[Candidate]:
        if isinstance(number, slice):
            return tuple(self)[number]
        columns: list[tuple[str, Sequence[Any]]] = [(name, getattr(self, name)) for name in Candidate.__struct_fields__]
        values: list[Any] = [column[number] if column else NOTHING[name] for name, column in columns]
        return Candidate(*values)

    def __iter__(self) -> Iterator[Candidate]:
        columns = [self._full(name) for name in Candidate.__struct_fields__]
        return (Candidate(*values) for values in zip(*columns, strict=True))

    def _full(self, name: str) -> Sequence[Any]:
        column: Sequence[Any] = getattr(self, name)
        return column or (NOTHING[name],) * len(self)

    def cheapest(self, policy: Policy, weight: float, weights: Weights) -> list[int]:
        """Return the places of all that cost least: of equals there may be several."""
        if policy == "kv" and (places := self._longest(weight, weights)):
            return places
        costs = self.costs(policy, weight, weights)
        least = min(costs)
        if costs.count(least) == 1:
            return [costs.index(least)]
        return [place for place, cost in enumerate(costs) if cost == least]

    def _longest(self, weight: float, weights: Weights) -> list[int]:
        """The cheapest of the few with the longest hit, where every shorter one costs more for its length alone.

        Empty where that is not known: loads are never below 0, so this bound is all that the others are asked for.
        """
        hits, blocks = self._hits(), self.blocks[0]
        lengths = sorted(set(hits))
        if self.encode or len(lengths) == 1 or self.blocks.count(blocks) < len(self):
            return []
        longest, next_ = lengths[-1], lengths[-2]
        count = hits.count(longest)
        if count > FEW:
            return []
        compute, decode = weight * weights.compute, weights.decode
        costs: dict[int, float] = {}
        place = -1
        for _ in range(count):
            place = hits.index(longest, place + 1)
            cost = compute * (blocks - longest) + self.prefill[place] + decode * self.active[place]
            costs[place] = cost + self.waiting[place] if self.waiting else cost
        least = min(costs.values())
        if compute * (blocks - next_) <= least:
            return []
        return [place for place, cost in costs.items() if cost == least]

    def costs(self, policy: Policy, weight: float, weights: Weights) -> list[float]:
        """Return what each candidate costs; 0 where the policy asks for no cost."""
        if policy not in ("kv", "leastLoaded"):
            return [0.0] * len(self)
        # Nothing is made in between: each value goes through all of this before the next one does.
        if policy == "kv":
            costs = map(add, self._computing(weight * weights.compute), self.prefill)
            costs = map(add, costs, map(mul, repeat(weights.decode), self.active))
        else:
            costs = map(add, self.prefill, self.active)
        return list(map(add, costs, self.waiting) if self.waiting else costs)

    def _computing(self, compute: float) -> Iterable[float]:
        """What each candidate would have to compute and to encode costs; hits are few different ones."""
        hits, blocks = self._hits(), self.blocks[0]
        if self.encode:
            return map(mul, repeat(compute), map(add, map(sub, self.blocks, hits), self.encode))
        if self.blocks.count(blocks) < len(self):
            return map(mul, repeat(compute), map(sub, self.blocks, hits))
        costs = {hit: compute * (blocks - hit) for hit in set(hits)}
        return map(costs.__getitem__, hits)

    def _hits(self) -> Sequence[int]:
        """Blocks of the prompt that each candidate need not compute."""
        hits = list(map(add, self.overlap, self.coming)) if self.coming else self.overlap
        return hits if all(self.scored) else list(map(mul, hits, self.scored))


@dataclass(frozen=True, slots=True)
class Score:
    """One candidate's cost and what it is made of; lower is better."""

    candidate: Candidate
    terms: dict[str, float]
    cost: float
    tie: int  # rendezvous hash, lower wins


@dataclass  # not frozen, as above
class Choice:
    """The winner, and everything that the choice was made from. Nobody changes it."""

    winner: Candidate
    place: int  # of the winner among the candidates
    candidates: Table
    policy: Policy
    overlap_weight: float
    fingerprint: int
    turn: int
    weights: Weights = WEIGHTS

    @cached_property
    def scores(self) -> tuple[Score, ...]:
        """Every candidate's score, best first."""
        costs = self.candidates.costs(self.policy, self.overlap_weight, self.weights)
        scores = [
            Score(c, _terms(c, self.policy, self.overlap_weight, self.weights), cost, _tie(c.id, self.fingerprint))
            for c, cost in zip(self.candidates, costs, strict=True)
        ]
        if self.policy == "roundRobin":
            ring = sorted(scores, key=lambda s: s.candidate.id)
            start = self.turn % len(ring)
            return tuple(ring[start:] + ring[:start])
        if self.policy == "consistentHash":
            return tuple(sorted(scores, key=lambda s: (s.tie, s.candidate.id)))
        return tuple(sorted(scores, key=lambda s: (s.cost, s.candidate.held, s.tie, s.candidate.id)))

    @property
    def reason(self) -> str:
        """Why the winner won, in words."""
        if self.policy == "roundRobin":
            return f"turn {self.turn % len(self.candidates)} of {len(self.candidates)} candidates"
        if self.policy == "consistentHash":
            return "lowest rendezvous hash of the prompt"
        return _reason(self.scores)


def choose(
    candidates: Sequence[Candidate],
    *,
    policy: Policy,
    overlap_weight: float,
    fingerprint: int,
    turn: int,
    weights: Weights = WEIGHTS,
) -> Choice:
    """Return the best candidate. ``turn`` counts requests (only round robin looks at it).

    Raises ``ValueError`` without candidates: the caller answers 503 before it asks.
    """
    if not candidates:
        raise ValueError("no candidate to choose from")
    table = candidates if isinstance(candidates, Table) else Table.of(candidates)
    everyone = range(len(table))
    if policy == "roundRobin":
        place = sorted(everyone, key=table.id.__getitem__)[turn % len(table)]
    elif policy == "consistentHash":
        place = _lowest_tie(table, everyone, fingerprint)
    else:
        best = table.cheapest(policy, overlap_weight, weights)
        emptiest = min([table.held[number] for number in best])
        place = _lowest_tie(table, [number for number in best if table.held[number] == emptiest], fingerprint)
    return Choice(table[place], place, table, policy, overlap_weight, fingerprint, turn, weights)


def _terms(c: Candidate, policy: Policy, weight: float, weights: Weights) -> dict[str, float]:
    """What a candidate's cost is the sum of."""
    if policy == "kv":
        compute = weight * weights.compute
        return {
            "compute": compute * (c.blocks - (c.overlap + c.coming if c.scored else 0)),
            "encode": compute * c.encode,
            "queue": c.prefill,
            "decode": weights.decode * c.active,
            "waiting": c.waiting,
        }
    if policy == "leastLoaded":
        return {"queue": c.prefill, "active": c.active, "waiting": c.waiting}
    return {}


def _lowest_tie(table: Table, places: Sequence[int], fingerprint: int) -> int:
    if len(places) == 1:
        return places[0]
    ids = table.id
    return min(places, key=lambda place: (_tie(ids[place], fingerprint), ids[place]))


def _tie(id_: str, fingerprint: int) -> int:
    return xxh3_64_intdigest(id_.encode(), fingerprint)


def _reason(ranked: Sequence[Score]) -> str:
    best = ranked[0]
    cost = f"cost {best.cost:g}"
    held = f"{best.candidate.overlap} of {best.candidate.blocks} blocks held"
    if best.candidate.coming and best.candidate.scored:
        held += f", {best.candidate.coming} more being computed"
    if len(ranked) == 1:
        return f"only candidate; {held}"
    second = ranked[1]
    if second.cost > best.cost:
        return f"{cost} against {second.cost:g} of {second.candidate.name}; {held}"
    if second.candidate.held != best.candidate.held:
        return f"{cost} as {second.candidate.name}, fewer blocks in its cache; {held}"
    return f"{cost} as {second.candidate.name}, rendezvous hash; {held}"
