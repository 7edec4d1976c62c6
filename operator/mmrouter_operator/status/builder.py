"""Builds the status of a resource: counts, ratios and conditions with their times. Pure.

Unknown values are left out or carried over from the previous status, never invented.
"""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from mmrouter_lib.api import MMRouterDeployment, SpecError
from mmrouter_operator.model.kinds import DEPLOYMENT_LABEL, FRONTEND_ROLE, ROLE_LABEL, ROUTABLE, VERIFIED
from mmrouter_operator.model.snapshot import PodView, Problem, Snapshot
from mmrouter_operator.planning.plan_draft import is_foreign
from mmrouter_operator.planning.planner import RolloutPlan
from mmrouter_operator.planning.pod_readiness_gates import (
    all_frontends_counted,
    counted_frontends,
    counted_reports,
    is_routable,
    is_verified,
    ready_frontends,
)
from mmrouter_operator.planning.rollout_progress import Blocked, Rollout, pods_of
from mmrouter_operator.status import condition_rules as rules
from mmrouter_operator.status.conditions import Condition
from mmrouter_operator.status.conditions_from_reports import Before

Status = dict[str, Any]


def status_of(
    dep: MMRouterDeployment | SpecError,
    snapshot: Snapshot,
    plan: RolloutPlan | None,
    problems: Sequence[Problem],
    previous: Mapping[str, Any] | None,
) -> Status:
    """Return the whole status to apply.

    ``plan`` is ``None`` if the deployment's Secret is unusable; ``problems`` arose while children were written;
    ``previous`` is the resource's status.
    """
    last: Mapping[str, Any] = previous or {}
    before = {item["type"]: item for item in last.get("conditions") or []}
    if isinstance(dep, SpecError):
        phase, conditions = "Invalid", rules.of_invalid(str(dep))
    elif plan is not None:
        plan = rules.with_missing_children(plan, snapshot, problems)
        conditions = rules.of_rendered(dep, snapshot, plan, problems, before)
        body = _counts(dep, snapshot, plan) | _routing(snapshot, last)
        return _assemble(snapshot, _phase(plan, conditions), body, conditions, before, keep=False)
    elif dep.spec.paused and not problems:
        phase, conditions = "Paused", rules.of_not_begun()
    else:
        phase, conditions = "Blocked", rules.of_unusable(problems)
    return _assemble(snapshot, phase, _carried_over(last, snapshot), conditions, before, keep=True)


def status_of_failure(message: str, snapshot: Snapshot, previous: Mapping[str, Any] | None) -> Status:
    """Return the status after a bug of the operator: everything but its conditions stays as it was."""
    last: Mapping[str, Any] = previous or {}
    before = {item["type"]: item for item in last.get("conditions") or []}
    body = {key: value for key, value in last.items() if key not in ("observedGeneration", "phase", "conditions")}
    return _assemble(snapshot, "Failed", body, rules.of_failure(message), before, keep=True)


def urgent(previous: Mapping[str, Any] | None, status: Mapping[str, Any]) -> bool:
    """Whether to write a status at once: more than ratios and the wording of messages has changed."""
    return bool(_significant(previous or {}) != _significant(status))


def _assemble(
    snapshot: Snapshot,
    phase: str,
    body: Mapping[str, Any],
    conditions: Sequence[Condition],
    before: Before,
    *,
    keep: bool,
) -> Status:
    """Assemble a status. ``keep``: conditions that cannot be judged now stay, with the generation they describe."""
    generation = int(snapshot.resource["metadata"].get("generation", 0))
    shown = [_timed(item, generation, snapshot.now, before.get(item.type)) for item in conditions]
    types = {item.type for item in conditions}
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
        scheme, usual = ("http", 80) if dep.spec.frontend.tls is None else ("https", 443)
        body["endpoint"] = f"{scheme}://{host}" + ("" if port == usual else f":{port}")
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
        # No frontend has reported yet: the pod's own gates are the last known values.
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
    routing = {name: f"{min(part / whole, 1.0):.3f}" for name, (part, whole) in ratios.items() if whole > 0}
    return {"routing": routing} if routing else {}


def _carried_over(last: Mapping[str, Any], snapshot: Snapshot) -> dict[str, Any]:
    """Return the counts of the previous status, with the replicas that are ready now."""
    body = {key: last[key] for key in ("endpoint", "frontend", "poolsReady", "pools", "routing") if key in last}
    if "frontend" in body:
        body["frontend"] = {**body["frontend"], "ready": len(ready_frontends(snapshot))}
    if "pools" in body:
        body["pools"] = [
            {**pool, "ready": sum(1 for pod in pods_of(snapshot.pods, pool["name"], pool["role"]) if pod.ready)}
            for pool in body["pools"]
        ]
    return body


def _phase(plan: RolloutPlan, conditions: Sequence[Condition]) -> str:
    by_type = {item.type: item.status for item in conditions}
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


def _significant(status: Mapping[str, Any]) -> Any:
    conditions = [
        (item["type"], item["status"], item["reason"], item.get("observedGeneration"))
        for item in status.get("conditions") or []
    ]
    return {key: value for key, value in status.items() if key not in ("routing", "conditions")} | {
        "conditions": conditions
    }
