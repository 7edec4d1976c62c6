"""A plan while it is put together, and the small questions that every part of planning asks. Pure."""

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
    """One thing that is done now or later, for people."""

    action: str
    """create, restart, scale, hold, switch or delete."""
    kind: str
    name: str
    why: str


@dataclass(slots=True)
class PlanDraft:
    """A plan while it is put together."""

    apply: list[dict[str, Any]] = field(default_factory=list)
    """Deployments."""
    steps: list[Step] = field(default_factory=list)
    rollouts: list[Rollout] = field(default_factory=list)
    keep: set[str] = field(default_factory=set)
    """Deployments that stay although they are not rendered."""
    drop: set[str] = field(default_factory=set)
    """Deployments of a set's generation that is removed now, as a whole."""
    blocked: list[Blocked] = field(default_factory=list)
    waits: list[str] = field(default_factory=list)
    """What is not finished, in sentences."""


def live_deployment(snapshot: Snapshot, name: str) -> DeploymentView | None:
    """Return the live Deployment of that name, ``None`` where there is none."""
    view = snapshot.children.get(("Deployment", name))
    return view if isinstance(view, DeploymentView) else None


def is_foreign(snapshot: Snapshot, kind: str, name: str) -> bool:
    """Whether the name of a child is held by an object that another one controls.

    An object with our label and without a controller was orphaned, or lost its owner reference; it is adopted.
    """
    view = snapshot.children.get((kind, name))
    return view is not None and not is_owned(snapshot, view)


def is_owned(snapshot: Snapshot, view: ChildView) -> bool:
    """Whether a child belongs to the resource, or did before its reference was taken off; see :func:`is_foreign`."""
    return view.owner in ("", resource_uid(snapshot))


def resource_uid(snapshot: Snapshot) -> str:
    """Return the uid of the resource; empty for one that no cluster has seen."""
    return str(snapshot.resource["metadata"].get("uid", ""))


def replicas_without_autoscaler(manifest: Mapping[str, Any], snapshot: Snapshot, live: int) -> int:
    """Return the replicas of a pool's Deployment that stands and that no autoscaler sizes.

    A pool with ``autoscaling`` whose autoscaler cannot be (its API went away, for one) keeps the ``live`` replicas,
    within its bounds: warm engines are not let go because an adapter is installed anew.
    """
    name = (manifest["metadata"].get("labels") or {}).get(POOL_LABEL)
    for pool in (snapshot.resource.get("spec") or {}).get("pools") or []:
        scaling = pool.get("autoscaling")
        if pool.get("name") == name and scaling:
            return max(int(scaling.get("minReplicas", 1)), min(int(scaling["maxReplicas"]), live))
    return int(manifest["spec"].get("replicas", 1))


def with_replicas(manifest: Mapping[str, Any], replicas: int | None, seen: str = "") -> dict[str, Any]:
    """Return a copy of a Deployment's manifest with these replicas; ``None`` leaves the field to another manager.

    ``seen``: the resource version at which these replicas were seen. The server refuses the manifest when the object
    has changed since, so that replicas which an autoscaler sets meanwhile are not set back.
    """
    spec = {key: value for key, value in manifest["spec"].items() if key != "replicas"}
    made = {**manifest, "spec": spec if replicas is None else {**spec, "replicas": replicas}}
    return {**made, "metadata": {**manifest["metadata"], "resourceVersion": seen}} if seen else made


def progress_message(rollout: Rollout) -> str:
    """Return where a rollout stands, in a sentence."""
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
