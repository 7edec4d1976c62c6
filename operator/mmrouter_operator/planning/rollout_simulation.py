"""Simulates a rollout from its first step to its last, with every pod becoming ready. Pure.

The planner plans one step at a time; the simulation applies each step to the snapshot.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mmrouter_operator.model.snapshot import ChildView, DeploymentView, Snapshot
from mmrouter_operator.model.views import child_view, deployment_view, revision_view
from mmrouter_operator.planning.plan_draft import MANAGER
from mmrouter_operator.planning.planner import Blocked, Complete, Outcome, RolloutPlan, Step, plan
from mmrouter_operator.planning.rollout_progress import pool_of

ROUNDS = 10_000
"""Limit of steps; a thousand replicas that move one by one need fewer."""


@dataclass(frozen=True, slots=True)
class Simulation:
    """The rounds in order. The steps of one round happen together, and the next round waits for their pods."""

    rounds: tuple[tuple[Step, ...], ...]
    outcome: Outcome
    final: Snapshot


def simulate(desired: Sequence[dict[str, Any]], snapshot: Snapshot, revision: Mapping[str, Any] | None) -> Simulation:
    """Return every step from ``snapshot`` to ``desired``. ``revision``: a ControllerRevision that is applied first."""
    if revision is not None:
        snapshot = dataclasses.replace(snapshot, revisions=(*snapshot.revisions, revision_view(revision)))
    # The Secret is created before anything is planned.
    made = {("Secret", m["metadata"]["name"]): child_view(m) for m in desired if m["kind"] == "Secret"}
    rounds: list[tuple[Step, ...]] = []
    reported: set[Step] = set()
    for _ in range(ROUNDS):
        planned = plan(desired, snapshot)
        steps = tuple(step for step in planned.steps if step.action != "hold" or step not in reported)
        reported.update(steps)
        if steps:
            rounds.append(steps)
        after = applied(planned, dataclasses.replace(snapshot, children={**made, **snapshot.children}))
        if isinstance(planned.outcome, Complete) or (isinstance(planned.outcome, Blocked) and after == snapshot):
            return Simulation(tuple(rounds), planned.outcome, after)
        snapshot = after
    return Simulation(tuple(rounds), planned.outcome, snapshot)


def applied(planned: RolloutPlan, snapshot: Snapshot) -> Snapshot:
    """Return the snapshot after a plan was applied and every pod became ready."""
    children = dict(snapshot.children)
    for manifest in planned.apply:
        key = (manifest["kind"], manifest["metadata"]["name"])
        children[key] = _ready(manifest, children.get(key))
    for kind, name, _ in planned.prune:
        children.pop((kind, name), None)
    gone = {name for kind, name, _ in planned.prune if kind == "ControllerRevision"}
    # The snapshot's pods are replaced by others, of which only the counts are simulated.
    replaced = {pool_of(manifest) for manifest in planned.apply if manifest["kind"] == "Deployment"}
    return dataclasses.replace(
        snapshot,
        children=children,
        pods=tuple(pod for pod in snapshot.pods if pod.pool not in replaced),
        revisions=tuple(revision for revision in snapshot.revisions if revision.name not in gone),
    )


def _ready(manifest: Mapping[str, Any], before: ChildView | None) -> ChildView:
    if manifest["kind"] != "Deployment":
        return before or child_view(manifest)
    view = deployment_view(manifest)
    if "replicas" not in manifest["spec"] and isinstance(before, DeploymentView):
        view = dataclasses.replace(view, replicas=before.replicas)
    count = view.replicas
    return dataclasses.replace(
        view,
        uid="" if before is None else before.uid,
        updated=count,
        ready=count,
        available=count,
        total=count,
        progressing_reason="NewReplicaSetAvailable",
        replicas_managers=before.replicas_managers if isinstance(before, DeploymentView) else (MANAGER,),
    )
