"""Pools that leave the spec: what replaces them serves first."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.operator.simulated_world import World, finish, happen, pair, pool, pools, standing, want
from unit.operator.test_status import pods, with_view

from mmrouter_operator.planning.planner import Blocked, Complete, Progress, plan
from mmrouter_operator.planning.rollout_progress import pool_of


def test_a_renamed_pool_serves_until_its_successor_does() -> None:
    world = standing(pools(pool("a")))
    want(world, pools(pool("b")))
    planned = world.reconcile()
    assert isinstance(planned.outcome, Progress)
    assert "Deployment vl-a, whose pool is gone from the spec, serves until pool b can" in planned.outcome.message
    assert ("hold", "vl-a") in {(step.action, step.name) for step in planned.steps}
    assert ("PodDisruptionBudget", "vl-a") in world.others, "what is made for it stays as well"
    while "vl-a" in world.children:
        assert world.ready("a") == 2
        assert world.ready("b") < 2
        world.control("vl-b")
        world.start("vl-b", 1)
        world.reconcile()
    assert world.ready("b") == 2
    finish(world)
    assert ("PodDisruptionBudget", "vl-a") not in world.others


def test_workers_serve_until_the_set_that_replaces_them_does() -> None:
    world = standing(pools(pool("a")))
    want(world, pair())
    world.reconcile()
    world.settle(*(name for name in world.children if "-pre-" in name))
    world.reconcile()
    assert world.ready("a") == 2, "prefill alone does not serve"
    finish(world)
    assert not world.of_pool("a")


def test_an_encoder_pool_serves_until_the_engines_that_use_it_are_replaced() -> None:
    world = standing(pools(pool("a"), pool("enc", "encoder")))
    want(world, pools(pool("a")))
    world.reconcile()
    world.control("vl-a")
    world.reconcile()
    assert world.ready("enc") == 2
    finish(world)
    assert not world.of_pool("enc")


def test_a_pool_that_nothing_replaces_goes_at_once() -> None:
    world = standing(pools(pool("a"), pool("b")))
    want(world, pools(pool("a")))
    planned = world.reconcile()
    assert [item.name for item in planned.prune if item.kind == "Deployment"] == ["vl-b"]
    assert ("delete", "vl-b") in {(step.action, step.name) for step in planned.steps}


def test_a_pool_that_does_not_serve_makes_room_at_once() -> None:
    world = standing(pools(pool("a")))
    for pod in world.children["vl-a"].pods:
        pod.ready = False
    world.start("vl-a", 0)
    want(world, pools(pool("b")))
    world.reconcile()
    assert "vl-a" not in world.children


def test_going_back_while_the_old_pool_still_serves_restarts_nothing() -> None:
    world = standing(pools(pool("a")))
    before = {pod.name for pod in world.pods() if pod.pool == "a"}
    for router in "123":  # revisions come and go meanwhile
        want(world, pools(pool("b"), router=router))
        world.reconcile()
    want(world, pools(pool("a")))
    finish(world)
    assert before == {pod.name for pod in world.pods() if pod.pool == "a"}
    assert not world.of_pool("b")


def test_no_node_for_the_successor_is_reported_with_the_way_out() -> None:
    world = standing(pools(pool("a")))
    want(world, pools(pool("b")))
    world.reconcile()
    world.control("vl-b")
    stuck = pods(lambda pod: pod.pool == "b", unschedulable="0/1 nodes are available")(world.snapshot())
    outcome = plan(world.choose()[0], stuck).outcome
    assert isinstance(outcome, Blocked)
    assert outcome.reason == "NoSurgeRoom"
    assert "setting the replicas of pool b to 0" in outcome.message
    want(world, pools(pool("b", replicas=0)))  # the way out
    world.settle()
    for _ in range(5):
        world.reconcile()
        world.settle()
    assert "vl-a" not in world.children


@pytest.mark.parametrize(("owner", "deleted"), [("another", []), ("", [("Deployment", "vl-z", "z")])])
def test_of_pools_that_are_not_in_the_spec_an_orphan_is_deleted_and_anothers_is_not(
    owner: str, deleted: list[tuple[str, str, str]]
) -> None:
    world = standing(pools(pool("a")))
    other = with_view(world.snapshot(), "vl-a", name="vl-z", pool="z", owner=owner, uid="z")
    planned = plan(world.choose()[0], other)
    assert list(planned.prune) == deleted
    assert isinstance(planned.outcome, Progress if deleted else Complete)


workers = st.builds(
    lambda names, encoder, replicas, seed, unavailable, router: pools(
        *(
            pool(
                name,
                replicas=replicas,
                args=[f"--seed={seed}"],
                updates={"maxSurge": 1, "maxUnavailable": min(unavailable, replicas - 1)},
            )
            for name in sorted(names)
        ),
        *([pool(encoder, "encoder")] if encoder else []),
        router=router,
    ),
    names=st.sets(st.sampled_from("abc"), min_size=1),
    encoder=st.sampled_from(["", "e", "f"]),
    replicas=st.integers(1, 3),
    seed=st.integers(0, 1),
    unavailable=st.integers(0, 1),
    router=st.sampled_from("12"),
)
sets = st.builds(
    lambda prefill, decode, block, replicas: pools(
        pool(prefill, "prefill", replicas=replicas, blockSize=block), pool(decode, "decode", blockSize=block)
    ),
    prefill=st.sampled_from(["p", "q"]),
    decode=st.sampled_from(["d", "g"]),
    block=st.sampled_from([16, 32]),
    replicas=st.integers(1, 3),
)
moves = st.lists(st.tuples(st.sampled_from(["plan", "control", "start"]), st.integers(0, 9)), max_size=25)


@given(st.one_of(workers, sets), st.lists(st.tuples(st.one_of(workers, sets), moves), min_size=1, max_size=3))
@settings(max_examples=20, deadline=None)
def test_some_pool_always_serves_while_pools_appear_vanish_and_change_their_names(
    first: dict[str, Any], story: list[tuple[dict[str, Any], list[tuple[str, int]]]]
) -> None:
    world = standing(first)
    for spec, events in story:
        want(world, spec)
        for event in [*events, *[("plan", 0), ("settle", 0)] * 2]:
            held_to_the_floor(world, *event)
    for _ in range(100):
        held_to_the_floor(world, "settle", 0)
        if isinstance(held_to_the_floor(world, "plan", 0), Complete):
            break
    finish(world, rounds=5)
    assert {pool_of(child.manifest) for child in world.children.values()} == {
        "",
        *(p.name for p in world.dep.spec.pools),
    }


def held_to_the_floor(world: World, what: str, number: int) -> Any:
    """Let one thing happen. No engine's replicas that may not be missed are lost by it, and never all that serve."""
    before, served = wanted_by_role(world), pairs_and_workers(world)
    planned = happen(world, what, number)
    now = ready_by_role(world)
    assert not served or pairs_and_workers(world), "no pool serves any more"
    spec = world.dep.spec.pools
    if {p.role for p in spec} <= {"worker", "encoder"}:
        for role in {p.role for p in spec}:
            least = sum(p.replicas - p.updates.max_unavailable for p in spec if p.role == role)
            assert now[role] >= min(before[role], least), f"{role}: below the floor"
    return planned and planned.outcome


def ready_by_role(world: World) -> Counter[str]:
    return Counter(pod.role for pod in world.pods() if pod.ready)


def wanted_by_role(world: World) -> Counter[str]:
    """Ready pods by role, without those beyond their pool's replicas: these may be removed."""
    replicas = {pool.name: pool.replicas for pool in world.dep.spec.pools}
    ready = Counter((pod.role, pod.pool) for pod in world.pods() if pod.ready)
    found: Counter[str] = Counter()
    for (role, name), count in ready.items():
        found[role] += min(count, replicas.get(name, count))
    return found


def pairs_and_workers(world: World) -> int:
    """Workers that are ready, and revisions of a set with a ready pod of both roles."""
    found: dict[str, set[str]] = {}
    for child in world.children.values():
        labels = child.manifest["metadata"]["labels"]
        key = child.manifest["spec"]["selector"]["matchLabels"].get("mmrouter.io/compatibility", "")
        if any(pod.ready for pod in child.pods):
            found.setdefault(key, set()).add(labels["mmrouter.io/role"])
    return sum({"prefill", "decode"} <= roles for roles in found.values()) + ready_by_role(world)["worker"]
