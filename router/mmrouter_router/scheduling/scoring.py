"""Choose a candidate by a score per candidate. Pure.

Policy ``kv`` minimises the work that a choice causes, counted in blocks that an engine computes (docs/architecture.md):

    cost = overlapWeight * compute * (prompt blocks - hit + fetch + encode) + queue + decode * active + waiting

``hit`` is the overlap, plus the blocks right after it that are held without proof that they are hit, or held by lower
tiers, plus those after them that are being computed there; ``fetch`` is the cost of loading from the tiers, ``encode``
that of the images after the hit; ``queue`` is sent and not computed yet. The weights are :class:`Weights` and
:data:`FETCH`.

``leastLoaded`` omits the first term and weighs the others equally, ``roundRobin`` takes turns, ``consistentHash`` ranks
by rendezvous hash. Ties are broken the same way on every router: fewer blocks held, then rendezvous hash of the
prompt's fingerprint.

A request needs only the winner, while the candidates are as many as the fleet: they are stored in columns
(:class:`CandidateTable`), and rows, scores and reasons are computed from them on demand.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import repeat
from operator import add, attrgetter, mul, sub
from typing import Any, Final, Literal, Self, overload

import msgspec
from xxhash import xxh3_64_intdigest

Policy = Literal["kv", "leastLoaded", "roundRobin", "consistentHash"]
PROMPT_BLIND_POLICIES: Final[frozenset[Policy]] = frozenset({"roundRobin", "consistentHash"})
"""Policies that do not depend on the prompt's blocks."""


class Weights(msgspec.Struct, frozen=True):
    """Weights of policy ``kv``'s terms, relative to one queued block of another prompt.

    Found by a sweep (docs/performance.md#weights-of-the-scorer). ``compute`` is above 1 because a block that is
    computed again delays all later requests, too. ``decode`` is above the optimum for the first token alone: with less,
    one engine decodes a hundred answers while the others, which lack a shared system prompt, are idle.
    """

    compute: float = 6.0  # per block of the prompt that the engine would have to compute
    decode: float = 0.1  # per block that is in use there: each step that decodes reads it
    visual: float = 0.4  # encoding one visual token, in prompt tokens (vision tower against language model)


WEIGHTS = Weights()
FETCH: Final = {"host": 0.125, "disk": 0.5}
"""Tier -> cost of loading a block from it, in computed blocks (docs/architecture.md#lower-tiers)."""
COLUMN_DEFAULTS: Final = {"coming": 0, "encode": 0.0, "waiting": 0.0, "tier": 0, "fetch": 0.0, "unproved": 0}
"""Columns that are empty when all are default."""
OF_PROMPT: Final = ("overlap", "blocks", "waiting", "coming", "encode", "tier", "fetch", "unproved")
"""Columns that depend on the prompt."""
FEW_CANDIDATES = 32  # up to this number, single candidates are faster to score than whole columns


class Candidate(msgspec.Struct, frozen=True, gc=False):
    """One rank of one worker at the moment of the decision. Loads are in blocks."""

    id: str  # <worker id>#<rank>
    name: str  # pod name, for people
    pool: str
    overlap: int  # leading prompt blocks that it holds and hits
    blocks: int  # complete blocks of the prompt at this candidate's block size
    prefill: float = 0.0  # blocks of requests sent there that are not computed yet
    active: float = 0.0  # blocks of requests in flight there
    waiting: float = 0.0  # blocks of queued requests that no router accounts for
    held: int = 0  # blocks in its cache
    scored: bool = True  # False: not verified, so its overlap does not count
    coming: int = 0  # blocks right after the overlap and the tier's that it is computing for others
    encode: float = 0.0  # cost of encoding the prompt's images there, in blocks of the prompt
    tier: int = 0  # blocks right after the overlap that its lower tiers hold
    fetch: float = 0.0  # cost of loading these, in blocks of the prompt
    unproved: int = 0  # blocks right after the overlap that it holds; whether it hits them is in no event

    @property
    def hit(self) -> int:
        """Blocks of the prompt that need not be computed."""
        return self.overlap + self.unproved + self.tier + self.coming if self.scored else 0


COLUMNS: Final = Candidate.__struct_fields__


@dataclass(slots=True, eq=False)  # not frozen: one is made per decision, and freezing costs more than the decision
class CandidateTable(Sequence[Candidate]):
    """Candidates as columns of equal length, named as in :class:`Candidate`. Rows are created on access.

    Columns of :data:`COLUMN_DEFAULTS` may be empty instead.
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
    tier: Sequence[int] = ()
    fetch: Sequence[float] = ()
    unproved: Sequence[int] = ()
    ring: Sequence[int] = ()  # the rows in the order of their ids, where it is known

    @classmethod
    def of(cls, candidates: Sequence[Candidate]) -> Self:
        return cls(*[list(map(attrgetter(name), candidates)) for name in COLUMNS])

    @classmethod
    def joined(cls, tables: Sequence["CandidateTable"]) -> "CandidateTable":
        if len(tables) == 1:
            return tables[0]
        return cls(*[[value for table in tables for value in table._full(name)] for name in COLUMNS])

    @classmethod
    def summed(cls, tables: Sequence["CandidateTable"]) -> "CandidateTable":
        """Return the candidates for all prompts of a request, from those for each: their blocks add up."""
        first, *others = tables
        for table in others:
            sums = {name: list(map(add, first._full(name), table._full(name))) for name in OF_PROMPT}
            first = replace(first, **sums)
        return first

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
        values: list[Any] = [column[number] if column else COLUMN_DEFAULTS[name] for name, column in columns]
        return Candidate(*values)

    def __iter__(self) -> Iterator[Candidate]:
        columns = [self._full(name) for name in Candidate.__struct_fields__]
        return (Candidate(*values) for values in zip(*columns, strict=True))

    def _full(self, name: str) -> Sequence[Any]:
        column: Sequence[Any] = getattr(self, name)
        return column or (COLUMN_DEFAULTS[name],) * len(self)

    def cheapest(self, policy: Policy, weight: float, weights: Weights) -> list[int]:
        """Return the rows of least cost."""
        hits = self._hits()
        if policy == "kv" and (rows := self._cheapest_of_longest(hits, weight, weights)):
            return rows
        costs = self._costs(hits, policy, weight, weights)
        least = min(costs)
        if costs.count(least) == 1:
            return [costs.index(least)]
        return [row for row, cost in enumerate(costs) if cost == least]

    def _cheapest_of_longest(self, hits: Sequence[int], weight: float, weights: Weights) -> list[int]:
        """Return the cheapest rows of the longest hit, if every shorter hit alone already costs more; else nothing.

        Loads are never below 0, so the missing blocks of a shorter hit are a lower bound of its cost.
        """
        lengths = sorted(set(hits))
        if self.encode or self.fetch or len(lengths) == 1 or not self._same_blocks:
            return []
        blocks, longest, next_ = self.blocks[0], lengths[-1], lengths[-2]
        count = hits.count(longest)
        if count > FEW_CANDIDATES:
            return []
        compute, decode = weight * weights.compute, weights.decode
        costs: dict[int, float] = {}
        row = -1
        for _ in range(count):
            row = hits.index(longest, row + 1)
            cost = compute * (blocks - longest) + self.prefill[row] + decode * self.active[row]
            costs[row] = cost + self.waiting[row] if self.waiting else cost
        least = min(costs.values())
        if compute * (blocks - next_) <= least:
            return []
        return [row for row, cost in costs.items() if cost == least]

    @property
    def _same_blocks(self) -> bool:
        return self.blocks.count(self.blocks[0]) == len(self)

    def costs(self, policy: Policy, weight: float, weights: Weights) -> list[float]:
        """Return each candidate's cost; 0 for policies without one."""
        return self._costs(self._hits(), policy, weight, weights)

    def _costs(self, hits: Sequence[int], policy: Policy, weight: float, weights: Weights) -> list[float]:
        if policy not in ("kv", "leastLoaded"):
            return [0.0] * len(self)
        if policy == "kv":
            computing, decode = self._computing(hits, weight * weights.compute), weights.decode
            costs = [
                work + queue + decode * active
                for work, queue, active in zip(computing, self.prefill, self.active, strict=True)
            ]
        else:
            costs = list(map(add, self.prefill, self.active))
        return list(map(add, costs, self.waiting)) if self.waiting else costs

    def _computing(self, hits: Sequence[int], compute: float) -> Iterable[float]:
        """Return the cost of computing, loading and encoding at each candidate; there are few distinct hits."""
        if self.encode or self.fetch:
            more = map(add, self._full("encode"), self._full("fetch"))
            return map(mul, repeat(compute), map(add, map(sub, self.blocks, hits), more))
        if not self._same_blocks:
            return map(mul, repeat(compute), map(sub, self.blocks, hits))
        blocks = self.blocks[0]
        costs = {hit: compute * (blocks - hit) for hit in set(hits)}
        return map(costs.__getitem__, hits)

    def _hits(self) -> Sequence[int]:
        """Return the blocks of the prompt that each candidate need not compute."""
        hits = list(map(add, self.stored(), self.coming)) if self.coming else self.stored()
        return hits if all(self.scored) else list(map(mul, hits, self.scored))

    def stored(self) -> Sequence[int]:
        """Return the leading blocks that each candidate holds on its device and, after those, in lower tiers."""
        held = list(map(add, self.overlap, self.unproved)) if self.unproved else self.overlap
        return list(map(add, held, self.tier)) if self.tier else held


@dataclass(frozen=True, slots=True)
class Score:
    """One candidate's cost and its terms; lower is better."""

    candidate: Candidate
    terms: dict[str, float]
    cost: float
    tie: int  # rendezvous hash, lower wins


@dataclass  # not frozen, as above
class Choice:
    """The winner, and the inputs of the choice. Treated as immutable."""

    winner: Candidate
    row: int  # of the winner among the candidates
    candidates: CandidateTable
    policy: Policy
    overlap_weight: float
    fingerprint: int
    turn: int
    weights: Weights = WEIGHTS
    forced: str = ""  # why no other engine was a candidate

    @cached_property
    def scores(self) -> tuple[Score, ...]:
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
    def regret(self) -> int:
        """Blocks that a verified candidate held beyond the winner's hit: what was given away, because of its load."""
        table, stored = self.candidates, self.candidates.stored()
        best = max(stored) if all(table.scored) else max(map(mul, stored, table.scored))
        return max(0, best - self.winner.hit)

    @property
    def round_robin(self) -> float:
        """Blocks that round robin would have found in the same caches: what the candidates hold on average."""
        return sum(self.candidates.overlap) / len(self.candidates)

    @property
    def reason(self) -> str:
        if self.forced:
            return self.forced
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
    forced: str = "",
) -> Choice:
    """Return the best candidate. ``turn`` counts requests, for round robin. ``forced``: why there is no other one.

    Raises ``ValueError`` without any.
    """
    if not candidates:
        raise ValueError("no candidate to choose from")
    table = candidates if isinstance(candidates, CandidateTable) else CandidateTable.of(candidates)
    everyone = range(len(table))
    if policy == "roundRobin":
        ring = table.ring or sorted(everyone, key=table.id.__getitem__)
        row = ring[turn % len(table)]
    elif policy == "consistentHash":
        row = _lowest_tie(table, everyone, fingerprint)
    else:
        best, held = table.cheapest(policy, overlap_weight, weights), table.held
        if len(best) > 1:
            emptiest = min(map(held.__getitem__, best))
            best = [row for row in best if held[row] == emptiest]
        row = _lowest_tie(table, best, fingerprint)
    return Choice(table[row], row, table, policy, overlap_weight, fingerprint, turn, weights, forced)


def _terms(c: Candidate, policy: Policy, weight: float, weights: Weights) -> dict[str, float]:
    if policy == "kv":
        compute = weight * weights.compute
        return {
            "compute": compute * (c.blocks - c.hit),
            "fetch": compute * c.fetch,
            "encode": compute * c.encode,
            "queue": c.prefill,
            "decode": weights.decode * c.active,
            "waiting": c.waiting,
        }
    if policy == "leastLoaded":
        return {"queue": c.prefill, "active": c.active, "waiting": c.waiting}
    return {}


def _lowest_tie(table: CandidateTable, rows: Sequence[int], fingerprint: int) -> int:
    if len(rows) == 1:
        return rows[0]
    # An idle fleet ties as a whole, so this loops in C; equal hashes are rare.
    ids = [table.id[row] for row in rows]
    ties = list(map(xxh3_64_intdigest, map(str.encode, ids), repeat(fingerprint)))
    least = min(ties)
    return min([(id_, row) for id_, row, tie in zip(ids, rows, ties, strict=True) if tie == least])[1]


def _tie(id_: str, fingerprint: int) -> int:
    return xxh3_64_intdigest(id_.encode(), fingerprint)


def _reason(ranked: Sequence[Score]) -> str:
    best = ranked[0]
    cost = f"cost {best.cost:g}"
    held = f"{best.candidate.overlap} of {best.candidate.blocks} blocks held"
    if best.candidate.unproved:
        held += f", {best.candidate.unproved} more that it may not hit"
    if best.candidate.tier:
        held += f", {best.candidate.tier} more in lower tiers"
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
