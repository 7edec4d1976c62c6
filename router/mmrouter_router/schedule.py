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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from operator import attrgetter
from typing import Final, Literal, Self, overload

import msgspec
from xxhash import xxh3_64_intdigest

Policy = Literal["kv", "leastLoaded", "roundRobin", "consistentHash"]
Exactness = Literal["exact", "partial", "affinity"]
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


@dataclass(frozen=True, slots=True, eq=False)
class Table(Sequence[Candidate]):
    """Candidates as columns of equal length, named as in :class:`Candidate`. A row is made when it is looked at."""

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
        return cls(*[[value for table in tables for value in getattr(table, column.name)] for column in fields(cls)])

    def __len__(self) -> int:
        return len(self.id)

    @overload
    def __getitem__(self, number: int) -> Candidate: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[Candidate]: ...
    def __getitem__(self, number: int | slice) -> Candidate | Sequence[Candidate]:
        if isinstance(number, slice):
            return tuple(self)[number]
        return Candidate(*[getattr(self, name)[number] for name in Candidate.__struct_fields__])

    def __iter__(self) -> Iterator[Candidate]:
        columns = [getattr(self, name) for name in Candidate.__struct_fields__]
        return (Candidate(*values) for values in zip(*columns, strict=True))

    def costs(self, policy: Policy, weight: float, weights: Weights) -> list[float]:
        """Return what each candidate costs; 0 where the policy asks for no cost."""
        loads = zip(self.prefill, self.active, self.waiting, strict=True)
        if policy == "leastLoaded":
            return [prefill + active + waiting for prefill, active, waiting in loads]
        if policy != "kv":
            return [0.0] * len(self)
        compute, decode = weight * weights.compute, weights.decode
        return [
            compute * missing + prefill + decode * active + waiting
            for missing, (prefill, active, waiting) in zip(self._missing(), loads, strict=True)
        ]

    def _missing(self) -> list[float]:
        """Blocks that each candidate would have to compute, and what it would have to encode."""
        hits = self.overlap
        if any(self.coming):
            hits = [overlap + coming for overlap, coming in zip(hits, self.coming, strict=True)]
        if not all(self.scored):
            hits = [hit if scored else 0 for hit, scored in zip(hits, self.scored, strict=True)]
        missing: list[float] = [blocks - hit for blocks, hit in zip(self.blocks, hits, strict=True)]
        if any(self.encode):
            return [blocks + encode for blocks, encode in zip(missing, self.encode, strict=True)]
        return missing


@dataclass(frozen=True, slots=True)
class Score:
    """One candidate's cost and what it is made of; lower is better."""

    candidate: Candidate
    terms: dict[str, float]
    cost: float
    tie: int  # rendezvous hash, lower wins


@dataclass(frozen=True)
class Choice:
    """The winner, and everything that the choice was made from."""

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
        costs = table.costs(policy, overlap_weight, weights)
        least = min(costs)
        place = costs.index(least)
        if costs.count(least) > 1:
            best = [number for number, cost in enumerate(costs) if cost == least]
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
