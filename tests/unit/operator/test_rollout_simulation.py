"""Whole rollouts replayed in a world of numbers: whatever happens and whatever is wanted next."""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from unit.conftest import examples
from unit.operator.simulated_world import World, finish, happen, pair, standing, want, whole

variants = st.builds(
    whole,
    seed=st.integers(0, 2),
    replicas=st.integers(2, 4),
    router=st.sampled_from("12"),
    surge=st.just(1),
    unavailable=st.integers(0, 1),
)
sets_of_pools = st.builds(
    pair,
    block=st.sampled_from([16, 32, 64]),
    prefill=st.integers(2, 4),
    decode=st.integers(2, 3),
    router=st.sampled_from("12"),
    seed=st.integers(0, 1),
)
Story = list[tuple[dict[str, Any], list[tuple[str, int]]]]
moves = st.lists(st.tuples(st.sampled_from(["plan", "control", "start", "fail"]), st.integers(0, 9)), max_size=25)


def live(world: World, story: list[tuple[str, int]]) -> None:
    for what, number in story:
        had, ready = world_counts(world)
        happen(world, what, number)
        if what == "control":
            assert_within_limits(world, had, ready)


def world_counts(world: World) -> tuple[dict[str, int], dict[str, int]]:
    pods = list(world.pods())
    names = {pod.pool for pod in pods} | {item.name for item in world.dep.spec.pools} | {""}
    return (
        {name: sum(pod.pool == name for pod in pods) for name in names},
        {name: sum(pod.pool == name and pod.ready for pod in pods) for name in names},
    )


def assert_within_limits(world: World, had: dict[str, int], ready: dict[str, int]) -> None:
    pods, now = world_counts(world)
    limits = {p.name: (p.replicas, p.updates.max_surge, p.updates.max_unavailable) for p in world.dep.spec.pools}
    for name, (replicas, surge, unavailable) in (limits | {"": (world.dep.spec.frontend.replicas, 1, 0)}).items():
        planned = max((child.limits[1] for child in world.of_pool(name)), default=0)
        assert pods[name] <= max(had[name], replicas + surge, planned), f"{name!r} surged too far"
        floor = min([replicas - unavailable, *(child.limits[2] for child in world.of_pool(name))])
        assert now[name] >= min(ready[name], floor), f"{name!r} fell below its floor"


def story_of(specs: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[tuple[dict[str, Any], Story]]:
    """Draw the first spec, and those that follow with what happens in the meantime."""
    return st.tuples(specs, st.lists(st.tuples(specs, moves), max_size=3))


@given(st.one_of(story_of(variants), story_of(sets_of_pools)))
@settings(max_examples=examples(50), deadline=None)
def test_stages_follow_each_other_sets_switch_whole_and_all_ends_well(drawn: tuple[dict[str, Any], Story]) -> None:
    first, story = drawn
    world = standing(first)
    for spec, events in story:
        want(world, spec)
        live(world, events)
        pools = [child.manifest["spec"]["selector"] for name in ("pre", "dec") for child in world.of_pool(name)]
        assert len({pool["matchLabels"].get("mmrouter.io/compatibility") for pool in pools}) <= 2
    finish(world)
    assert [len(world.of_pool(pool["name"])) for pool in first["pools"]] == [1] * len(first["pools"])
