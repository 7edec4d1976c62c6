"""Prefill and decode pools as one set: between manifests and the numbers of ``pool_set_rollout.py``. Pure.

Every set pool has one Deployment per generation, ``<deployment>-<pool>-<first 8 digits of the compatibility hash>``,
with the hash in its selector, so that two generations of one pool never count each other's pods. Outside of a switch
there is one, and it rolls natively like any other. While a set switches

* the planner decides all replicas: autoscalers of the set's pools are away until it is done, and the replicas that an
  autoscaled pool had are written down in the annotation ``mmrouter.io/set-target``;
* a Deployment does not surge by itself, so that there are never more pods than the set's own surge;
* the old generation keeps its template (from the kept revisions), and the new one a template that serves already.
"""

import copy
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mmrouter_operator.model.kinds import COMPATIBILITY, DEPLOYMENT_LABEL, SET_TARGET
from mmrouter_operator.model.snapshot import DeploymentView, Snapshot
from mmrouter_operator.planning import pool_set_rollout as sets
from mmrouter_operator.planning.plan_draft import (
    MANAGER,
    PlanDraft,
    Step,
    child_name_taken,
    is_foreign,
    is_owned,
    progress_message,
    replicas_without_autoscaler,
    with_replicas,
)
from mmrouter_operator.planning.rollout_progress import (
    Blocked,
    Rollout,
    assess,
    pool_of,
    role_of,
    strategy,
    template_hash,
)
from mmrouter_operator.planning.template_choice import stored_template
from mmrouter_operator.render.pod.spec_hashes import SET_ROLES

DIGITS = 8


def in_set(manifest: Mapping[str, Any]) -> bool:
    """Whether a Deployment's pods only work together with pods of equal compatibility."""
    return role_of(manifest) in SET_ROLES and bool(compatibility_of(manifest))


def compatibility_of(manifest: Mapping[str, Any]) -> str:
    """Return the label ``mmrouter.io/compatibility`` of a Deployment's pods."""
    return str((manifest["spec"]["template"]["metadata"].get("labels") or {}).get(COMPATIBILITY, ""))


def generation_name(base: str, compatibility: str) -> str:
    """Return the name of a set pool's Deployment of one generation. ``base``: its name as rendered."""
    return f"{base}-{compatibility[:DIGITS]}"


def plan_set(
    manifests: Sequence[dict[str, Any]], snapshot: Snapshot, draft: PlanDraft, *, held: bool, scaled: Iterable[str]
) -> bool:
    """Add the set's next step to the draft; return whether it is switching. ``held``: an earlier stage is not over."""
    live = _live(manifests, snapshot)
    goal = compatibility_of(manifests[0])
    pools = [_numbers(manifest, live, snapshot, goal, manifest["metadata"]["name"] in scaled) for manifest in manifests]
    # Pools whose names are all new have nothing to go on with; they are created, and that never waits.
    if held and any(pool.sides for pool in pools) and goal not in {name for _, name in live}:
        goal = sets.most_serving(pools, {name for pool in pools for name in pool.sides}, "")
        draft.waits.append("the new revision of the set waits until the rollout before it is over")
    now = sets.step(pools, goal)
    switching = not now.done
    if now.blocked:
        draft.blocked.append(Blocked("SetCannotOverlap", now.blocked))
    for pool, manifest in zip(pools, manifests, strict=True):
        generations = sorted({*pool.sides, now.towards} - now.drop, key=lambda name: name != now.towards)
        for generation in generations:
            replicas = now.replicas.get((pool.name, generation), 0)
            view = live.get((pool.name, generation))
            _apply(manifest, generation, replicas, view, snapshot, draft, held, switching, pool, scaled)
        draft.rollouts.append(_sum(manifest, live, snapshot, pool, draft, held))
    # A pool that left the spec goes with its generation: what is left of that generation may still need it.
    for (left, generation), view in live.items():
        if generation in now.drop:
            draft.drop.add(view.name)
        elif left not in {pool.name for pool in pools} and generation != goal and not now.done:
            draft.keep.add(view.name)
    for name in sorted(now.drop):
        draft.waits.append(f"the set's revision {name[:DIGITS]} is being removed")
    return switching


def _apply(
    manifest: dict[str, Any],
    generation: str,
    replicas: int,
    view: DeploymentView | None,
    snapshot: Snapshot,
    draft: PlanDraft,
    held: bool,
    switching: bool,
    pool: sets.SetPool,
    scaled: Iterable[str],
) -> None:
    base = manifest["metadata"]["name"]
    name = generation_name(base, generation)
    if is_foreign(snapshot, "Deployment", name):
        draft.blocked.append(child_name_taken("Deployment", name))
        return
    result = copy.deepcopy(manifest)
    if view is not None and _keeps_template(manifest, generation, view, held, switching):
        template = stored_template(snapshot.revisions, base, view.template_hash)
        if template is None:
            draft.keep.add(name)
            if view.replicas != replicas:
                sentence = f"the template of Deployment {name} is in no revision any more, so it cannot be scaled"
                draft.blocked.append(Blocked("RevisionLost", sentence))
            return
        result["spec"]["template"] = template
    elif compatibility_of(manifest) != generation:
        return
    result["metadata"]["name"] = name
    result["spec"]["selector"]["matchLabels"][COMPATIBILITY] = generation
    if switching:
        result["spec"]["strategy"] = {
            "type": "RollingUpdate",
            # Only a template of which nothing is ready yet is replaced in the middle of a switch.
            "rollingUpdate": {"maxSurge": 0, "maxUnavailable": "100%"},
        }
        result["metadata"].setdefault("annotations", {})[SET_TARGET] = str(pool.target)
    rests = base not in scaled or switching
    shared = view is not None and any(manager != MANAGER for manager in view.replicas_managers)
    owned = None if shared and not rests else replicas
    seen = "" if rests or view is None or owned is None else view.resource_version
    draft.apply.append(with_replicas(result, owned, seen))
    if view is None:
        draft.steps.append(Step("create", "Deployment", name, f"pool {pool.name}: {replicas} replicas"))
        draft.waits.append(f"pool {pool.name} is being created")
    elif view.replicas != replicas:
        why = f"pool {pool.name}: {view.replicas} -> {replicas} replicas"
        draft.steps.append(Step("switch" if switching else "scale", "Deployment", name, why))


def _keeps_template(
    manifest: Mapping[str, Any], generation: str, view: DeploymentView, held: bool, switching: bool
) -> bool:
    if view.template_hash == template_hash(manifest):
        return False
    if compatibility_of(manifest) != generation:
        return True
    return held or (switching and view.ready > 0)


def _live(manifests: Sequence[Mapping[str, Any]], snapshot: Snapshot) -> dict[tuple[str, str], DeploymentView]:
    """Return the set's live Deployments by pool and generation, those of pools that are gone from the spec included."""
    owner = manifests[0]["metadata"]["labels"][DEPLOYMENT_LABEL]
    live = {}
    for view in snapshot.children.values():
        if not isinstance(view, DeploymentView) or not view.compatibility or not is_owned(snapshot, view):
            continue
        if view.name == generation_name(f"{owner}-{view.pool}", view.compatibility):
            live[view.pool, view.compatibility] = view
    return live


def _numbers(
    manifest: Mapping[str, Any],
    live: Mapping[tuple[str, str], DeploymentView],
    snapshot: Snapshot,
    goal: str,
    scaled: bool,
) -> sets.SetPool:
    name = pool_of(manifest)
    views = {generation: view for (pool, generation), view in live.items() if pool == name}
    target = int(manifest["spec"].get("replicas", 1))
    if views:
        noted = [view.set_target for view in views.values() if view.set_target is not None]
        switching = any(generation != goal for _, generation in live)
        sized = max(noted) if noted and switching else sum(view.replicas for view in views.values())
        target = sized if scaled else replicas_without_autoscaler(manifest, snapshot, sized)
    surge, unavailable = strategy(manifest)
    sides = {
        generation: sets.Side(view.replicas, max(view.total, 0), min(view.available, view.replicas))
        for generation, view in views.items()
    }
    return sets.SetPool(name, role_of(manifest), target, surge, unavailable, sides)


def _sum(
    manifest: dict[str, Any],
    live: Mapping[tuple[str, str], DeploymentView],
    snapshot: Snapshot,
    pool: sets.SetPool,
    draft: PlanDraft,
    held: bool,
) -> Rollout:
    """Return where a set pool stands: updated are the replicas of the wanted generation, the rest is over all."""
    wanted = compatibility_of(manifest)
    views = {generation: view for (name, generation), view in live.items() if name == pool.name}
    view = views.pop(wanted, None)
    named = copy.deepcopy(manifest)
    named["metadata"]["name"] = generation_name(manifest["metadata"]["name"], wanted)
    rollout = assess(named, view, snapshot, pool.target)
    waits = held and (view is None or view.template_hash != template_hash(manifest)) and bool(views or view)
    rollout = dataclasses.replace(
        rollout,
        ready=rollout.ready + sum(other.ready for other in views.values()),
        available=rollout.available + sum(other.available for other in views.values()),
        total=rollout.total + sum(other.total for other in views.values()),
        settled=rollout.settled and not views,
        blocked=None if waits else rollout.blocked,
    )
    if rollout.blocked is not None:
        draft.blocked.append(rollout.blocked)
    if not rollout.complete:
        draft.waits.append(progress_message(rollout))
    return rollout
