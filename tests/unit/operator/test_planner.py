"""Planning: the cases that have a name."""

import dataclasses
from typing import Any

import pytest
from unit.operator.simulated_world import UID, Child, World, deployment, finish, pair, standing, want, whole
from unit.operator.test_status import pods, with_view
from unit.render.objects import rendered

from mmrouter_operator.model.kinds import Capabilities
from mmrouter_operator.model.snapshot import ChildView
from mmrouter_operator.planning.planner import Blocked, Complete, Progress, plan
from mmrouter_operator.planning.pool_set_manifests import compatibility_of, generation_name
from mmrouter_operator.planning.rollout_progress import asks_of, role_of, template_hash


def test_everything_is_created_at_once() -> None:
    world = World(deployment(whole()))
    planned = world.reconcile()
    kinds = [manifest["kind"] for manifest in planned.apply]
    assert kinds.index("Deployment") == len(kinds) - kinds.count("Deployment"), "Deployments come last"
    roles = [role_of(manifest) for manifest in planned.apply if manifest["kind"] == "Deployment"]
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
    assert ("hold", "vl-work") in {(step.action, step.name) for step in planned.steps}
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


def test_what_is_not_ours_is_neither_changed_nor_removed() -> None:
    world = World(deployment(whole()))
    foreign = ChildView("Service", "vl", "u", "1", "another-owner")
    mine = ChildView("ConfigMap", "left-over", "u2", "1", UID)
    theirs = ChildView("ConfigMap", "theirs", "u3", "1", "another-owner")
    children = {(view.kind, view.name): view for view in (foreign, mine, theirs)}
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

    def replicas(*managers: str) -> Any:
        snapshot = with_view(world.snapshot(), "vl-work", replicas_managers=managers, resource_version="7")
        planned = plan([*world.choose()[0], scaler], snapshot)
        applied = next(m for m in planned.apply if m["metadata"]["name"] == "vl-work" and m["kind"] == "Deployment")
        # The server refuses replicas that were seen on an older object than the present one.
        seen = applied["metadata"].get("resourceVersion")
        assert seen == ("7" if "replicas" in applied["spec"] else None)
        return applied["spec"].get("replicas")

    assert replicas("mmrouter-operator") == 5
    assert replicas("mmrouter-operator", "kube-controller-manager") is None


@pytest.mark.parametrize(
    ("changes", "reason", "sentence"),
    [
        ({"failure": "no quota"}, "ReplicaFailure", "pods of pool work cannot be created: no quota"),
        ({"progressing_reason": "ProgressDeadlineExceeded"}, "ProgressDeadlineExceeded", "pool work made no progress"),
    ],
)
def test_a_deployment_that_cannot_go_on_blocks_with_its_reason(
    changes: dict[str, Any], reason: str, sentence: str
) -> None:
    world = standing(whole())
    want(world, whole(seed=1))
    for _ in range(2):
        world.reconcile()
        world.settle(*["vl-frontend", "vl-rend", "vl-enc"] * 8)
    world.reconcile()
    outcome = plan(world.choose()[0], with_view(world.snapshot(), "vl-work", **changes)).outcome
    assert isinstance(outcome, Blocked)
    assert outcome.reason == reason
    assert outcome.message.startswith(sentence)


def test_a_surge_replica_without_an_accelerator_blocks_and_says_what_to_do() -> None:
    for unavailable in (0, 1):
        world = standing(whole(unavailable=unavailable))
        want(world, whole(seed=1, unavailable=unavailable))
        for _ in range(60):
            world.reconcile()
            world.settle("vl-frontend", "vl-rend", "vl-enc")
        world.control("vl-work")
        stuck = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
        waiting = pods(lambda pod: pod.pool == "work" and not pod.ready, unschedulable=stuck)
        outcome = plan(world.choose()[0], waiting(world.snapshot())).outcome
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
    def spec(block: int) -> dict[str, Any]:
        result = pair(block=block, prefill=2)
        result["pools"][0]["autoscaling"] = {"minReplicas": 1, "maxReplicas": 9}
        return result

    world = World(deployment(spec(16)))
    can = Capabilities(frozenset({"custom.metrics.k8s.io/v1beta2"}))
    world.desired = lambda: rendered(world.dep, capabilities=can)  # type: ignore[method-assign]
    for _ in range(5):
        world.reconcile()
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
    scaler = world.others["HorizontalPodAutoscaler", "vl-pre"]
    assert scaler["spec"]["scaleTargetRef"]["name"] == child.manifest["metadata"]["name"]


def test_a_serving_revision_of_a_set_keeps_its_template_until_the_switch_is_over() -> None:
    """A Deployment cannot surge in the middle of a switch, so a restart of it would take ready pods away."""
    world = standing(pair())
    want(world, pair(block=32))
    begin(world)
    world.settle()
    new = newest(world, "pre")
    assert new is not None
    started = template_hash(new.manifest)
    assert any(pod.ready for pod in new.pods)
    want(world, pair(block=32, seed=1))
    world.reconcile()
    assert hash_of(newest(world, "pre")) == started
    finish(world)
    assert hash_of(newest(world, "pre")) != started


def test_a_revision_of_a_set_of_which_nothing_is_ready_is_corrected_at_once() -> None:
    world = standing(pair())
    want(world, pair(block=32))
    begin(world)
    for name in list(world.children):
        world.control(name)  # pods of the new revision are there, and none of them becomes ready
    broken = hash_of(newest(world, "pre"))
    want(world, pair(block=32, seed=1))
    world.reconcile()
    assert hash_of(newest(world, "pre")) != broken
    finish(world)


def hash_of(child: Child | None) -> str:
    assert child is not None
    return template_hash(child.manifest)


def begin(world: World) -> None:
    """Let the frontend roll, until the new revision of the set is there."""
    for _ in range(10):
        world.reconcile()
        if newest(world, "pre") is not None:
            return
        world.settle()
    raise AssertionError("the set does not switch")


def newest(world: World, pool: str) -> Child | None:
    """The Deployment of the generation that is wanted, once it is there."""
    wanted = {m["metadata"]["name"]: m for m in world.choose()[0]}[f"vl-{pool}"]
    name = generation_name(f"vl-{pool}", compatibility_of(wanted))
    return world.children.get(name)


@pytest.mark.parametrize(("live", "kept"), [(6, 6), (1, 2), (20, 8)])
def test_without_its_autoscaler_a_pool_keeps_its_replicas_within_its_bounds(live: int, kept: int) -> None:
    spec = whole(replicas=3)
    spec["pools"][0]["autoscaling"] = {"minReplicas": 2, "maxReplicas": 8}
    world = standing(spec)
    world.children["vl-work"].manifest["spec"]["replicas"] = live
    world.reconcile()
    assert world.children["vl-work"].manifest["spec"]["replicas"] == kept
    assert World(deployment(spec)).reconcile().rollouts[-1].desired == 3, "a new one begins with its own replicas"


def test_without_its_autoscaler_a_pool_of_a_set_keeps_its_replicas() -> None:
    spec = pair(prefill=2)
    spec["pools"][0]["autoscaling"] = {"maxReplicas": 8}
    world = standing(spec)
    (child,) = world.of_pool("pre")
    child.manifest["spec"]["replicas"] = 5
    world.settle()
    world.reconcile()
    assert world.of_pool("pre")[0].manifest["spec"]["replicas"] == 5


@pytest.mark.parametrize(
    ("terms", "asked"),
    [
        ([{"key": "gpu", "operator": "In", "values": ["true"]}], "label gpu=true"),
        ([{"key": "gpu", "operator": "Exists"}, {"key": "b", "operator": "NotIn", "values": ["x", "y"]}],
         "one of the labels gpu or b NotIn x,y"),
    ],
)  # fmt: skip
def test_what_pods_ask_of_a_node_names_the_labels_of_their_affinity(terms: list[dict[str, Any]], asked: str) -> None:
    affinity = {"nodeSelectorTerms": [{"matchExpressions": [term]} for term in terms]}
    spec = {"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": affinity}}}
    assert asks_of({"spec": {"template": {"spec": spec}}}) == asked
