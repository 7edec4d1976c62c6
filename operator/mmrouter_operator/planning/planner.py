"""Plans the next step for one deployment. Pure: rendered manifests and a snapshot in, manifests to apply out.

Order: everything that is not a Deployment first; then the frontend, which must understand old and new engines; then
renderers, encoders, and last the engines that generate text. A *new pod template* waits until the rollout of every
earlier stage is over. Nothing else waits: not the first creation, not replicas, and not a template that pods of the
Deployment have already, which is why going back to the old spec in the middle of a rollout takes effect at once.
A pool that left the spec goes last, when what replaces it serves (``plan_draft.py``).

Within one Deployment the native rolling update moves the pods: surge, unavailability and readiness gates are
Kubernetes' own. Prefill and decode pools switch as a set (``pool_set_rollout.py``, ``pool_set_manifests.py``).
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from mmrouter_operator.model.snapshot import DeploymentView, Snapshot
from mmrouter_operator.planning.plan_draft import (
    MANAGER,
    PlanDraft,
    Step,
    child_name_taken,
    is_foreign,
    is_owned,
    live_deployment,
    pools_kept_serving,
    progress_message,
    rendered_name,
    replicas_without_autoscaler,
    with_replicas,
)
from mmrouter_operator.planning.pool_set_manifests import in_set, plan_set
from mmrouter_operator.planning.rollout_progress import (
    STAGES,
    Blocked,
    Complete,
    Outcome,
    Progress,
    Rollout,
    assess,
    pods_of,
    pool_of,
    role_of,
    strategy,
    template_hash,
)
from mmrouter_operator.planning.template_choice import stored_template, surplus_revisions

__all__ = ["STAGES", "Blocked", "Complete", "Outcome", "Progress", "Prune", "Rollout", "RolloutPlan", "Step", "plan"]

SCALERS = ("HorizontalPodAutoscaler", "ScaledObject")
_NOT_PRUNED = ("Secret", "ControllerRevision")
"""Kinds that are never in the plan's manifests. New keys restart every pod; revisions are counted apart."""


class Prune(NamedTuple):
    """A child that the operator created and that the spec no longer needs."""

    kind: str
    name: str
    uid: str


@dataclass(frozen=True, slots=True)
class RolloutPlan:
    """What to apply, in order, what to delete after that, and the progress of every Deployment."""

    outcome: Outcome
    apply: tuple[dict[str, Any], ...] = ()
    """Full manifests. The Secret is not among them: it is created before anything can be rendered."""
    prune: tuple[Prune, ...] = ()
    steps: tuple[Step, ...] = ()
    rollouts: tuple[Rollout, ...] = ()
    """The frontend's first, then the pools' in the order of the spec."""


def plan(desired: Sequence[dict[str, Any]], snapshot: Snapshot) -> RolloutPlan:
    """Return the next step from ``snapshot`` towards ``desired``, whose templates are chosen already.

    The result depends on its arguments alone, so a step that is planned twice is the same step, and a plan that is not
    carried out is planned again.
    """
    draft = PlanDraft()
    deployments = [manifest for manifest in desired if manifest["kind"] == "Deployment"]
    together = [manifest for manifest in deployments if in_set(manifest)]
    scaled = autoscaled(desired)
    switching = False
    over = True
    for stage in sorted(set(STAGES.values())):
        before = len(draft.rollouts)
        held = not over
        for manifest in deployments:
            if STAGES[role_of(manifest)] == stage and not in_set(manifest):
                _plan_deployment(manifest, snapshot, draft, held=held, scaled=manifest["metadata"]["name"] in scaled)
        if together and stage == STAGES["decode"]:
            switching = plan_set(together, snapshot, draft, held=held, scaled=scaled)
        over = over and all(rollout.settled for rollout in draft.rollouts[before:])
    pods = len(draft.steps)
    others = _others(desired, snapshot, draft, switching, {pool_of(manifest) for manifest in together})
    draft.steps = draft.steps[pods:] + draft.steps[:pods]  # in the order in which they are applied
    leaving = pools_kept_serving(deployments, snapshot, draft)
    prune = _prune([*others, *draft.apply], desired, snapshot, draft, leaving)
    order = {manifest["metadata"]["name"]: place for place, manifest in enumerate(deployments)}
    frontend_first = sorted(draft.rollouts, key=lambda rollout: (bool(rollout.pool), order.get(rollout.name, 0)))
    rollouts = tuple(frontend_first)
    if (snapshot.resource.get("spec") or {}).get("paused"):
        return RolloutPlan(Blocked("Paused", "spec.paused is true: nothing is changed"), rollouts=rollouts)
    return RolloutPlan(
        _outcome(draft, rollouts, prune),
        apply=(*others, *draft.apply),
        prune=prune,
        steps=tuple(draft.steps),
        rollouts=rollouts,
    )


def autoscaled(desired: Sequence[Mapping[str, Any]]) -> frozenset[str]:
    """Return the names of the Deployments whose replicas an autoscaler among ``desired`` decides."""
    return frozenset(manifest["spec"]["scaleTargetRef"]["name"] for manifest in desired if manifest["kind"] in SCALERS)


def _plan_deployment(
    manifest: dict[str, Any], snapshot: Snapshot, draft: PlanDraft, *, held: bool, scaled: bool
) -> None:
    name = manifest["metadata"]["name"]
    live = live_deployment(snapshot, name)
    desired = int(manifest["spec"].get("replicas", 1))
    if scaled and live is not None:
        desired = live.replicas
    elif live is not None:
        desired = replicas_without_autoscaler(manifest, snapshot, live.replicas)
    foreign = is_foreign(snapshot, "Deployment", name)
    rollout = assess(manifest, None if foreign else live, snapshot, desired)
    fixed = scaled and live is not None and any(manager != MANAGER for manager in live.replicas_managers)
    replicas = None if fixed else desired
    seen = live.resource_version if scaled and live is not None and not fixed else ""
    if foreign:
        rollout = replace(rollout, blocked=child_name_taken("Deployment", name))
    elif live is None:
        draft.apply.append(with_replicas(manifest, replicas))
        draft.steps.append(Step("create", "Deployment", name, f"{rollout.subject}: {desired} replicas"))
        draft.waits.append(f"{rollout.subject} is being created")
    elif held and _is_new(manifest, live, snapshot):
        rollout = replace(rollout, blocked=None)
        old = stored_template(snapshot.revisions, name, live.template_hash)
        if old is not None:
            spec = {**manifest["spec"], "template": old}
            draft.apply.append(with_replicas({**manifest, "spec": spec}, replicas, seen))
        else:
            draft.keep.add(name)
        if live.replicas != desired and old is not None:
            draft.steps.append(_scale(name, rollout, live, desired))
        draft.steps.append(Step("hold", "Deployment", name, f"the new {rollout.subject} waits for an earlier stage"))
        draft.waits.append(f"{rollout.subject} waits until the rollout before it is over")
    else:
        draft.apply.append(with_replicas(manifest, replicas, seen))
        if live.template_hash != template_hash(manifest):
            surge, unavailable = strategy(manifest)
            draft.steps.append(
                Step(
                    "restart",
                    "Deployment",
                    name,
                    f"{rollout.subject}: {desired} replicas, one after the other, "
                    f"{surge} more and {unavailable} fewer at a time",
                )
            )
        elif live.replicas != desired:
            draft.steps.append(_scale(name, rollout, live, desired))
        if not rollout.complete:
            draft.waits.append(progress_message(rollout))
    if rollout.blocked is not None:
        draft.blocked.append(rollout.blocked)
    draft.rollouts.append(rollout)


def _scale(name: str, rollout: Rollout, live: DeploymentView, desired: int) -> Step:
    return Step("scale", "Deployment", name, f"{rollout.subject}: {live.replicas} -> {desired} replicas")


def _is_new(manifest: Mapping[str, Any], live: DeploymentView, snapshot: Snapshot) -> bool:
    """Whether no pod of the Deployment has the template yet, and none is about to."""
    wanted = template_hash(manifest)
    pods = pods_of(snapshot.pods, pool_of(manifest), role_of(manifest))
    return live.template_hash != wanted and not any(pod.template_hash == wanted and not pod.deleting for pod in pods)


def _others(
    desired: Sequence[dict[str, Any]], snapshot: Snapshot, draft: PlanDraft, switching: bool, together: set[str]
) -> list[dict[str, Any]]:
    """Return everything but Deployments. While a set switches, its planner decides the replicas, not an autoscaler."""
    result = []
    names = {manifest["metadata"]["name"]: manifest for manifest in draft.apply}
    for manifest in desired:
        kind, name = manifest["kind"], manifest["metadata"]["name"]
        if kind == "Secret" and (kind, name) not in snapshot.children:
            draft.steps.append(Step("create", kind, name, ""))
        if kind in ("Deployment", "Secret"):
            continue
        if kind in SCALERS and pool_of(manifest) in together:
            if switching:
                continue
            manifest = _retarget(manifest, names)  # noqa: PLW2901
        if is_foreign(snapshot, kind, name):
            draft.blocked.append(child_name_taken(kind, name))
            continue
        if (kind, name) not in snapshot.children:
            draft.steps.append(Step("create", kind, name, ""))
            draft.waits.append(f"{kind} {name} is being created")
        result.append(manifest)
    return result


def _retarget(manifest: dict[str, Any], applied: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return an autoscaler of a set pool that aims at the pool's one Deployment."""
    target = next((name for name, other in applied.items() if pool_of(other) == pool_of(manifest)), None)
    if target is None:
        return manifest
    result = copy.deepcopy(manifest)
    result["spec"]["scaleTargetRef"]["name"] = target
    return result


def _prune(
    applied: Sequence[Mapping[str, Any]],
    desired: Sequence[Mapping[str, Any]],
    snapshot: Snapshot,
    draft: PlanDraft,
    leaving: Sequence[DeploymentView],
) -> tuple[Prune, ...]:
    wanted = {(manifest["kind"], manifest["metadata"]["name"]) for manifest in applied}
    wanted |= {("Deployment", name) for name in draft.keep}
    pruned = []
    for (kind, name), view in snapshot.children.items():
        if not is_owned(snapshot, view) or view.deleting or (kind, name) in wanted or kind in _NOT_PRUNED:
            continue
        if leaving and _serves_the_leaving(kind, name, snapshot, leaving):
            continue
        pruned.append(Prune(kind, name, view.uid))
        draft.steps.append(Step("delete", kind, name, "it is no longer part of the deployment"))
    running: dict[str, set[str]] = {}
    for manifest in desired:
        if manifest["kind"] == "Deployment":
            running[manifest["metadata"]["name"]] = _running(manifest, snapshot)
    for left in leaving:
        running.setdefault(rendered_name(snapshot, left), set()).add(left.template_hash)
    pruned += [Prune("ControllerRevision", r.name, r.uid) for r in surplus_revisions(snapshot, running)]
    return tuple(pruned)


def _serves_the_leaving(kind: str, name: str, snapshot: Snapshot, leaving: Sequence[DeploymentView]) -> bool:
    """Whether a child must stay as long as Deployments of removed pools do: it may belong to them."""
    if kind == "Deployment":
        return any(view.name == name for view in leaving)
    return kind not in SCALERS or any(rendered_name(snapshot, view) == name for view in leaving)


def _running(manifest: Mapping[str, Any], snapshot: Snapshot) -> set[str]:
    """Return the template hashes that live Deployments and pods of a rendered Deployment's pool still have."""
    pool, role = pool_of(manifest), role_of(manifest)
    name = manifest["metadata"]["name"]
    hashes = {pod.template_hash for pod in pods_of(snapshot.pods, pool, role)}
    for view in snapshot.children.values():
        if isinstance(view, DeploymentView) and (view.name == name or (pool and view.pool == pool)):
            hashes.add(view.template_hash)
    return hashes


def _outcome(draft: PlanDraft, rollouts: Sequence[Rollout], prune: Sequence[Prune]) -> Outcome:
    if draft.blocked:
        return draft.blocked[0]
    if draft.waits:
        return Progress("; ".join(draft.waits))
    old = [item for item in prune if item.kind != "ControllerRevision"]
    if old:
        return Progress("; ".join(f"{item.kind} {item.name} is being deleted" for item in old))
    return Complete() if all(rollout.complete for rollout in rollouts) else Progress("the last replicas start")
