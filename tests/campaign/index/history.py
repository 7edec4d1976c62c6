"""Offline check of recorded routing decisions: none claims a block that its engine could not hold. Pure; one pass.

It is a linearizability test of the index. An engine's cache is a set of block names that changes over time, and a
decision is a read of it: "the first ``overlap`` blocks of this prompt are held, the next one is not". Reads lag behind,
so a read must equal the state of the cache at *some* moment not longer than ``lag`` before it, and the moments of one
reader never go back. Where it is only known that a change happened between two times, the cache *may* hold the block
from the first time on and *must* from the second one on.

Every record costs its own size, so a history takes linear time: decisions are checked in the order of time, and
residences that no later read can see are dropped.
"""

from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

FOREVER: Final = float("inf")

Name = Hashable
Span = tuple[float, float]  # seconds, both ends included


@dataclass(frozen=True, slots=True)
class CacheChange:
    """Names came into an engine's cache, or left it, in the interval ``after`` .. ``at``."""

    engine: str
    after: float
    at: float
    came: Sequence[Name] = ()
    went: Sequence[Name] = ()


@dataclass(frozen=True, slots=True)
class Unobserved:
    """The engine's cache was not observed between ``after`` and ``at``: it may have held anything."""

    engine: str
    after: float
    at: float


@dataclass(frozen=True, slots=True)
class Decision:
    """What ``reader``'s index said at ``at`` about a prompt with these blocks at ``engine``.

    ``denies``: the reader also says that the block after the overlap is not held. A sidecar that lost events forgets
    blocks on purpose, so this holds only for engines without such a loss. ``slack``: seconds in addition to ``lag``,
    after the reader was paused.
    """

    reader: str
    engine: str
    at: float
    names: Sequence[Name]
    overlap: int
    lag: float
    denies: bool = True
    slack: float = 0.0


Record = CacheChange | Unobserved | Decision


@dataclass(frozen=True, slots=True)
class Violation:
    """``claimed``: block number ``block`` could not be held. ``missed``: it must have been held, and was denied.
    ``torn``: every block was held at some moment, but not all at one. ``backwards``: only at a moment before the one
    that the reader had seen already.
    """

    kind: Literal["claimed", "missed", "torn", "backwards"]
    decision: Decision
    block: int


@dataclass(slots=True)
class _Residence:
    may_from: float
    must_from: float
    must_until: float = FOREVER
    may_until: float = FOREVER


@dataclass
class IndexChecker:
    """Takes the records of a history in the order of :func:`begins`. ``horizon``: the largest lag of its decisions,
    slack included. ``oldest``: age in seconds of the oldest view that a decision without slack needs to be true.
    """

    horizon: float
    violations: list[Violation] = field(default_factory=list)
    decisions: int = 0
    blocks: int = 0
    oldest: float = 0.0
    _held: dict[tuple[str, Name], list[_Residence]] = field(default_factory=dict)
    _unobserved: dict[str, list[Span]] = field(default_factory=dict)
    _seen: dict[tuple[str, str], float] = field(default_factory=dict)
    _ended: deque[tuple[float, tuple[str, Name]]] = field(default_factory=deque)

    def take(self, record: Record) -> None:
        """Add a record. Raises ``ValueError`` for a name that leaves a cache without having come."""
        if isinstance(record, Decision):
            self._check(record)
        elif isinstance(record, Unobserved):
            before = self._unobserved.get(record.engine, ())
            kept = [span for span in before if span[1] >= record.after - self.horizon]
            self._unobserved[record.engine] = [*kept, (record.after, record.at)]
        else:
            self._change(record)

    def _change(self, change: CacheChange) -> None:
        for name in change.went:
            place = (change.engine, name)
            residences = self._held.get(place)
            if not residences or residences[-1].may_until != FOREVER:
                raise ValueError(f"{change.engine} lost {name!r} at {change.at}, which it did not hold")
            residences[-1].must_until, residences[-1].may_until = change.after, change.at
            self._ended.append((change.at, place))
        for name in change.came:
            self._held.setdefault((change.engine, name), []).append(_Residence(change.after, change.at))

    def _check(self, decision: Decision) -> None:
        self.decisions += 1
        self.blocks += decision.overlap
        self._forget(decision.at)
        reader = (decision.reader, decision.engine)
        seen = self._seen.get(reader, -FOREVER)
        earliest = decision.at - decision.lag - decision.slack
        possible, kind, block = self._moments(decision, max(earliest, seen))
        if possible:
            self._seen[reader] = possible[0][0]
            if not decision.slack:
                self.oldest = max(self.oldest, decision.at - possible[-1][1])
            return
        if seen > earliest and self._moments(decision, earliest)[0]:
            kind = "backwards"
        self.violations.append(Violation(kind, decision, block))

    def _moments(
        self, decision: Decision, earliest: float
    ) -> tuple[list[Span], Literal["claimed", "missed", "torn"], int]:
        """Return the moments at which the decision was true; without any, why and by which block."""
        engine, names = decision.engine, decision.names
        unobserved = self._unobserved.get(engine, [])
        window = [(earliest, decision.at)]
        possible = window
        for number in range(decision.overlap):
            residences = self._held.get((engine, names[number]), ())
            if len(residences) == 1 and not unobserved and len(possible) == 1:  # the common case
                low, high = possible[0]
                only = residences[0]
                if only.may_from <= low and high <= only.may_until:
                    continue
            may = [(each.may_from, each.may_until) for each in residences] + unobserved
            if not (left := _intersection(possible, may)):
                return [], "torn" if _intersection(window, may) else "claimed", number
            possible = left
        if decision.denies and decision.overlap < len(names):
            for each in self._held.get((engine, names[decision.overlap]), ()):
                left = _without(possible, each.must_from, each.must_until)
                possible = left + _intersection(possible, unobserved)
                if not possible:
                    return [], "missed", decision.overlap
        return sorted(possible), "torn", decision.overlap

    def _forget(self, now: float) -> None:
        """Drop residences that ended before every window from now on."""
        while self._ended and self._ended[0][0] < now - self.horizon:
            _, place = self._ended.popleft()
            left = [each for each in self._held.get(place, ()) if each.may_until >= now - self.horizon]
            if left:
                self._held[place] = left
            else:
                self._held.pop(place, None)


def begins(record: Record) -> tuple[float, bool]:
    """Sort key of a history: changes from the first moment at which they may have happened, before decisions."""
    return (record.at, True) if isinstance(record, Decision) else (record.after, False)


def check(history: Iterable[Record]) -> IndexChecker:
    """Check a whole history in any order."""
    records = sorted(history, key=begins)
    checker = IndexChecker(max((each.lag + each.slack for each in records if isinstance(each, Decision)), default=0.0))
    for record in records:
        checker.take(record)
    return checker


def _intersection(spans: Sequence[Span], others: Sequence[Span]) -> list[Span]:
    found = [(max(a, c), min(b, d)) for a, b in spans for c, d in others if max(a, c) <= min(b, d)]
    return sorted(found)


def _without(spans: Sequence[Span], low: float, high: float) -> list[Span]:
    """Return what is left of spans without the moments between ``low`` and ``high``; these two stay."""
    if low >= high:
        return list(spans)
    left = [(a, min(b, low)) for a, b in spans if a <= low]
    return left + [(max(a, high), b) for a, b in spans if b >= high]
