"""Planning: whole rollouts replayed in a world of numbers, and the cases that have a name."""

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.operator.world import UID, World, deployment, role

from mmrouter_operator.observe import ChildView
from mmrouter_operator.plan import STAGES, Blocked, Complete, Plan, Progress
from mmrouter_operator.rollout import template_hash
from mmrouter_operator.status import status_of

IMAGE = "registry.example/vllm:1"


def pool(name: str, role: str = "worker", **fields: Any) -> dict[str, Any]:
    return {"name": name, "role": role, "replicas": 2, "accelerator": {"kind": "nvidia"}, "image": IMAGE, **fields}


def whole(seed: int = 0, replicas: int = 2, router: str = "1", surge: int = 1, unavailable: int = 0) -> dict[str, Any]:
    """A deployment with every stage. ``seed`` changes the engines' template, ``router`` the frontend's."""
    updates = {"maxSurge": surge, "maxUnavailable": unavailable}
    more = {"args": [f"--seed={seed}"], "updates": updates, "replicas": replicas}
    return {
        "model": {"id": "org/model"},
        "engine": {"type": "vllm"},
        "frontend": {"resources": {"limits": {"cpu": router}}},
        "pools": [
            pool("work", **more),
            pool("enc", "encoder", **more),
            pool("rend", "renderer", **{**more, "accelerator": {"kind": "cpu"}}),
        ],
    }


def pair(block: int = 16, prefill: int = 3, decode: int = 2, router: str = "1", seed: int = 0) -> dict[str, Any]:
    """A set. ``block`` changes how KV blocks are laid out; ``seed`` a template and not the layout."""
    more = {"blockSize": block, "args": [f"--seed={seed}"]}
    return {
        "model": {"id": "org/model"},
        "engine": {"type": "vllm"},
        "frontend": {"resources": {"limits": {"cpu": router}}},
        "pools": [pool("pre", "prefill", replicas=prefill, **more), pool("dec", "decode", replicas=decode, **more)],
    }


def want(world: World, spec: dict[str, Any], **metadata: Any) -> None:
    world.dep = deployment(spec, world.dep.metadata.generation + 1, **metadata)


def finish(world: World, rounds: int = 200) -> Plan:
    """Reconcile and let everything become ready until the plan is complete; fail if it never is."""
    for _ in range(rounds):
        planned = checked(world)
        if isinstance(planned.outcome, Complete):
            return planned
        world.settle()
    raise AssertionError(f"not complete: {planned.outcome}")


def standing(spec: dict[str, Any]) -> World:
    world = World(deployment(spec))
    finish(world)
    return world


def checked(world: World) -> Plan:
    """Reconcile once, and hold what was done to what must always hold."""
    before = {name: template_hash(child.manifest) for name, child in world.children.items()}
    pods = {pod.template_hash for pod in world.pods()}
    planned = world.reconcile()
    for name, child in world.children.items():
        wanted = template_hash(child.manifest)
        if name in before and before[name] != wanted and wanted not in pods:
            assert_stages_before_are_over(world, STAGES[role(child)])
    assert_success_is_of_new_pods(world, planned)
    return planned


def goal_hashes(world: World) -> dict[str, str]:
    return {
        m["metadata"]["labels"].get("mmrouter.io/pool", ""): template_hash(m)
        for m in world.choose()[0]
        if m["kind"] == "Deployment"
    }


def assert_stages_before_are_over(world: World, stage: int) -> None:
    goals = goal_hashes(world)
    for pod in world.pods():
        if STAGES[pod.role] < stage:
            assert pod.template_hash == goals[pod.pool], f"{pod.name} of an earlier stage is old"


def assert_success_is_of_new_pods(world: World, planned: Plan) -> None:
    status = status_of(world.dep, world.snapshot(), planned, (), world.status)
    world.status = status
    told = {item["type"]: item["status"] for item in status["conditions"]}
    goals = goal_hashes(world)
    wanted = {item.name: item.replicas for item in world.dep.spec.pools} | {"": world.dep.spec.frontend.replicas}
    true = all(
        [pod.template_hash for pod in world.pods() if pod.pool == name and pod.ready] == [goals[name]] * count
        for name, count in wanted.items()
    )
    if told["Ready"] == "True" or isinstance(planned.outcome, Complete):
        assert true, "success was told of old pods"
        assert {item["observedGeneration"] for item in status["conditions"]} == {world.dep.metadata.generation}
    if told["ExactRoutingVerified"] == "True":
        assert not {pod.template_hash for pod in world.pods()} - set(goals.values())


variants = st.one_of(
    st.builds(
        whole,
        seed=st.integers(0, 2),
        replicas=st.integers(2, 4),
        router=st.sampled_from("12"),
        surge=st.just(1),
        unavailable=st.integers(0, 1),
    )
)
sets_of_pools = st.builds(
    pair,
    block=st.sampled_from([16, 32, 64]),
    prefill=st.integers(2, 4),
    decode=st.integers(2, 3),
    router=st.sampled_from("12"),
    seed=st.integers(0, 1),
)
moves = st.lists(st.tuples(st.sampled_from(["plan", "control", "start", "fail"]), st.integers(0, 9)), max_size=25)


def live(world: World, story: list[tuple[str, int]]) -> None:
    for what, number in story:
        if what == "plan":
            checked(world)
            continue
        name = sorted(world.children)[number % len(world.children)]
        had, ready = world_counts(world)
        if what == "control":
            world.control(name)
            assert_within_limits(world, had, ready)
        elif what == "start":
            world.start(name, 1)
        else:
            world.fail(name)


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


@given(variants, st.lists(st.tuples(variants, moves), max_size=3))
@settings(max_examples=40, deadline=None)
def test_stages_follow_each_other_and_every_story_ends_well(
    first: dict[str, Any], story: list[tuple[dict[str, Any], list[tuple[str, int]]]]
) -> None:
    world = standing(first)
    for spec, events in story:
        want(world, spec)
        live(world, events)
    finish(world)


@given(sets_of_pools, st.lists(st.tuples(sets_of_pools, moves), max_size=3))
@settings(max_examples=40, deadline=None)
def test_a_set_switches_whole_and_every_story_ends_well(
    first: dict[str, Any], story: list[tuple[dict[str, Any], list[tuple[str, int]]]]
) -> None:
    world = standing(first)
    for spec, events in story:
        want(world, spec)
        live(world, events)
        assert (
            len(
                {
                    child.manifest["spec"]["selector"]["matchLabels"].get("mmrouter.io/compatibility")
                    for name in ("pre", "dec")
                    for child in world.of_pool(name)
                }
            )
            <= 2
        )
    finish(world)
    assert sorted(len(world.of_pool(name)) for name in ("pre", "dec")) == [1, 1]


def test_everything_is_created_at_once() -> None:
    world = World(deployment(whole()))
    planned = world.reconcile()
    kinds = [manifest["kind"] for manifest in planned.apply]
    assert kinds.index("Deployment") == len(kinds) - kinds.count("Deployment"), "Deployments come last"
    roles = [role(world.children[m["metadata"]["name"]]) for m in planned.apply if m["kind"] == "Deployment"]
    assert roles == ["frontend", "renderer", "encoder", "worker"]
    assert isinstance(planned.outcome, Progress)
    assert "Secret" not in kinds


def test_a_new_template_waits_for_the_frontend_and_its_replicas_do_not() -> None:
    world = standing(whole())
    want(world, whole(seed=1, router="2", replicas=3))
    old = template_hash(world.children["vl-work"].manifest)
    planned = world.reconcile()
    assert template_hash(world.children["vl-work"].manifest) == old
    assert world.children["vl-work"].manifest["spec"]["replicas"] == 3
    assert next(r for r in planned.rollouts if r.pool == "work").held
    finish(world)
    assert template_hash(world.children["vl-work"].manifest) != old


def test_going_back_in_the_middle_of_a_rollout_takes_effect_at_once() -> None:
    world = standing(whole())
    old = template_hash(world.children["vl-work"].manifest)
    want(world, whole(seed=1, router="2"))
    for _ in range(20):
        world.reconcile()
        if template_hash(world.children["vl-work"].manifest) != old:
            break
        world.settle()
    world.control("vl-work")  # one surge pod of the new template is starting
    want(world, whole())
    world.reconcile()
    assert template_hash(world.children["vl-work"].manifest) == old
    survivors = {pod.name for pod in world.pods() if pod.template_hash == old and pod.pool == "work"}
    finish(world)
    assert survivors == {pod.name for pod in world.pods() if pod.pool == "work"}, "no pod was replaced by its equal"


def test_a_held_deployment_whose_template_is_lost_is_left_as_it_is() -> None:
    world = standing(whole())
    want(world, whole(seed=1, router="2"))
    world.revisions.clear()
    planned = world.reconcile()
    applied = {m["metadata"]["name"] for m in planned.apply if m["kind"] == "Deployment"}
    assert applied == {"vl-frontend"}
    assert not planned.prune
    finish(world)


def test_a_paused_deployment_is_left_alone_and_still_judged() -> None:
    world = standing(whole())
    want(world, {**whole(seed=1), "paused": True})
    planned = world.reconcile()
    assert planned.outcome == Blocked("Paused", "spec.paused is true: nothing is changed")
    assert (planned.apply, planned.prune, planned.steps) == ((), (), ())
    assert not next(r for r in planned.rollouts if r.pool == "work").complete


def test_a_pool_that_left_the_spec_is_removed() -> None:
    world = standing(whole())
    spec = whole()
    spec["pools"] = spec["pools"][:2]
    want(world, spec)
    planned = world.reconcile()
    assert [(kind, name) for kind, name, _ in planned.prune if kind == "Deployment"] == [("Deployment", "vl-rend")]
    assert any(step.action == "delete" and step.name == "vl-rend" for step in planned.steps)
    finish(world)


def test_what_is_not_ours_is_neither_changed_nor_removed() -> None:
    world = World(deployment(whole()))
    foreign = ChildView("Service", "vl", "team", "u", "1", "somebody-else")
    mine = ChildView("ConfigMap", "left-over", "team", "u2", "1", UID)
    theirs = ChildView("ConfigMap", "theirs", "team", "u3", "1", "somebody-else")
    children = {(view.kind, view.name): view for view in (foreign, mine, theirs)}
    from mmrouter_operator.plan import plan

    planned = plan(world.choose()[0], dataclasses.replace(world.snapshot(), children=children))
    assert planned.outcome == Blocked(
        "ChildNameTaken",
        "Service vl is there and does not belong to this resource; it is left alone: delete or rename it",
    )
    assert ("Service", "vl") not in {(m["kind"], m["metadata"]["name"]) for m in planned.apply}
    assert planned.prune == (("ConfigMap", "left-over", "u2"),)


def test_an_autoscaled_pool_keeps_the_live_replicas_until_another_manager_owns_them() -> None:
    world = standing(whole())
    world.children["vl-work"].manifest["spec"]["replicas"] = 5
    scaler = {
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": "vl-work", "labels": {"mmrouter.io/pool": "work"}},
        "spec": {"scaleTargetRef": {"name": "vl-work"}},
    }
    from mmrouter_operator.plan import plan

    def replicas(*managers: str) -> Any:
        snapshot = world.snapshot()
        view = dataclasses.replace(snapshot.children["Deployment", "vl-work"], replicas_managers=managers)
        snapshot = dataclasses.replace(snapshot, children={**snapshot.children, ("Deployment", "vl-work"): view})
        planned = plan([*world.choose()[0], scaler], snapshot)
        return next(m for m in planned.apply if m["metadata"]["name"] == "vl-work" and m["kind"] == "Deployment")[
            "spec"
        ].get("replicas")

    assert replicas("mmrouter-operator") == 5
    assert replicas("mmrouter-operator", "kube-controller-manager") is None


@pytest.mark.parametrize(
    ("changes", "reason", "sentence"),
    [
        (
            {"failure": "exceeded quota: gpus"},
            "ReplicaFailure",
            "pods of pool work cannot be created: exceeded quota: gpus",
        ),
        ({"progressing_reason": "ProgressDeadlineExceeded"}, "ProgressDeadlineExceeded", "pool work made no progress"),
    ],
)
def test_a_deployment_that_cannot_go_on_blocks_with_its_reason(
    changes: dict[str, Any], reason: str, sentence: str
) -> None:
    from mmrouter_operator.plan import plan

    world = standing(whole())
    want(world, whole(seed=1))
    for _ in range(2):
        world.reconcile()
        for name in ("vl-frontend", "vl-rend", "vl-enc"):
            for _ in range(8):
                world.control(name)
                world.start(name)
    world.reconcile()
    snapshot = world.snapshot()
    view = dataclasses.replace(snapshot.children["Deployment", "vl-work"], **changes)
    snapshot = dataclasses.replace(snapshot, children={**snapshot.children, ("Deployment", "vl-work"): view})
    outcome = plan(world.choose()[0], snapshot).outcome
    assert isinstance(outcome, Blocked)
    assert outcome.reason == reason
    assert outcome.message.startswith(sentence)


def test_a_surge_replica_without_an_accelerator_blocks_and_says_what_to_do() -> None:
    from mmrouter_operator.plan import plan

    for unavailable in (0, 1):
        world = standing(whole(unavailable=unavailable))
        want(world, whole(seed=1, unavailable=unavailable))
        for _ in range(60):
            world.reconcile()
            for name in ("vl-frontend", "vl-rend", "vl-enc"):
                world.control(name)
                world.start(name)
        world.control("vl-work")
        snapshot = world.snapshot()
        stuck = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
        pods = tuple(
            dataclasses.replace(pod, unschedulable=stuck) if pod.pool == "work" and not pod.ready else pod
            for pod in snapshot.pods
        )
        outcome = plan(world.choose()[0], dataclasses.replace(snapshot, pods=pods)).outcome
        if unavailable:
            assert not isinstance(outcome, Blocked), "an old replica makes room"
        else:
            assert isinstance(outcome, Blocked)
            assert outcome.reason == "NoSurgeRoom"
            assert stuck in outcome.message


def test_a_set_that_cannot_overlap_blocks_and_keeps_serving() -> None:
    spec = pair(prefill=1)
    spec["pools"][0]["updates"] = {"maxSurge": 0, "maxUnavailable": 1}
    world = standing(spec)
    new = pair(prefill=1, block=32)
    new["pools"][0]["updates"] = spec["pools"][0]["updates"]
    want(world, new)
    for _ in range(5):
        planned = world.reconcile()
        world.settle()
    assert isinstance(planned.outcome, Blocked)
    assert planned.outcome.reason == "SetCannotOverlap"
    assert world.ready("pre") == 1


def test_the_autoscaler_of_a_set_rests_while_it_switches() -> None:
    from unit.operator.world import SECRETS

    from mmrouter_operator.render import render
    from mmrouter_operator.render.capabilities import Capabilities

    def spec(block: int) -> dict[str, Any]:
        result = pair(block=block, prefill=2)
        result["pools"][0]["autoscaling"] = {"minReplicas": 1, "maxReplicas": 9}
        return result

    world = World(deployment(spec(16)))
    can = Capabilities(frozenset({"custom.metrics.k8s.io/v1beta2"}))
    world.desired = lambda: render(world.dep, secrets=SECRETS, capabilities=can)  # type: ignore[method-assign]
    for _ in range(5):
        planned = world.reconcile()
        world.settle()
    (child,) = world.of_pool("pre")
    scaler = world.others["HorizontalPodAutoscaler", "vl-pre"]
    assert scaler["spec"]["scaleTargetRef"]["name"] == child.manifest["metadata"]["name"]
    child.manifest["spec"]["replicas"] = 5  # the load was high
    for _ in range(2):
        world.settle()
        world.reconcile()
    want(world, spec(32))
    gone = False
    for _ in range(60):
        planned = world.reconcile()
        gone = gone or ("HorizontalPodAutoscaler", "vl-pre") not in world.others
        if isinstance(planned.outcome, Complete):
            break
        assert world.ready("pre") >= 5
        world.settle()
    assert gone
    (child,) = world.of_pool("pre")
    assert child.manifest["spec"]["replicas"] == 5
    assert (
        world.others["HorizontalPodAutoscaler", "vl-pre"]["spec"]["scaleTargetRef"]["name"]
        == child.manifest["metadata"]["name"]
    )
