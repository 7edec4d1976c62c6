"""Pools that left the spec: they are kept until the pools in the spec serve. Pure.

To the planner, a renamed pool, or a worker pool that becomes a prefill and a decode pool, is a removed pool and a new
one. The new one takes minutes to load a model; until it serves, the old one does.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mmrouter_operator.model.snapshot import DeploymentView, Snapshot
from mmrouter_operator.planning.plan_draft import PlanDraft, Step, is_owned
from mmrouter_operator.planning.rollout import STAGES, Blocked, Rollout, pool_of, strategy


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
