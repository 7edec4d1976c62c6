"""How pools that only work together move from one revision to the next: numbers in, numbers out.

A prefill and a decode engine exchange KV blocks, so both must lay them out alike: pods with equal
``mmrouter.io/compatibility`` labels (a *generation*) pair, others do not. A change of that label therefore cannot roll
pod by pod. Both generations run side by side, one Deployment per pool and generation, and :func:`step` moves replicas
over, little by little, in proportion over the pools.

What holds after each step, for every pool with target n, surge s and unavailable u:

* there are never more than n + s pods (after a scale-down the surplus only shrinks);
* a generation *serves* when it has a ready pod of every role; the ready pods of serving generations never fall below
  n - u by what a step does, and never further when they are below it already;
* the old generation keeps one pod in each pool until it goes as a whole: its last decoder would be missed by all of its
  prefill engines at once;
* there are never more than two generations: a third one waits until one of the two before it is gone. Going back to
  the old one needs no rule of its own, it is a step towards another goal.

Worked example, prefill 4 + 1 surge, decode 2 + 1 surge, none unavailable (old/new, all become ready):
``4/0 2/0, 4/1 2/1, 3/1 1/1, 3/2 1/1, 2/2 1/2, 2/3 1/2, 1/3 1/2, 1/4 1/2, 0/4 0/2``.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Side:
    """One pool in one generation: replicas asked for, pods that exist, pods that are ready."""

    wanted: int
    total: int
    ready: int


@dataclass(frozen=True, slots=True)
class SetPool:
    """One pool of a set, with its replicas by generation."""

    name: str
    role: str
    target: int
    surge: int
    unavailable: int
    sides: Mapping[str, Side]

    @property
    def floor(self) -> int:
        """Ready replicas that must be left."""
        return max(0, self.target - self.unavailable)


@dataclass(frozen=True, slots=True)
class SetStep:
    """What to do now: replicas by (pool, generation), and generations to remove whole."""

    replicas: Mapping[tuple[str, str], int]
    drop: frozenset[str] = frozenset()
    towards: str = ""
    """The generation that grows now."""
    done: bool = False
    """Only the goal is left; its pods may still be starting."""
    blocked: str = ""
    """Why there is nothing to do although it is not done, in a sentence."""


def step(pools: Sequence[SetPool], goal: str) -> SetStep:
    """Return the next step towards the generation ``goal``. The same input gives the same step."""
    live = {name for pool in pools for name in pool.sides}
    if live <= {goal}:
        return SetStep({(pool.name, goal): pool.target for pool in pools}, towards=goal, done=True)
    towards = goal if len(live | {goal}) <= 2 else most_serving(pools, live, goal)
    old = sorted(live - {towards}, key=lambda name: (_weight(pools, name), name))
    if len(old) > 1 or towards != goal:
        # A generation that does not serve only takes up room: the rest of it would have no partner.
        lame = frozenset(name for name in old if not _serves(pools, name))
        if lame:
            return SetStep(_unchanged(pools, lame), drop=lame, towards=towards)
    narrow = _no_room(pools, old)
    if narrow and not any(_serves(pools, name) for name in old):
        # Nothing serves that could be lost.
        return SetStep(_unchanged(pools, frozenset(old)), drop=frozenset(old), towards=towards)
    if narrow:
        return SetStep(_unchanged(pools), towards=towards, blocked=narrow)
    return _move(pools, towards, old)


def _move(pools: Sequence[SetPool], towards: str, old: Sequence[str]) -> SetStep:
    replicas: dict[tuple[str, str], int] = {}
    ready = {(pool.name, name): side.ready for pool in pools for name, side in pool.sides.items()}
    for pool in pools:
        if towards in pool.sides:
            replicas[pool.name, towards] = min(pool.sides[towards].wanted, pool.target)
            ready[pool.name, towards] = min(ready[pool.name, towards], replicas[pool.name, towards])
    dropped: set[str] = set()
    for name in old:
        left = [other for other in (towards, *old) if other != name and other not in dropped]
        if _enough(pools, ready, left):
            dropped.add(name)
    kept = [name for name in old if name not in dropped]
    serving = [name for name in (towards, *kept) if _pairs(pools, ready, name)]
    for pool in pools:
        spare = sum(ready.get((pool.name, name), 0) for name in serving) - pool.floor
        shortfall = pool.floor - ready.get((pool.name, towards), 0)
        standing = sum(pool.sides[name].wanted for name in kept if name in pool.sides)
        for name in kept:
            if name not in pool.sides:
                continue
            side = pool.sides[name]
            least = max(1 if pool.target else 0, shortfall - (standing - side.wanted))
            if name in serving:
                least = max(least, side.ready - max(0, spare))
            replicas[pool.name, name] = min(side.wanted, least)
            standing -= side.wanted - replicas[pool.name, name]
            spare -= max(0, side.ready - replicas[pool.name, name]) if name in serving else 0
        taken = sum(max(side.wanted, side.total) for name, side in pool.sides.items() if name != towards)
        now = replicas.get((pool.name, towards), 0)
        room = min(pool.target + pool.surge - taken, _in_proportion(pools, ready, towards, pool))
        replicas[pool.name, towards] = max(now, min(pool.target, room), 0)
    return SetStep(replicas, drop=frozenset(dropped), towards=towards)


def _in_proportion(pools: Sequence[SetPool], ready: Mapping[tuple[str, str], int], towards: str, pool: SetPool) -> int:
    """Return how many replicas a pool may have so that it is at most one step ahead of the slowest pool."""
    shares = [
        (ready.get((other.name, towards), 0) + max(1, other.surge + other.unavailable)) / other.target
        for other in pools
        if other.target
    ]
    return math.ceil(pool.target * min([1.0, *shares]))


def _enough(pools: Sequence[SetPool], ready: Mapping[tuple[str, str], int], names: Iterable[str]) -> bool:
    """Whether these generations alone serve, and keep every pool at its floor."""
    serving = [name for name in names if _pairs(pools, ready, name)]
    if not serving:
        return not any(pool.target for pool in pools)
    return all(sum(ready.get((pool.name, name), 0) for name in serving) >= pool.floor for pool in pools)


def _pairs(pools: Sequence[SetPool], ready: Mapping[tuple[str, str], int], name: str) -> bool:
    roles = {pool.role for pool in pools if pool.target}
    return all(any(ready.get((p.name, name), 0) > 0 for p in pools if p.role == role) for role in roles)


def _serves(pools: Sequence[SetPool], name: str) -> bool:
    return _pairs(pools, {(p.name, n): side.ready for p in pools for n, side in p.sides.items()}, name)


def _weight(pools: Sequence[SetPool], name: str) -> tuple[bool, float, int]:
    sides = [(pool, pool.sides.get(name, Side(0, 0, 0))) for pool in pools if pool.target]
    share = min((side.ready / pool.target for pool, side in sides), default=0.0)
    return _serves(pools, name), min(share, 1.0), sum(side.wanted for _, side in sides)


def most_serving(pools: Sequence[SetPool], live: Iterable[str], goal: str) -> str:
    """Return the generation that serves most; ``goal`` where two are equal."""
    return max(live, key=lambda name: (_weight(pools, name), name == goal, name))


def _no_room(pools: Sequence[SetPool], old: Sequence[str]) -> str:
    for pool in pools:
        standing = any(pool.sides[name].wanted for name in old if name in pool.sides)
        if standing and pool.target and pool.target + pool.surge < 2:
            return (
                f"pool {pool.name} has one replica and no surge, so two revisions cannot stand side by side: set its "
                "updates.maxSurge to 1, or its replicas to 2"
            )
    return ""


def _unchanged(pools: Sequence[SetPool], without: frozenset[str] = frozenset()) -> dict[tuple[str, str], int]:
    return {
        (pool.name, name): side.wanted for pool in pools for name, side in pool.sides.items() if name not in without
    }
