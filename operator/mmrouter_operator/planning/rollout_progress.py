"""The rollout of one Deployment: its progress, and what blocks it. Pure.

A rollout is judged by the template that is wanted now: pods of an older one never count as updated, also before the
Deployment controller has observed the change.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mmrouter_operator.model.kinds import POOL_LABEL, RENDERING_HASH, ROLE_LABEL
from mmrouter_operator.model.snapshot import DeploymentView, PodView, Snapshot
from mmrouter_operator.model.views import BAD_WAITING, CRASH_LOOP

STAGES: Mapping[str, int] = {"frontend": 0, "renderer": 1, "encoder": 2, "worker": 3, "prefill": 3, "decode": 3}
"""Role -> its stage in the order of a rollout."""


@dataclass(frozen=True, slots=True)
class Progress:
    """The rollout is under way. ``message``: what it waits for, in a sentence."""

    message: str


@dataclass(frozen=True, slots=True)
class Complete:
    """The spec is in effect: every replica is of the newest version and available."""


@dataclass(frozen=True, slots=True)
class Blocked:
    """The rollout does not continue by itself. Callers must not take it for :class:`Complete`."""

    reason: str
    """CamelCase, stable."""
    message: str


Outcome = Progress | Complete | Blocked


@dataclass(frozen=True, slots=True)
class Rollout:
    """The progress of a pool or the frontend. A set pool's counts are sums over its two revisions."""

    name: str
    """Name of the Deployment that the spec describes."""
    pool: str
    """Empty for the frontend."""
    role: str
    desired: int
    ready: int = 0
    available: int = 0
    updated: int = 0
    total: int = 0
    current: bool = False
    """The Deployment has the wanted template, and its controller has seen it."""
    settled: bool = False
    """No pod of an older template is left or expected; replicas may still be missing."""
    blocked: Blocked | None = None
    asks: str = ""
    """What a node must have to fit one of its pods, in words."""

    @property
    def complete(self) -> bool:
        """Every wanted replica is of the wanted template and available, and there is no other."""
        return self.current and self.updated == self.total == self.desired == self.available

    @property
    def subject(self) -> str:
        """Its name in sentences."""
        return f"pool {self.pool}" if self.pool else "frontend"


def template_hash(manifest: Mapping[str, Any]) -> str:
    """Return the annotation ``mmrouter.io/rendering-hash`` of a Deployment's template."""
    annotations = manifest["spec"]["template"]["metadata"].get("annotations") or {}
    return str(annotations.get(RENDERING_HASH, ""))


def pool_of(manifest: Mapping[str, Any]) -> str:
    """Return the pool that a child belongs to; empty for none."""
    return str((manifest["metadata"].get("labels") or {}).get(POOL_LABEL, ""))


def role_of(manifest: Mapping[str, Any]) -> str:
    """Return the role of a Deployment's pods."""
    return str((manifest["metadata"].get("labels") or {}).get(ROLE_LABEL, ""))


def assess(manifest: Mapping[str, Any], live: DeploymentView | None, snapshot: Snapshot, desired: int) -> Rollout:
    """Return the progress of a Deployment towards ``manifest`` with ``desired`` replicas."""
    pool, role, wanted = pool_of(manifest), role_of(manifest), template_hash(manifest)
    name = manifest["metadata"]["name"]
    if live is None:
        return Rollout(name=name, pool=pool, role=role, desired=desired, asks=asks_of(manifest))
    pods = pods_of(snapshot.pods, pool, role)
    seen = live.observed_generation >= live.generation
    current = seen and live.template_hash == wanted
    # The controller counts the template that it observed last: that is the wanted one only if current.
    updated = live.updated if current else sum(1 for pod in pods if pod.template_hash == wanted and not pod.deleting)
    once = live.progressing_reason == "NewReplicaSetAvailable"
    rollout = Rollout(
        name=name,
        pool=pool,
        role=role,
        desired=desired,
        ready=live.ready,
        available=live.available,
        updated=updated,
        total=live.total,
        current=current,
        asks=asks_of(manifest),
        settled=current and live.updated == live.total and (once or live.available >= desired),
    )
    blocked = None if rollout.complete else _blocked(rollout, manifest, live, pods)
    return dataclasses.replace(rollout, blocked=blocked)


def pods_of(pods: Sequence[PodView], pool: str, role: str) -> list[PodView]:
    """Return the pods of one pool, or of the frontend when ``pool`` is empty."""
    return [pod for pod in pods if (pod.pool == pool if pool else not pod.pool and pod.role == role)]


def asks_of(manifest: Mapping[str, Any]) -> str:
    """Return the node labels and device counts that a Deployment's pods ask for, as a part of a sentence."""
    spec = manifest["spec"]["template"].get("spec") or {}
    labels = [f"label {key}={value}" for key, value in (spec.get("nodeSelector") or {}).items()]
    devices = [
        f"{count} free {resource}"
        for container in spec.get("containers") or []
        for resource, count in ((container.get("resources") or {}).get("limits") or {}).items()
        if "/" in resource
    ]
    claims = [f"devices for claim {claim['name']}" for claim in spec.get("resourceClaims") or []]
    return ", ".join([*labels, *_asked_by_affinity(spec), *devices, *claims])


def _asked_by_affinity(spec: Mapping[str, Any]) -> list[str]:
    """Return what the required node affinity asks for: one of its terms, and of that all expressions."""
    required = ((spec.get("affinity") or {}).get("nodeAffinity") or {}).get(
        "requiredDuringSchedulingIgnoredDuringExecution"
    ) or {}
    terms = [
        " and ".join(_expression_text(expression) for expression in term.get("matchExpressions") or [])
        for term in required.get("nodeSelectorTerms") or []
    ]
    labels = [term for term in terms if term]
    if not labels:
        return []
    return [f"label {labels[0]}" if len(labels) == 1 else f"one of the labels {' or '.join(labels)}"]


def _expression_text(expression: Mapping[str, Any]) -> str:
    key, operator, values = expression.get("key"), expression.get("operator"), expression.get("values") or []
    if operator == "In" and len(values) == 1:
        return f"{key}={values[0]}"
    return str(key) if operator == "Exists" else f"{key} {operator} {','.join(map(str, values))}".strip()


def pod_problem(pod: PodView, asks: str = "") -> Blocked | None:
    """Return what keeps a pod from running, ``None`` if nothing does or it resolves itself.

    ``asks``: what its node must have, for the message.
    """
    if pod.deleting:
        return None
    if pod.waiting is not None:
        container, reason, detail = pod.waiting
        message = f"container {container} of pod {pod.name}: {detail or reason}"
        return Blocked(BAD_WAITING.get(reason, CRASH_LOOP), message)
    if pod.unschedulable:
        # Only some of the scheduler's sentences end with a full stop.
        needs = f". It needs a node with {asks}" if asks else ""
        return Blocked("Unschedulable", f"no node takes pod {pod.name}: {pod.unschedulable.rstrip('. ')}{needs}")
    return None


def _blocked(
    rollout: Rollout, manifest: Mapping[str, Any], live: DeploymentView, pods: Sequence[PodView]
) -> Blocked | None:
    if live.failure:
        return Blocked("ReplicaFailure", f"pods of {rollout.subject} cannot be created: {live.failure}")
    unavailable = strategy(manifest)[1]
    for pod in pods:
        problem = pod_problem(pod, rollout.asks)
        if problem is None or pod.template_hash != live.template_hash:
            continue
        leaving = live.total > live.updated or any(other.deleting for other in pods)
        if problem.reason == "Unschedulable" and unavailable and leaving:
            continue  # an old replica is removed first and makes room
        if problem.reason == "Unschedulable" and live.total > live.replicas:
            return Blocked(
                "NoSurgeRoom",
                f"there is no free accelerator for the surge replica of {rollout.subject}: {pod.unschedulable} "
                "Free one, or set updates.maxUnavailable to 1 and updates.maxSurge to 0",
            )
        return problem
    if live.progressing_reason == "ProgressDeadlineExceeded":
        return Blocked(
            "ProgressDeadlineExceeded",
            f"{rollout.subject} made no progress within its deadline: "
            f"{rollout.updated} of {rollout.desired} replicas updated, {live.available} available",
        )
    return None


def strategy(manifest: Mapping[str, Any]) -> tuple[int, int]:
    """Return (maxSurge, maxUnavailable) of a rendered Deployment, as numbers of replicas."""
    rolling = (manifest["spec"].get("strategy") or {}).get("rollingUpdate") or {}
    return int(rolling.get("maxSurge", 1)), int(rolling.get("maxUnavailable", 0))
