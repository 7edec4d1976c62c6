"""A cluster of numbers for planning: Deployment controllers and kubelets that take one step per call.

It keeps what was applied as an API server does (generation, status with the generation it speaks of), and moves pods by
the rules of the Deployment controller: surge first, pods that are not ready go before ready ones.
"""

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from unit.render.objects import SECRETS

from mmrouter_lib.api import MMRouterDeployment, parse_deployment
from mmrouter_operator.model.snapshot import FrontendReport, PodView, RevisionView, Snapshot, WorkerReport
from mmrouter_operator.model.views import child_view, deployment_view, revision_view
from mmrouter_operator.planning.planner import STAGES, Complete, RolloutPlan, plan
from mmrouter_operator.planning.rollout_progress import pool_of, role_of, template_hash
from mmrouter_operator.planning.template_choice import choose_templates
from mmrouter_operator.render import render
from mmrouter_operator.status.builder import status_of

UID = "5e2b7c1e-0000-4000-8000-000000000001"


def deployment(spec: Mapping[str, Any], generation: int = 1, **metadata: Any) -> MMRouterDeployment:
    """A resource as the API server holds it."""
    return parse_deployment(
        {
            "apiVersion": "mmrouter.io/v1alpha1",
            "kind": "MMRouterDeployment",
            "metadata": {"name": "vl", "namespace": "team", "uid": UID, "generation": generation, **metadata},
            "spec": spec,
        }
    )


@dataclass
class Pod:
    """One pod: which template, and whether it is Ready."""

    name: str
    hash: str
    ready: bool = False


@dataclass
class Child:
    """One Deployment."""

    manifest: dict[str, Any]
    generation: int = 1
    observed: int = 0
    pods: list[Pod] = field(default_factory=list)
    seen: tuple[str, int] = ("", 0)
    """Template and replicas that its controller saw last."""
    status: dict[str, Any] = field(default_factory=dict)
    once: bool = False

    @property
    def limits(self) -> tuple[int, int, int]:
        """Replicas, most pods, fewest available."""
        wanted = self.manifest["spec"]["replicas"]
        rolling = self.manifest["spec"]["strategy"]["rollingUpdate"]
        surge, unavailable = rolling["maxSurge"], rolling["maxUnavailable"]
        return wanted, wanted + surge, wanted - (wanted if unavailable == "100%" else unavailable)


class World:
    """Deployments by name. ``resource`` is what the user wants now."""

    def __init__(self, dep: MMRouterDeployment) -> None:
        self.dep = dep
        self.children: dict[str, Child] = {}
        self.others: dict[tuple[str, str], dict[str, Any]] = {}
        self.revisions: list[RevisionView] = []
        self.status: dict[str, Any] = {}
        self.now = 1_000.0
        self._names = itertools.count()
        self._rendered: dict[str, list[dict[str, Any]]] = {}

    def snapshot(self) -> Snapshot:
        children = {("Deployment", name): deployment_view(self._live(name)) for name in self.children}
        pods = tuple(self.pods())
        workers = {pod.uid: WorkerReport(pod.role, True, "True") for pod in pods if pod.pool}
        return Snapshot(
            resource={
                "metadata": self.dep.metadata.model_dump(by_alias=True),
                "spec": self.dep.spec.model_dump(mode="json", by_alias=True, exclude_unset=True),
                "status": self.status,
            },
            now=self.now,
            children={**children, **{key: child_view(obj) for key, obj in self.others.items()}},
            pods=pods,
            reports={pod.uid: FrontendReport("r", True, workers, degraded=()) for pod in pods if not pod.pool},
            secrets=SECRETS,
            revisions=tuple(self.revisions),
        )

    def pods(self) -> Iterable[PodView]:
        for child in self.children.values():
            marks = child.manifest["metadata"]["labels"]
            for pod in child.pods:
                state: Any = {"phase": "Running", "ready": pod.ready, "containers_ready": pod.ready}
                state |= {"started": 0.0 if pod.ready else None, "template_hash": pod.hash, "ip": "10.0.0.1"}
                pool, role = marks.get("mmrouter.io/pool", ""), marks["mmrouter.io/role"]
                yield PodView(pod.name, "team", pod.name, pool, role, **state)

    def desired(self) -> list[dict[str, Any]]:
        key = self.dep.model_dump_json()
        if key not in self._rendered:
            self._rendered[key] = render(self.dep, secrets=SECRETS)
        return self._rendered[key]

    def choose(self, adopt: bool = False) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
        return choose_templates(self.desired(), self.snapshot(), adopt, self.dep)

    def reconcile(self, *, adopt: bool = False) -> RolloutPlan:
        """Plan, and apply all of it."""
        chosen, revision = self.choose(adopt)
        planned = plan(chosen, self.snapshot())
        if revision is not None and planned.apply:
            self.revisions.append(revision_view({**revision, "metadata": {**revision["metadata"], "uid": "r"}}))
        for manifest in planned.apply:
            self._apply(manifest)
        for kind, name, _ in planned.prune:
            if kind == "Deployment":
                del self.children[name]
            elif kind == "ControllerRevision":
                self.revisions = [revision for revision in self.revisions if revision.name != name]
            else:
                del self.others[kind, name]
        return planned

    def control(self, name: str) -> None:
        """Let one Deployment's controller look, and do what it may."""
        child = self.children[name]
        wanted, most, least = child.limits
        new = template_hash(child.manifest)
        while len(child.pods) > wanted and all(pod.hash == new for pod in child.pods):
            self._remove(child, lambda _: True)
        while len(child.pods) < most and sum(pod.hash == new for pod in child.pods) < wanted:
            child.pods.append(Pod(f"{name}-{next(self._names)}", new))
        starting = sum(pod.hash == new and not pod.ready for pod in child.pods)
        spare = len(child.pods) - least - starting
        while spare > 0 and any(pod.hash != new and not pod.ready for pod in child.pods):
            self._remove(child, lambda pod: pod.hash != new and not pod.ready)
            spare -= 1
        while sum(pod.ready for pod in child.pods) > least and any(pod.hash != new for pod in child.pods):
            self._remove(child, lambda pod: pod.hash != new)
        child.observed = child.generation
        child.once = child.once and child.seen[0] == new
        child.seen = (new, wanted)
        self._count(child)

    def start(self, name: str, count: int = 1_000) -> None:
        """Let pods become Ready; the controller hears of it at once."""
        child = self.children[name]
        for pod in [pod for pod in child.pods if not pod.ready][:count]:
            pod.ready = True
        self._count(child)

    def fail(self, name: str) -> None:
        """Let one pod lose its readiness."""
        child = self.children[name]
        for pod in child.pods[:1]:
            pod.ready = False
        self._count(child)

    def settle(self, *names: str) -> None:
        """Let everything happen that waits to happen, once; ``names``: in these Deployments only."""
        for name in names or list(self.children):
            self.control(name)
            self.start(name)

    def ready(self, pool: str) -> int:
        return sum(pod.ready for pod in self.pods() if pod.pool == pool)

    def of_pool(self, pool: str) -> list[Child]:
        return [child for child in self.children.values() if pool_of(child.manifest) == pool]

    def _count(self, child: Child) -> None:
        new = child.seen[0]
        updated = sum(pod.hash == new for pod in child.pods)
        ready = sum(pod.ready for pod in child.pods)
        if updated == ready == len(child.pods) == child.seen[1]:
            child.once = True
        reason = "NewReplicaSetAvailable" if child.once else "ReplicaSetUpdated"
        child.status = {
            "observedGeneration": child.observed,
            "replicas": len(child.pods),
            "updatedReplicas": updated,
            "readyReplicas": ready,
            "availableReplicas": ready,
            "conditions": [{"type": "Progressing", "status": "True", "reason": reason}],
        }

    @staticmethod
    def _remove(child: Child, which: Any) -> None:
        doomed = sorted((pod for pod in child.pods if which(pod)), key=lambda pod: (pod.ready, pod.name))[0]
        child.pods.remove(doomed)

    def _apply(self, manifest: dict[str, Any]) -> None:
        name = manifest["metadata"]["name"]
        if manifest["kind"] != "Deployment":
            self.others[manifest["kind"], name] = manifest
            return
        child = self.children.get(name)
        if child is None:
            self.children[name] = Child(manifest)
            return
        assert child.manifest["spec"]["selector"] == manifest["spec"]["selector"], "a selector cannot change"
        if "replicas" not in manifest["spec"]:
            manifest = {**manifest, "spec": {**manifest["spec"], "replicas": child.manifest["spec"]["replicas"]}}
        if child.manifest["spec"] != manifest["spec"]:
            child.generation += 1
        child.manifest = manifest

    def _live(self, name: str) -> dict[str, Any]:
        child = self.children[name]
        metadata = {**child.manifest["metadata"], "uid": name, "generation": child.generation, "managedFields": []}
        return {**child.manifest, "metadata": metadata, "status": child.status}


IMAGE = "registry.example/vllm:1"


def pool(name: str, role: str = "worker", **fields: Any) -> dict[str, Any]:
    return {"name": name, "role": role, "replicas": 2, "accelerator": {"kind": "nvidia"}, "image": IMAGE, **fields}


def pools(*items: dict[str, Any], router: str = "1") -> dict[str, Any]:
    """A deployment of these pools. ``router`` changes the frontend's template."""
    return {
        "model": {"id": "org/model"},
        "engine": {"type": "vllm"},
        "frontend": {"resources": {"limits": {"cpu": router}}},
        "pools": list(items),
    }


def whole(seed: int = 0, replicas: int = 2, router: str = "1", surge: int = 1, unavailable: int = 0) -> dict[str, Any]:
    """A deployment with every stage. ``seed`` changes the engines' template, ``router`` the frontend's."""
    updates = {"maxSurge": surge, "maxUnavailable": unavailable}
    more = {"args": [f"--seed={seed}"], "updates": updates, "replicas": replicas}
    renderer = pool("rend", "renderer", **{**more, "accelerator": {"kind": "cpu"}})
    return pools(pool("work", **more), pool("enc", "encoder", **more), renderer, router=router)


def pair(block: int = 16, prefill: int = 3, decode: int = 2, router: str = "1", seed: int = 0) -> dict[str, Any]:
    """A set. ``block`` changes how KV blocks are laid out; ``seed`` a template and not the layout."""
    more = {"blockSize": block, "args": [f"--seed={seed}"]}
    prefiller, decoder = pool("pre", "prefill", **more), pool("dec", "decode", **more)
    return pools({**prefiller, "replicas": prefill}, {**decoder, "replicas": decode}, router=router)


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
            assert_stages_before_are_over(world, STAGES[role_of(child.manifest)])
    assert_success_is_of_new_pods(world, planned)
    return planned


def happen(world: World, what: str, number: int) -> RolloutPlan | None:
    """Let one thing happen: a step of the ``plan``, or of one of the Deployments. Returns the plan of a step."""
    name = sorted(world.children)[number % len(world.children)]
    match what:
        case "plan":
            return checked(world)
        case "settle":
            world.settle()
        case "control":
            world.control(name)
        case "start":
            world.start(name, 1)
        case "fail":
            world.fail(name)
    return None


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
    statuses = {item["type"]: item["status"] for item in status["conditions"]}
    goals = goal_hashes(world)
    wanted = {item.name: item.replicas for item in world.dep.spec.pools} | {"": world.dep.spec.frontend.replicas}
    true = all(
        [pod.template_hash for pod in world.pods() if pod.pool == name and pod.ready] == [goals[name]] * count
        for name, count in wanted.items()
    )
    if statuses["Ready"] == "True" or isinstance(planned.outcome, Complete):
        assert true, "success was reported for old pods"
        assert {item["observedGeneration"] for item in status["conditions"]} == {world.dep.metadata.generation}
    if statuses["ExactRoutingVerified"] == "True":
        assert not {pod.template_hash for pod in world.pods() if pod.pool in goals} - set(goals.values())
