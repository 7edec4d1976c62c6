"""What the operator knows of one deployment at one moment, typed. Pure: raw objects in, small views out.

Views are what the watch caches keep: a few fields per object, never bodies.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from mmrouter_operator.model.capabilities import Capabilities
from mmrouter_operator.model.config import OperatorConfig
from mmrouter_operator.render.common import DEPLOYMENT_LABEL, POOL_LABEL, ROLE_LABEL
from mmrouter_operator.render.secret import SecretData

Key = tuple[str, str]
"""Namespace and name of a deployment: what the queue holds."""

RENDERING_HASH = "mmrouter.io/rendering-hash"
"""Annotation of a pod template: the hash of its content, set when it is chosen (``revisions.py``)."""
COMPATIBILITY = "mmrouter.io/compatibility"
SET_TARGET = "mmrouter.io/set-target"
ROUTABLE = "mmrouter.io/routable"
VERIFIED = "mmrouter.io/verified"


@dataclass(frozen=True, slots=True)
class ChildView:
    """Any child. ``owner`` is the controlling owner's uid; ``applied`` our hash annotation of what was applied."""

    kind: str
    name: str
    namespace: str
    uid: str
    resource_version: str
    owner: str
    generation: int = 0
    deleting: bool = False


@dataclass(frozen=True, slots=True)
class DeploymentView(ChildView):
    """A Deployment's counts. ``progressing_reason``: of its own condition Progressing."""

    replicas: int = 0
    observed_generation: int = 0
    updated: int = 0
    ready: int = 0
    available: int = 0
    total: int = 0
    progressing_reason: str = ""
    failure: str = ""
    """Message of the condition ReplicaFailure, when pods cannot be created."""
    replicas_managers: tuple[str, ...] = ()
    """Field managers that own ``spec.replicas``."""
    pool: str = ""
    role: str = ""
    template_hash: str = ""
    """Annotation ``mmrouter.io/rendering-hash`` of its pod template: which template it is, to the letter."""
    compatibility: str = ""
    """Label ``mmrouter.io/compatibility`` of its pods: which revision of a set it is (``sets.py``)."""
    set_target: int | None = None
    """Annotation ``mmrouter.io/set-target``: replicas that an autoscaled pool had when its set began to switch."""


@dataclass(frozen=True, slots=True)
class PodView:
    """One pod of a pool or of the frontend."""

    name: str
    namespace: str
    uid: str
    deployment: str
    """Label ``mmrouter.io/deployment``."""
    pool: str
    """Label ``mmrouter.io/pool``; empty for a frontend."""
    role: str
    ip: str = ""
    node: str = ""
    phase: str = "Pending"
    ready: bool = False
    containers_ready: bool = False
    """Condition ContainersReady: everything but the readiness gates."""
    deleting: bool = False
    created: float = 0.0
    """Seconds since the epoch."""
    started: float | None = None
    """When its containers became ready (transition of ContainersReady), seconds since the epoch."""
    template_hash: str = ""
    compatibility: str = ""
    gates: Mapping[str, bool] = field(default_factory=dict)
    """Readiness gates of the spec -> whether the condition is True now."""
    gate_times: Mapping[str, str] = field(default_factory=dict)
    """Readiness gates that have a condition -> when it became what it is, as the API writes it."""
    unschedulable: str = ""
    """The scheduler's message, while it finds no node."""
    waiting: tuple[str, str, str] | None = None
    """(container, reason, message) of the first container that waits for a bad reason: ImagePullBackOff,
    CreateContainerConfigError, CrashLoopBackOff... The last one stands from crash to crash, until it is ready."""


@dataclass(frozen=True, slots=True)
class SharedReport:
    """The memory that a pod shares with others of its node. ``above``: so full that nothing more is handed over."""

    above: bool = False
    limit: int = 0
    """Bytes that it may hold."""


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """What one frontend says of one engine pod."""

    uid: str
    pool: str
    role: str
    routable: bool = False
    verified: str = "Unknown"
    """True, False or Unknown."""
    cause: str = ""
    message: str = ""
    draining: bool = False
    shared: SharedReport | None = None
    """Of a pod that shares its node's memory, once its sidecar has looked at it."""


@dataclass(frozen=True, slots=True)
class FrontendReport:
    """What one frontend's control stream said last; the counts only grow while the router lives."""

    router: str
    ready: bool
    workers: Mapping[str, WorkerReport]
    decisions: int = 0
    exact_decisions: int = 0
    prompt_blocks: int = 0
    hit_blocks: int = 0
    degraded: tuple[str, ...] | None = None
    """Stages that its requests go without, as ``no_encoder``; ``None`` of a frontend that does not tell them."""


@dataclass(frozen=True, slots=True)
class Missing:
    """An object that the resource names and that is not there. ``path``: the field that names it."""

    kind: str
    name: str
    path: str


@dataclass(frozen=True, slots=True)
class RevisionView:
    """A ControllerRevision: pod templates by Deployment name, as they were rendered and applied."""

    name: str
    number: int
    data: Mapping[str, Any]
    uid: str = ""
    owner: str = ""
    """Uid of its controlling owner; empty for one that was orphaned."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything that a reconcile looks at. ``reports``: frontend pod uid -> its last report, ``None`` if not heard."""

    resource: Mapping[str, Any]
    now: float
    children: Mapping[tuple[str, str], ChildView] = field(default_factory=dict)
    """(kind, name) -> view; Deployments are :class:`DeploymentView`."""
    pods: tuple[PodView, ...] = ()
    reports: Mapping[str, FrontendReport | None] = field(default_factory=dict)
    secrets: SecretData | None = None
    missing: tuple[Missing, ...] = ()
    revisions: tuple[RevisionView, ...] = ()
    capabilities: Capabilities = field(default_factory=Capabilities)
    config: OperatorConfig = field(default_factory=OperatorConfig)
    """What the site told the operator, as it was rendered with."""
    listening_since: float = 0.0
    """When this process began to follow the deployment's frontends, seconds since the epoch; 0 for long ago."""


CRASH_LOOP = "CrashLoopBackOff"
RESTARTS = 2
"""Restarts from which a container that is not ready counts as one that ends again and again, also while it runs and
in the minute for which the kubelet shows its end before it tells of the back-off."""
LONGEST_WORDS = 200
"""Characters of what a container said last."""

BAD_WAITING = frozenset(
    {
        "ImagePullBackOff",
        "ErrImagePull",
        "InvalidImageName",
        "ErrImageNeverPull",
        "CreateContainerConfigError",
        "CreateContainerError",
        "RunContainerError",
        CRASH_LOOP,
    }
)
"""Reasons of a waiting container that do not pass by themselves; ContainerCreating and PodInitializing do."""


def child_view(obj: Mapping[str, Any]) -> ChildView:
    """Return the view of any child as the API server returns it; a Deployment's is a :class:`DeploymentView`."""
    if obj.get("kind") == "Deployment":
        return deployment_view(obj)
    return ChildView(**_identity(obj))


def deployment_view(obj: Mapping[str, Any]) -> DeploymentView:
    """Return the view of an ``apps/v1`` Deployment. Counts that the API leaves out are 0; replicas default to 1."""
    spec, status = obj.get("spec") or {}, obj.get("status") or {}
    template = _metadata(spec.get("template") or {})
    conditions = _by_type(status)
    failure = conditions.get("ReplicaFailure", {})
    own = _metadata(obj)
    target = own["annotations"].get(SET_TARGET, "")
    return DeploymentView(
        **_identity(obj),
        replicas=spec.get("replicas", 1),
        observed_generation=status.get("observedGeneration", 0),
        updated=status.get("updatedReplicas", 0),
        ready=status.get("readyReplicas", 0),
        available=status.get("availableReplicas", 0),
        total=status.get("replicas", 0),
        progressing_reason=conditions.get("Progressing", {}).get("reason", ""),
        failure=failure.get("message", "") if failure.get("status") == "True" else "",
        replicas_managers=_replicas_managers(obj),
        pool=own["labels"].get(POOL_LABEL, ""),
        role=own["labels"].get(ROLE_LABEL, ""),
        template_hash=template["annotations"].get(RENDERING_HASH, ""),
        compatibility=template["labels"].get(COMPATIBILITY, ""),
        set_target=int(target) if target.isdecimal() else None,
    )


def pod_view(obj: Mapping[str, Any]) -> PodView:
    """Return the view of a pod."""
    metadata, spec, status = obj["metadata"], obj.get("spec") or {}, obj.get("status") or {}
    marks = _metadata(obj)
    conditions = _by_type(status)
    containers_ready = conditions.get("ContainersReady", {})
    scheduled = conditions.get("PodScheduled", {})
    stuck = scheduled.get("status") == "False" and scheduled.get("reason") == "Unschedulable"
    gates = [gate["conditionType"] for gate in spec.get("readinessGates") or []]
    return PodView(
        name=metadata["name"],
        namespace=metadata.get("namespace", ""),
        uid=metadata.get("uid", ""),
        deployment=marks["labels"].get(DEPLOYMENT_LABEL, ""),
        pool=marks["labels"].get(POOL_LABEL, ""),
        role=marks["labels"].get(ROLE_LABEL, ""),
        ip=status.get("podIP", ""),
        node=spec.get("nodeName", ""),
        phase=status.get("phase", "Pending"),
        ready=_is_true(conditions.get("Ready")),
        containers_ready=_is_true(containers_ready),
        deleting="deletionTimestamp" in metadata,
        created=_seconds(metadata.get("creationTimestamp")) or 0.0,
        started=_seconds(containers_ready.get("lastTransitionTime")) if _is_true(containers_ready) else None,
        template_hash=marks["annotations"].get(RENDERING_HASH, ""),
        compatibility=marks["labels"].get(COMPATIBILITY, ""),
        gates={gate: _is_true(conditions.get(gate)) for gate in gates},
        gate_times={gate: time for gate in gates if (time := conditions.get(gate, {}).get("lastTransitionTime"))},
        unschedulable=scheduled.get("message", "") if stuck else "",
        waiting=_waiting(status),
    )


def revision_view(obj: Mapping[str, Any]) -> RevisionView:
    """Return the view of a ControllerRevision of ours."""
    identity = _identity({"kind": "ControllerRevision", **obj})
    return RevisionView(
        identity["name"], obj.get("revision", 0), obj.get("data") or {}, identity["uid"], identity["owner"]
    )


def _identity(obj: Mapping[str, Any]) -> dict[str, Any]:
    metadata = obj["metadata"]
    owners = metadata.get("ownerReferences") or []
    return {
        "kind": obj["kind"],
        "name": metadata["name"],
        "namespace": metadata.get("namespace", ""),
        "uid": metadata.get("uid", ""),
        "resource_version": metadata.get("resourceVersion", ""),
        "owner": next((owner["uid"] for owner in owners if owner.get("controller")), ""),
        "generation": metadata.get("generation", 0),
        "deleting": "deletionTimestamp" in metadata,
    }


def _metadata(obj: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    metadata = obj.get("metadata") or {}
    return {"labels": metadata.get("labels") or {}, "annotations": metadata.get("annotations") or {}}


def _by_type(status: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return {condition["type"]: condition for condition in status.get("conditions") or []}


def _is_true(condition: Mapping[str, Any] | None) -> bool:
    return condition is not None and condition.get("status") == "True"


def _replicas_managers(obj: Mapping[str, Any]) -> tuple[str, ...]:
    entries = obj["metadata"].get("managedFields") or []
    owners = (e for e in entries if "f:replicas" in ((e.get("fieldsV1") or {}).get("f:spec") or {}))
    return tuple(dict.fromkeys(entry.get("manager", "") for entry in owners))


def _waiting(status: Mapping[str, Any]) -> tuple[str, str, str] | None:
    for kind in ("initContainerStatuses", "containerStatuses"):
        for container in status.get(kind) or []:
            waiting = (container.get("state") or {}).get("waiting") or {}
            reason, message = waiting.get("reason"), waiting.get("message", "")
            if reason == CRASH_LOOP or _starts_again(container):
                return container["name"], CRASH_LOOP, _ended(container) or message
            if reason in BAD_WAITING:
                return container["name"], reason, message
    return None


def _starts_again(container: Mapping[str, Any]) -> bool:
    """Whether a container that runs now, or has just failed, has ended so often that a start is no sign of recovery."""
    state = container.get("state") or {}
    between = "running" in state or bool((state.get("terminated") or {}).get("exitCode"))
    often = container.get("restartCount", 0) >= RESTARTS
    return between and often and not container.get("ready") and _ended(container) != ""


def _ended(container: Mapping[str, Any]) -> str:
    state, before = container.get("state") or {}, container.get("lastState") or {}
    last = state.get("terminated") or before.get("terminated") or {}
    if not last:
        return ""
    reason = f" {last['reason']}" if last.get("reason") not in (None, "", "Error") else ""
    words = _last_words(last.get("message") or "")
    return f"restarted {container.get('restartCount', 0)} times, last: exit {last.get('exitCode', 0)}{reason}{words}"


def _last_words(message: str) -> str:
    """Return the last line of a message that may be the end of a log; `kubectl logs --previous` has more."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return f": {lines[-1][:LONGEST_WORDS]}" if lines else ""


def _seconds(timestamp: str | None) -> float | None:
    return datetime.fromisoformat(timestamp).timestamp() if timestamp else None
