"""Everything known about one deployment at one moment, as typed views of a few fields per object. Pure.

The watch caches keep these views instead of whole objects. A child that cannot be written becomes a :class:`Problem`
for the status, not an exception.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mmrouter_operator.model.config import OperatorConfig
from mmrouter_operator.model.credentials import SecretData
from mmrouter_operator.model.external_refs import Reference
from mmrouter_operator.model.kinds import Capabilities

Key = tuple[str, str]
"""Namespace and name of a deployment: what the queue holds."""


@dataclass(frozen=True, slots=True)
class ChildView:
    """Any child. ``owner`` is the controlling owner's uid. Views that differ in the version alone are equal."""

    kind: str
    name: str
    uid: str
    resource_version: str = field(compare=False)
    owner: str
    generation: int = 0
    deleting: bool = False


@dataclass(frozen=True, slots=True)
class DeploymentView(ChildView):
    """A Deployment's counts. ``progressing_reason``: the reason of the Deployment's condition Progressing."""

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
    """Annotation ``mmrouter.io/rendering-hash`` of its pod template, which identifies the template exactly."""
    compatibility: str = ""
    """Label ``mmrouter.io/compatibility`` of its pods: the revision of its pool set (``pool_set_rollout.py``)."""
    set_target: int | None = None
    """Annotation ``mmrouter.io/set-target``: replicas that an autoscaled pool had when its set began to switch."""


@dataclass(frozen=True, slots=True)
class GatewayReport:
    """The conditions that one gateway reports on an InferencePool or an HTTPRoute of the deployment."""

    gateway: str
    """``namespace/name``, with ``/section`` behind it where the route names one listener."""
    accepted: bool = False
    refused: str = ""
    """Which condition is False and why; empty while nothing is refused."""


@dataclass(frozen=True, slots=True)
class GatewayChildView(ChildView):
    """An InferencePool or an HTTPRoute."""

    reports: tuple[GatewayReport, ...] = ()
    """The gateways' reports on the object's current generation."""


@dataclass(frozen=True, slots=True)
class PodView:
    """One pod of a pool or of the frontend."""

    name: str
    namespace: str
    uid: str
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
    gates: Mapping[str, bool] = field(default_factory=dict)
    """Readiness gates of the spec -> whether the condition is True now."""
    gate_times: Mapping[str, str] = field(default_factory=dict)
    """Readiness gates that have a condition -> the time of its last transition, as the API writes it."""
    unschedulable: str = ""
    """The scheduler's message while no node fits the pod."""
    waiting: tuple[str, str, str] | None = None
    """(container, reason, message) of the first container that waits for a bad reason: ImagePullBackOff,
    CreateContainerConfigError, CrashLoopBackOff... CrashLoopBackOff stays until the container is ready."""


@dataclass(frozen=True, slots=True)
class SharedReport:
    """Memory that a pod shares with others of its node. ``above``: too full for further hand-overs."""

    above: bool = False
    limit: int = 0
    """Bytes that it may hold."""


@dataclass(frozen=True, slots=True)
class DeviceReport:
    """PyTorch's type of the device that an engine computes on, and of the one that its pool asks for."""

    actual: str = ""
    requested: str = ""


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """One frontend's report on one engine pod."""

    role: str
    routable: bool = False
    verified: str = "Unknown"
    """True, False or Unknown."""
    cause: str = ""
    message: str = ""
    shared: SharedReport | None = None
    """Set for a pod that shares its node's memory, after the first pass of its sidecar's janitor."""
    device: DeviceReport | None = None
    """Set for an engine that reports its device."""


@dataclass(frozen=True, slots=True)
class FrontendReport:
    """The last report of one frontend's control stream; the counts only grow while the router lives."""

    router: str
    ready: bool
    workers: Mapping[str, WorkerReport]
    decisions: int = 0
    exact_decisions: int = 0
    prompt_blocks: int = 0
    hit_blocks: int = 0
    degraded: tuple[str, ...] | None = None
    """Missing stages, like ``no_encoder``; ``None`` if the frontend does not report them."""


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
    """The inputs of a reconcile. ``reports``: frontend pod uid -> its last report, ``None`` without one."""

    resource: Mapping[str, Any]
    now: float
    children: Mapping[tuple[str, str], ChildView] = field(default_factory=dict)
    """(kind, name) -> view; Deployments are :class:`DeploymentView`, InferencePools and HTTPRoutes
    :class:`GatewayChildView`."""
    pods: tuple[PodView, ...] = ()
    reports: Mapping[str, FrontendReport | None] = field(default_factory=dict)
    secrets: SecretData | None = None
    missing: tuple[Reference, ...] = ()
    """Objects that the resource refers to and that do not exist."""
    revisions: tuple[RevisionView, ...] = ()
    capabilities: Capabilities = field(default_factory=Capabilities)
    config: OperatorConfig = field(default_factory=OperatorConfig)
    """The site's settings, with which the children are rendered."""
    listening_since: float = 0.0
    """When this process began to read the frontends' streams, seconds since the epoch; 0: long ago."""


CHILD_NAME_TAKEN = "ChildNameTaken"
"""An object of that name has another owner; the operator does not change it."""
CHILD_REFUSED = "ChildRefused"
"""The API server refuses the child: a quota, an admission policy, an overlay that makes it invalid."""
CHILD_CONTESTED = "ChildContested"
"""Another writer keeps changing a field that the operator sets; the operator repairs it with growing pauses."""
SECRET_MALFORMED = "SecretMalformed"  # noqa: S105 - a reason's name
"""The deployment's Secret lacks an entry or holds an invalid one; the operator does not overwrite it."""
SECRET_RECREATED = "SecretRecreated"  # noqa: S105
"""The deployment's Secret was deleted and is created again: all pods restart."""


@dataclass(frozen=True, slots=True)
class Problem:
    """``reason`` is one of the above; ``message`` is a sentence for people."""

    reason: str
    kind: str
    name: str
    message: str
