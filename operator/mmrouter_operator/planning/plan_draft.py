"""The plan under construction, predicates that planning shares, and pools that left the spec. Pure.

To the planner, a renamed pool, or a worker pool that becomes a prefill and a decode pool, is a removed pool and a new
one. The new one takes minutes to load a model; until it serves, the old one does.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mmrouter_operator.model.kinds import POOL_LABEL
from mmrouter_operator.model.snapshot import ChildView, DeploymentView, Snapshot
from mmrouter_operator.planning.rollout_progress import STAGES, Blocked, Rollout, pool_of, strategy

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
    """Whether the name of a child belongs to an object of another owner."""
    view = snapshot.children.get((kind, name))
    return view is not None and not is_owned(snapshot, view)


def is_owned(snapshot: Snapshot, view: ChildView) -> bool:
    """Whether a child belongs to the resource.

    An object with our label and without a controller was orphaned, or lost its owner reference; it is adopted.
    """
    return view.owner in ("", snapshot.resource["metadata"].get("uid", ""))


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


def pools_kept_serving(
    deployments: Sequence[Mapping[str, Any]], snapshot: Snapshot, draft: PlanDraft
) -> list[DeploymentView]:
    """Return the Deployments of removed pools that must stay for now, and add them to the draft.

    A Deployment stays while a pool of its own stage or a later one lacks required replicas, or runs an older
    template. One without available replicas never stays. ``deployments``: as rendered, all
    of them already planned in ``draft``.
    """
    wanted = {manifest["metadata"]["name"] for manifest in draft.apply} | draft.keep | draft.drop
    wanted |= {rollout.name for rollout in draft.rollouts}
    unavailable = {pool_of(manifest): strategy(manifest)[1] for manifest in deployments}
    stay: list[DeploymentView] = []
    for view in snapshot.children.values():
        if not isinstance(view, DeploymentView) or not view.pool or view.name in wanted:
            continue
        if not is_owned(snapshot, view) or view.deleting or not view.available:
            continue
        successors = [r for r in draft.rollouts if r.pool and STAGES[r.role] >= STAGES.get(view.role, 0)]
        late = [r for r in successors if not r.settled or r.available < r.desired - unavailable[r.pool]]
        if late:
            stay.append(view)
            names = ", ".join(r.subject for r in late)
            draft.steps.append(Step("hold", "Deployment", view.name, f"it serves until {names} can"))
            draft.waits.append(f"Deployment {view.name}, whose pool is gone from the spec, serves until {names} can")
    if stay:
        draft.blocked = [_no_room(blocked, draft.rollouts, stay) for blocked in draft.blocked]
        draft.rollouts = [
            r if r.blocked is None else replace(r, blocked=_no_room(r.blocked, [r], stay)) for r in draft.rollouts
        ]
    return stay


def rendered_name(snapshot: Snapshot, view: DeploymentView) -> str:
    """Return the name that a pool's Deployment has before a generation is added to it."""
    return f"{snapshot.resource['metadata']['name']}-{view.pool}"


def _no_room(blocked: Blocked, rollouts: Sequence[Rollout], stay: Sequence[DeploymentView]) -> Blocked:
    """Return the block with the way out, if a removed pool may hold the devices that the new one needs."""
    waiting = next((r for r in rollouts if r.blocked == blocked and r.pool), None)
    if blocked.reason != "Unschedulable" or waiting is None:
        return blocked
    names = ", ".join(view.name for view in stay)
    return Blocked(
        "NoSurgeRoom",
        f"{blocked.message}. Deployment {names} of a pool that left the spec keeps its nodes until {waiting.subject} "
        f"serves: free a node, or take an outage by setting the replicas of {waiting.subject} to 0 until it is gone",
    )
