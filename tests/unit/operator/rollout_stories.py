"""Deployments for tests, and how a world moves towards them: every step is held to what must always hold."""

from typing import Any

from unit.operator.simulated_world import World, deployment, role

from mmrouter_operator.planning.planner import STAGES, Complete, RolloutPlan
from mmrouter_operator.planning.rollout import template_hash
from mmrouter_operator.status.builder import status_of

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


def finish(world: World, rounds: int = 200) -> RolloutPlan:
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


def checked(world: World) -> RolloutPlan:
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
        if STAGES[pod.role] < stage and pod.pool in goals:  # others left the spec, and go last
            assert pod.template_hash == goals[pod.pool], f"{pod.name} of an earlier stage is old"


def assert_success_is_of_new_pods(world: World, planned: RolloutPlan) -> None:
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
        assert true, "success was reported for old pods"
        assert {item["observedGeneration"] for item in status["conditions"]} == {world.dep.metadata.generation}
    if told["ExactRoutingVerified"] == "True":
        assert not {pod.template_hash for pod in world.pods() if pod.pool in goals} - set(goals.values())
