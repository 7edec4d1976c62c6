"""The status of a resource: counts, ratios and conditions with their times. Pure.

What cannot be known is left out or carried over from the status before, never invented.
"""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from mmrouter_lib.api import MMRouterDeployment, SpecError
from mmrouter_operator.model.labels import DEPLOYMENT_LABEL, FRONTEND_ROLE, ROLE_LABEL, ROUTABLE, VERIFIED
from mmrouter_operator.model.problems import Problem
from mmrouter_operator.model.snapshot import PodView, Snapshot
from mmrouter_operator.planning.plan_draft import is_foreign
from mmrouter_operator.planning.planner import RolloutPlan
from mmrouter_operator.planning.readiness_gates import (
    all_frontends_counted,
    counted_frontends,
    counted_reports,
    is_routable,
    is_verified,
    ready_frontends,
)
from mmrouter_operator.planning.rollout import Blocked, Rollout, pods_of
from mmrouter_operator.status import condition_rules as verdicts
from mmrouter_operator.status.conditions import Condition
from mmrouter_operator.status.transitions import Transition, transitions

__all__ = ["Transition", "status_of", "status_of_failure", "transitions", "urgent"]

Status = dict[str, Any]


def status_of(
    dep: MMRouterDeployment | SpecError,
    snapshot: Snapshot,
    plan: RolloutPlan | None,
    advice: Sequence[Problem],
    previous: Mapping[str, Any] | None,
) -> Status:
    """Return the whole status to apply.

    ``plan`` is ``None`` when the deployment's Secret is of no use; ``advice`` is what went wrong while children were
    written; ``previous`` is the status that the resource has.
    """
    last: Mapping[str, Any] = previous or {}
    before = {item["type"]: item for item in last.get("conditions") or []}
    if isinstance(dep, SpecError):
        found = verdicts.of_invalid(str(dep))
        return _assemble(snapshot, "Invalid", _still(last, snapshot), found, before, keep=True)
    if plan is None and dep.spec.paused and not advice:
        return _assemble(snapshot, "Paused", _still(last, snapshot), verdicts.of_not_begun(), before, keep=True)
    if plan is None:
        return _assemble(snapshot, "Blocked", _still(last, snapshot), verdicts.of_unusable(advice), before, keep=True)
    plan = verdicts.with_what_is_lacking(plan, snapshot, advice)
    found = verdicts.of_valid(dep, snapshot, plan, advice, before)
    body = _counts(dep, snapshot, plan) | _routing(snapshot, last)
    return _assemble(snapshot, _phase(plan, found), body, found, before, keep=False)


def status_of_failure(message: str, snapshot: Snapshot, previous: Mapping[str, Any] | None) -> Status:
    """Return the status of a resource at which the operator itself failed, so that nothing new is known of it."""
    last: Mapping[str, Any] = previous or {}
    before = {item["type"]: item for item in last.get("conditions") or []}
    body = {key: value for key, value in last.items() if key not in ("observedGeneration", "phase", "conditions")}
    return _assemble(snapshot, "Failed", body, verdicts.of_failure(message), before, keep=True)


def urgent(previous: Mapping[str, Any] | None, status: Mapping[str, Any]) -> bool:
    """Whether a status is to be written at once: more than ratios and the wording of messages has changed."""
    return bool(_essence(previous or {}) != _essence(status))


def _assemble(
    snapshot: Snapshot,
    phase: str,
    body: Mapping[str, Any],
    found: Sequence[Condition],
    before: verdicts.Before,
    *,
    keep: bool,
) -> Status:
    """Put a status together. ``keep``: conditions that cannot be judged now stay, with the generation they speak of."""
    generation = int(snapshot.resource["metadata"].get("generation", 0))
    shown = [_timed(item, generation, snapshot.now, before.get(item.type)) for item in found]
    types = {item.type for item in found}
    if keep:
        shown += [dict(item) for type_, item in before.items() if type_ not in types]
    return {"observedGeneration": generation, "phase": phase, **body, "conditions": shown}


def _timed(item: Condition, generation: int, now: float, last: Mapping[str, Any] | None) -> dict[str, Any]:
    same = last is not None and last.get("status") == item.status and last.get("lastTransitionTime")
    since = last["lastTransitionTime"] if last is not None and same else _timestamp(now)
    return {
        "type": item.type,
        "status": item.status,
        "observedGeneration": generation,
        "lastTransitionTime": since,
        "reason": item.reason,
        "message": item.message,
    }


def _timestamp(seconds: float) -> str:
    return datetime.fromtimestamp(int(seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _counts(dep: MMRouterDeployment, snapshot: Snapshot, plan: RolloutPlan) -> dict[str, Any]:
    by_pool = {rollout.pool: rollout for rollout in plan.rollouts}
    frontend = by_pool.get("")
    pools = [
        _pool(pool.name, pool.role, by_pool[pool.name], snapshot) for pool in dep.spec.pools if pool.name in by_pool
    ]
    serving = sum(1 for r in plan.rollouts if r.pool and r.desired == r.available and r.current)
    port = dep.spec.frontend.service.port
    host = f"{dep.metadata.name}.{dep.metadata.namespace}.svc"
    body: dict[str, Any] = {}
    if not is_foreign(snapshot, "Service", dep.metadata.name) and ("Service", dep.metadata.name) in snapshot.children:
        body["endpoint"] = f"http://{host}" + ("" if port == 80 else f":{port}")
    if frontend is not None:
        selector = f"{DEPLOYMENT_LABEL}={dep.metadata.name},{ROLE_LABEL}={FRONTEND_ROLE}"
        counts = {"desired": frontend.desired, "ready": frontend.ready, "updated": frontend.updated}
        body["frontend"] = {**counts, "selector": selector}
    return {**body, "poolsReady": f"{serving}/{len(pools)}", "pools": pools}


def _pool(name: str, role: str, rollout: Rollout, snapshot: Snapshot) -> dict[str, Any]:
    pods = [pod for pod in pods_of(snapshot.pods, name, role) if not pod.deleting and pod.containers_ready]
    return {
        "name": name,
        "role": role,
        "desired": rollout.desired,
        "ready": rollout.ready,
        "routable": sum(1 for pod in pods if _holds(ROUTABLE, pod, snapshot)),
        "verified": sum(1 for pod in pods if _holds(VERIFIED, pod, snapshot)),
        "updated": rollout.updated,
    }


def _holds(gate: str, pod: PodView, snapshot: Snapshot) -> bool:
    if not counted_frontends(snapshot):
        # Nobody has spoken yet: what was written on the pod is the last that is known.
        return pod.gates.get(gate, False)
    reports = counted_reports(pod, snapshot)
    return is_routable(reports) if gate == ROUTABLE else is_verified(reports)


def _routing(snapshot: Snapshot, last: Mapping[str, Any]) -> dict[str, Any]:
    if not all_frontends_counted(snapshot):
        return {"routing": last["routing"]} if last.get("routing") else {}
    reports = [report for report in snapshot.reports.values() if report is not None]
    ratios = {
        "exactRatio": (sum(r.exact_decisions for r in reports), sum(r.decisions for r in reports)),
        "hitRatio": (sum(r.hit_blocks for r in reports), sum(r.prompt_blocks for r in reports)),
    }
    known = {name: f"{min(part / whole, 1.0):.3f}" for name, (part, whole) in ratios.items() if whole > 0}
    return {"routing": known} if known else {}


def _still(last: Mapping[str, Any], snapshot: Snapshot) -> dict[str, Any]:
    """Return the status before with the replicas that are ready now: what runs goes on running."""
    body = {key: last[key] for key in ("endpoint", "frontend", "poolsReady", "pools", "routing") if key in last}
    if "frontend" in body:
        body["frontend"] = {**body["frontend"], "ready": len(ready_frontends(snapshot))}
    if "pools" in body:
        body["pools"] = [
            {**pool, "ready": sum(1 for pod in pods_of(snapshot.pods, pool["name"], pool["role"]) if pod.ready)}
            for pool in body["pools"]
        ]
    return body


def _phase(plan: RolloutPlan, found: Sequence[Condition]) -> str:
    by_type = {item.type: item.status for item in found}
    if isinstance(plan.outcome, Blocked) and plan.outcome.reason == "Paused":
        return "Paused"
    if by_type["Ready"] == "True":
        return "Degraded" if by_type["Degraded"] == "True" else "Ready"
    if isinstance(plan.outcome, Blocked):
        return "Blocked"
    frontend = [rollout for rollout in plan.rollouts if not rollout.pool]
    engines = [rollout for rollout in plan.rollouts if rollout.pool]
    serves = any(r.available for r in frontend) and any(r.available for r in engines)
    return "Updating" if serves else "Starting"


def _essence(status: Mapping[str, Any]) -> Any:
    told = [
        (item["type"], item["status"], item["reason"], item.get("observedGeneration"))
        for item in status.get("conditions") or []
    ]
    return {key: value for key, value in status.items() if key not in ("routing", "conditions")} | {"conditions": told}
