"""Switching a set of pools: whole rollouts replayed against replicas that start, fail and stop at random."""

from collections import Counter
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.conftest import examples

from mmrouter_operator.planning import pool_set_rollout as sets
from mmrouter_operator.planning.pool_set_rollout import SetPool, SetStep, Side, step

ROUNDS = 400


@dataclass
class Fleet:
    """Pods of the set's Deployments. A ReplicaSet removes pods that are not ready first, as the real one does."""

    pools: list[SetPool]
    """Their sides are not used."""
    wanted: dict[tuple[str, str], int] = field(default_factory=dict)
    ready: Counter[tuple[str, str]] = field(default_factory=Counter)
    starting: Counter[tuple[str, str]] = field(default_factory=Counter)

    def view(self) -> list[SetPool]:
        sides = {key: Side(count, self.total(key), self.ready[key]) for key, count in self.wanted.items()}
        return [
            replace(pool, sides={key[1]: side for key, side in sides.items() if key[0] == pool.name})
            for pool in self.pools
        ]

    def total(self, key: tuple[str, str]) -> int:
        return self.ready[key] + self.starting[key]

    def carry_out(self, now: SetStep) -> None:
        for key in [key for key in self.wanted if key[1] in now.drop]:
            for counts in (self.wanted, self.ready, self.starting):
                counts.pop(key, None)
        for key, count in now.replicas.items():
            self.wanted[key] = count
            while self.total(key) > count:
                if self.starting[key]:
                    self.starting[key] -= 1
                else:
                    self.ready[key] -= 1
            self.starting[key] = count - self.ready[key]

    def become_ready(self, key: tuple[str, str], count: int) -> None:
        moved = min(count, self.starting[key])
        self.starting[key] -= moved
        self.ready[key] += moved

    def fail(self, key: tuple[str, str], count: int) -> None:
        moved = min(count, self.ready[key])
        self.ready[key] -= moved
        self.starting[key] += moved

    def serving(self) -> list[int]:
        """Ready replicas per pool of generations that have a ready pod of every role."""
        pairs = [
            generation
            for generation in self.generations()
            if {p.role for p in self.pools if p.target}
            <= {p.role for p in self.pools if self.ready[p.name, generation]}
        ]
        return [sum(self.ready[pool.name, generation] for generation in pairs) for pool in self.pools]

    def pods(self) -> list[int]:
        return [sum(self.total(key) for key in self.wanted if key[0] == pool.name) for pool in self.pools]

    def generations(self) -> set[str]:
        return {generation for _, generation in self.wanted}

    def finished(self, goal: str) -> bool:
        return self.generations() == {goal} and all(
            self.ready[pool.name, goal] == self.wanted[pool.name, goal] == pool.target for pool in self.pools
        )


def advance(fleet: Fleet, goal: str) -> SetStep:
    """Take one step and hold it to what every step must keep."""
    before, stood = fleet.serving(), fleet.pods()
    now = step(fleet.view(), goal)
    fleet.carry_out(now)
    after, stand = fleet.serving(), fleet.pods()
    for pool, was, is_, had, has in zip(fleet.pools, before, after, stood, stand, strict=True):
        assert is_ >= min(was, max(0, pool.target - pool.unavailable)), f"{pool} fell below its floor: {was} -> {is_}"
        assert has <= max(had, pool.target + pool.surge), f"{pool} surged too far: {has}"
    if all(pool.target for pool in fleet.pools) and any(before):
        assert any(after), "no pair of one generation was left"
    return now


def finish(fleet: Fleet, goal: str) -> None:
    """Let everything become ready until the goal is reached; fail if it never is."""
    for _ in range(ROUNDS):
        for key in list(fleet.wanted):
            fleet.become_ready(key, 1000)
        if fleet.finished(goal):
            return
        advance(fleet, goal)
    raise AssertionError(f"not finished after {ROUNDS} steps: {fleet}")


def standing(fleet: Fleet, goal: str) -> Fleet:
    advance(fleet, goal)
    finish(fleet, goal)
    return fleet


@st.composite
def fleets(draw: st.DrawFn) -> Fleet:
    roles = draw(st.sampled_from([("prefill", "decode"), ("prefill", "prefill", "decode")]))
    pools = []
    for number, role in enumerate(roles):
        target = draw(st.integers(1, 8))
        surge = draw(st.integers(1 if target == 1 else 0, 3))
        unavailable = draw(st.integers(0 if surge else 1, 3))
        pools.append(SetPool(f"{role}{number}", role, target, surge, unavailable, {}))
    return standing(Fleet(pools), "a")


chance = st.tuples(st.sampled_from(["ready", "fail", "step", "step"]), st.integers(0, 5), st.integers(1, 3))


@given(fleets(), st.lists(st.tuples(st.sampled_from("abc"), st.lists(chance, max_size=12)), max_size=5), st.data())
@settings(max_examples=examples(250), deadline=None)
def test_no_step_goes_below_the_floor_or_above_the_surge_whatever_fails_and_whatever_is_wanted_next(
    fleet: Fleet, story: list[tuple[str, list[tuple[str, int, int]]]], data: st.DataObject
) -> None:
    goal = "a"
    for goal, events in story:
        for what, which, count in events:
            keys = sorted(fleet.wanted)
            key = keys[which % len(keys)]
            if what == "ready":
                fleet.become_ready(key, count)
            elif what == "fail":
                fleet.fail(key, count)
            else:
                advance(fleet, goal)
                assert len(fleet.generations()) <= 2
        if data.draw(st.booleans()):
            place = data.draw(st.integers(0, len(fleet.pools) - 1))
            pool = fleet.pools[place]
            fleet.pools[place] = replace(pool, target=data.draw(st.integers(1 if pool.surge else 2, 9)))
    finish(fleet, goal)


def test_the_worked_example_of_the_module() -> None:
    fleet = standing(Fleet([SetPool("p", "prefill", 4, 1, 0, {}), SetPool("d", "decode", 2, 1, 0, {})]), "old")
    seen = []
    for _ in range(20):
        sides = [[fleet.ready[pool, name] for name in ("old", "new")] for pool in "pd"]
        seen.append(" ".join(f"{old}/{new}" for old, new in sides))
        if fleet.finished("new"):
            break
        advance(fleet, "new")
        for key in list(fleet.wanted):
            fleet.become_ready(key, 10)
    assert ", ".join(dict.fromkeys(seen)) in " ".join((sets.__doc__ or "").split())
    assert len(seen) == 9


def test_a_broken_revision_never_takes_the_serving_one_away() -> None:
    fleet = standing(Fleet([SetPool("p", "prefill", 4, 1, 1, {}), SetPool("d", "decode", 2, 1, 1, {})]), "good")
    for _ in range(50):  # no pod of the new revision ever becomes ready
        advance(fleet, "broken")
    assert fleet.serving() == [3, 1]
    finish(fleet, "fixed")


@pytest.mark.parametrize("serving", [True, False])
def test_a_pool_of_one_without_surge_blocks_a_switch_unless_nothing_serves(serving: bool) -> None:
    ready = 1 if serving else 0
    pools = [
        SetPool("p", "prefill", 1, 0, 1, {"a": Side(1, 1, ready)}),
        SetPool("d", "decode", 1, 1, 0, {"a": Side(1, 1, 1)}),
    ]
    now = step(pools, "b")
    assert bool(now.blocked) == serving
    assert now.drop == (frozenset() if serving else {"a"})
    if serving:
        assert now.replicas == {("p", "a"): 1, ("d", "a"): 1}
        assert "pool p has one replica and no surge" in now.blocked


def test_an_outage_of_both_revisions_does_not_stop_a_third() -> None:
    fleet = standing(Fleet([SetPool("p", "prefill", 3, 0, 2, {}), SetPool("d", "decode", 2, 0, 1, {})]), "a")
    for _ in range(5):
        advance(fleet, "b")
    for key in list(fleet.wanted):
        fleet.fail(key, 10)
    for _ in range(10):
        advance(fleet, "c")
        for name in ("p", "d"):
            if ("p", "c") in fleet.wanted:
                fleet.become_ready((name, "c"), 10)
    assert fleet.finished("c")
