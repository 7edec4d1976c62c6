"""Facts of a cluster in which nothing is wrong; a test changes the one thing that it is about."""

import copy
import re
from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from mmrouter_cli.doctor.diagnose import read_spec
from mmrouter_cli.doctor.findings import ClusterFacts, DeploymentFacts, Finding, FrontendFacts, RoutingFacts
from mmrouter_cli.status.control_api import State
from mmrouter_lib.api.crd import definition

NOW = 1_700_000_000.0
Object = dict[str, Any]


def timestamp(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def crd(**annotations: str) -> Object:
    made = copy.deepcopy(definition())
    made["metadata"]["annotations"] |= annotations
    made["status"] = {"conditions": [{"type": "Established", "status": "True"}]}
    return made


def lease(age: float = 2.0, holder: str = "operator-a", namespace: str = "mmrouter-system") -> Object:
    spec = {"holderIdentity": holder, "leaseDurationSeconds": 15, "renewTime": timestamp(NOW - age)}
    return {"metadata": {"name": "mmrouter-operator", "namespace": namespace}, "spec": spec}


def node(name: str, labels: Object | None = None, taints: Iterable[Object] = (), **more: Any) -> Object:
    """``more``: amounts over the usual (``gpus=4`` is `nvidia.com/gpu`), `ready`, `cordoned`."""
    ready, cordoned = more.pop("ready", True), more.pop("cordoned", False)
    amounts = {"cpu": "64", "memory": "512Gi", "pods": "110"}
    amounts |= {{"gpus": "nvidia.com/gpu", "gfx": "amd.com/gpu"}.get(k, k): str(v) for k, v in more.items()}
    return {
        "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name, **(labels or {})}},
        "spec": {"taints": list(taints), "unschedulable": cordoned},
        "status": {"allocatable": amounts, "conditions": [{"type": "Ready", "status": "True" if ready else "Unknown"}]},
    }


def gpu_node(name: str, gpus: int = 8, **more: Any) -> Object:
    return node(name, {"nvidia.com/gpu.present": "true"}, gpus=gpus, **more)


def cluster(**changes: Any) -> ClusterFacts:
    apis = frozenset({"v1", "apps/v1", "mmrouter.io/v1alpha1"})
    healthy = ClusterFacts(
        now=NOW, apis=apis, crd=crd(), leases=(lease(),), nodes=(gpu_node("node-a"), gpu_node("node-b"))
    )
    return replace(healthy, **changes)


def pod(name: str, pool: str = "worker", on: str = "node-a", *, ready: bool = True, **status: Any) -> Object:
    """A pod of a pool; of the frontend where ``pool`` is empty. ``status`` over the usual."""
    labels = {"mmrouter.io/pool": pool, "mmrouter.io/role": "worker"} if pool else {"mmrouter.io/role": "frontend"}
    truth = "True" if ready else "False"
    conditions = [{"type": kind, "status": truth} for kind in ("Ready", "ContainersReady")]
    metadata = {"name": name, "namespace": "home", "uid": name, "labels": labels}
    return {
        "metadata": {**metadata, "creationTimestamp": timestamp(NOW - 60)},
        "spec": {"containers": [{"name": "engine"}], **({"nodeName": on} if on else {})},
        "status": {"phase": "Running", "podIP": "127.0.0.9", "conditions": conditions, **status},
    }


def waiting(reason: str, message: str = "the runtime's words", container: str = "engine") -> Object:
    state = {"waiting": {"reason": reason, "message": message}}
    return {"phase": "Pending", "containerStatuses": [{"name": container, "state": state}]}


def condition(type_: str, status: str, reason: str, message: str = "in a sentence") -> Object:
    return {"type": type_, "status": status, "reason": reason, "message": message}


GOOD_CONDITIONS = (
    condition("Ready", "True", "Serving"),
    condition("SpecValid", "True", "Valid"),
    condition("Progressing", "False", "Complete"),
    condition("Degraded", "False", "AsExpected"),
    condition("ExactRoutingVerified", "True", "Verified"),
)


def pool(**changes: Any) -> Object:
    return {"name": "worker", "role": "worker", "replicas": 2, "accelerator": {"kind": "nvidia"}} | changes


def resource(*, conditions: Iterable[Object] = GOOD_CONDITIONS, **spec: Any) -> Object:
    """``spec``: sections over the shortest useful one."""
    return {
        "apiVersion": "mmrouter.io/v1alpha1",
        "kind": "MMRouterDeployment",
        "metadata": {"name": "vl", "namespace": "home", "uid": "1", "generation": 3},
        "spec": {"model": {"id": "org/model"}, "engine": {"type": "vllm"}, "pools": [pool()]} | spec,
        "status": {"observedGeneration": 3, "phase": "Ready", "conditions": list(conditions)},
    }


def running(engines: int = 2, frontends: int = 2) -> tuple[Object, ...]:
    fronts = [pod(f"vl-frontend-{number}", "") for number in range(frontends)]
    return (*(pod(f"vl-worker-{number}") for number in range(engines)), *fronts)


def deployed(made: Object | None = None, **changes: Any) -> DeploymentFacts:
    made = made or resource()
    home = {"metadata": {"name": "home", "labels": {"pod-security.kubernetes.io/enforce": "restricted"}}}
    memory = {f"vl-worker-{number}": (0, 8 << 30) for number in range(2)}
    healthy = DeploymentFacts(resource=made, dep=read_spec(made), namespace=home, pods=running(), shared_memory=memory)
    return replace(healthy, **changes)


def worker(name: str = "vl-worker-0", **changes: Any) -> Object:
    """A worker as a frontend's `/control/state` has it."""
    known = {"uid": name, "name": name, "pool": "worker", "role": "worker", "epoch": "e1", "seq": 7}
    proved = {"standing": "verified", "verified": "True", "canary": "True", "canary_cause": "", "canary_message": ""}
    live = {"routable": True, "synced": True, "engine_state": "up", "draining": False, "heard_seconds_ago": 0.2}
    load = {"held": {"0": 12}, "waiting": 0, "in_flight": 0}
    return {**known, **proved, **live, **load, "cause": "", "message": "", **changes}


def state(*workers: Object, **changes: Any) -> State:
    counts = {"decisions": 0, "exact_decisions": 0, "prompt_blocks": 0, "hit_blocks": 0}
    return {"ready": True, **counts, "workers": list(workers or (worker(),)), "renderers": [], **changes}


def heard(*frontends: State, before: State | None = None) -> RoutingFacts:
    """What frontends say: the same twice, unless ``before`` is what they said first."""
    named = (FrontendFacts(f"vl-frontend-{n}", before or now, now) for n, now in enumerate(frontends or (state(),)))
    return RoutingFacts(tuple(named), 1.5)


def levels(findings: Iterable[Finding]) -> list[str]:
    return [finding.level for finding in findings]


def the(findings: Iterable[Finding], level: str) -> Finding:
    """The only finding of a level."""
    found = [finding for finding in findings if finding.level == level]
    assert len(found) == 1, found
    return found[0]


def require(findings: Iterable[Finding], case: str) -> None:
    """Assert findings as ``LEVEL: part of what is seen -> part of what to do | LEVEL: ...`` names them, in order."""
    actual, expected = list(findings), re.split(r" \| (?=(?:ok|warning|problem): )", case)
    assert levels(actual) == [part.partition(": ")[0] for part in expected]
    for finding, part in zip(actual, expected, strict=True):
        seen, _, do = part.partition(": ")[2].partition(" -> ")
        assert (seen in finding.seen, do in finding.do) == (True, True), finding
