"""The plan under construction, and predicates that all parts of planning share. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mmrouter_operator.model.labels import POOL_LABEL
from mmrouter_operator.model.snapshot import ChildView, DeploymentView, Snapshot
from mmrouter_operator.planning.rollout import Blocked, Rollout

MANAGER = "mmrouter-operator"
"""Field manager of everything that is applied."""


@dataclass(frozen=True, slots=True)
class Step:
    """One change, now or later, for display."""

    action: str
    """create, restart, scale, hold, switch or delete."""
    kind: str
    name: str
    why: str


@dataclass(slots=True)
class PlanDraft:
    """A plan under construction."""

    apply: list[dict[str, Any]] = field(default_factory=list)
    """Deployments."""
    steps: list[Step] = field(default_factory=list)
    rollouts: list[Rollout] = field(default_factory=list)
    keep: set[str] = field(default_factory=set)
    """Deployments that stay although they are no longer rendered."""
    drop: set[str] = field(default_factory=set)
    """Deployments of a set's generation that is removed now, as a whole."""
    blocked: list[Blocked] = field(default_factory=list)
    waits: list[str] = field(default_factory=list)
    """What is not finished yet, in sentences."""


def live_deployment(snapshot: Snapshot, name: str) -> DeploymentView | None:
    """Return the live Deployment of that name, ``None`` if there is none."""
    view = snapshot.children.get(("Deployment", name))
    return view if isinstance(view, DeploymentView) else None


def is_foreign(snapshot: Snapshot, kind: str, name: str) -> bool:
    """Whether the name of a child belongs to an object of another owner.

    An object with our label and without a controller was orphaned, or lost its owner reference; it is adopted.
    """
    view = snapshot.children.get((kind, name))
    return view is not None and not is_owned(snapshot, view)


def is_owned(snapshot: Snapshot, view: ChildView) -> bool:
    """Whether a child belongs to the resource, or did before its reference was taken off; see :func:`is_foreign`."""
    return view.owner in ("", resource_uid(snapshot))


def resource_uid(snapshot: Snapshot) -> str:
    """Return the uid of the resource; empty for one outside of a cluster."""
    return str(snapshot.resource["metadata"].get("uid", ""))


def replicas_without_autoscaler(manifest: Mapping[str, Any], snapshot: Snapshot, live: int) -> int:
    """Return the replicas of an existing Deployment of a pool without an autoscaler.

    A pool with ``autoscaling`` whose autoscaler cannot exist (its API was removed, for example) keeps its ``live``
    replicas within its bounds: warm engines are not removed while an adapter is reinstalled.
    """
    name = (manifest["metadata"].get("labels") or {}).get(POOL_LABEL)
    for pool in (snapshot.resource.get("spec") or {}).get("pools") or []:
        scaling = pool.get("autoscaling")
        if pool.get("name") == name and scaling:
            return max(int(scaling.get("minReplicas", 1)), min(int(scaling["maxReplicas"]), live))
    return int(manifest["spec"].get("replicas", 1))


def with_replicas(manifest: Mapping[str, Any], replicas: int | None, seen: str = "") -> dict[str, Any]:
    """Return a copy of a Deployment's manifest with these replicas; ``None`` leaves the field to another manager.

    ``seen``: the resource version at which these replicas were observed. The server refuses the manifest if the object
    has changed since, so that replicas which an autoscaler sets meanwhile are not reverted.
    """
    spec = {key: value for key, value in manifest["spec"].items() if key != "replicas"}
    made = {**manifest, "spec": spec if replicas is None else {**spec, "replicas": replicas}}
    return {**made, "metadata": {**manifest["metadata"], "resourceVersion": seen}} if seen else made


def progress_message(rollout: Rollout) -> str:
    """Return the progress of a rollout, in a sentence."""
    return (
        f"{rollout.subject}: {rollout.updated} of {rollout.desired} replicas updated, {rollout.available} available"
        + (f", {rollout.total - rollout.updated} old ones left" if rollout.total > rollout.updated else "")
    )


def child_name_taken(kind: str, name: str) -> Blocked:
    """Return the outcome for a child whose name belongs to an object of another owner."""
    return Blocked(
        "ChildNameTaken",
        f"{kind} {name} is there and does not belong to this resource; it is left alone: delete or rename it",
    )
