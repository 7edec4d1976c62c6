"""Judges a snapshot and a plan: the conditions of a deployment's status. Pure."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mmrouter_lib.api import MMRouterDeployment
from mmrouter_operator.model.kinds import POD_MONITOR_API
from mmrouter_operator.model.snapshot import CHILD_NAME_TAKEN, CHILD_REFUSED, Problem, Snapshot
from mmrouter_operator.planning.planner import SCALERS, RolloutPlan
from mmrouter_operator.planning.rollout_progress import Blocked, Complete, Progress, Rollout, pod_problem, pool_of
from mmrouter_operator.render import overridden
from mmrouter_operator.render.pod.kv_compatibility import mismatches
from mmrouter_operator.render.pod.pod_security_violations import violations
from mmrouter_operator.render.pod.shared_memory import is_host_path, is_shared
from mmrouter_operator.render.pod.spec_hashes import SET_ROLES
from mmrouter_operator.status import conditions as c
from mmrouter_operator.status.conditions import Condition, condition
from mmrouter_operator.status.conditions_from_gateways import gateway_accepted
from mmrouter_operator.status.conditions_from_reports import Before, devices, exact_routing, pipeline, shared_memory

COMMIT = re.compile(r"[0-9a-f]{40}")
GROUPS: Mapping[str, frozenset[str]] = {
    c.FRONTEND_READY: frozenset({"frontend"}),
    c.WORKERS_READY: frozenset({"worker", "prefill", "decode"}),
    c.ENCODERS_READY: frozenset({"encoder"}),
    c.RENDERERS_READY: frozenset({"renderer"}),
}
"""Condition -> the roles that it covers. A condition without pools is left out."""

_REQUIRED_KINDS = frozenset({"Service", "Deployment"})
_BLOCKING_REASONS = frozenset({CHILD_NAME_TAKEN, CHILD_REFUSED})


def of_rendered(
    dep: MMRouterDeployment, snapshot: Snapshot, plan: RolloutPlan, advice: Sequence[Problem], before: Before
) -> list[Condition]:
    groups = [_group(type_, [r for r in plan.rollouts if r.role in roles]) for type_, roles in GROUPS.items()]
    present = [group for group in groups if group is not None]
    staged = (pipeline(dep, snapshot, plan, before), shared_memory(dep, snapshot, before), devices(snapshot))
    return [
        _ready(plan, present),
        condition(c.SPEC_VALID, "Valid", "the resource is valid"),
        _progressing(plan),
        _degraded(_problems(snapshot, plan, advice), plan, before),
        *present,
        exact_routing(dep, snapshot, plan, before),
        *(item for item in staged if item is not None),
        *_warnings(dep, snapshot, plan, before),
    ]


def with_missing_children(plan: RolloutPlan, snapshot: Snapshot, advice: Sequence[Problem]) -> RolloutPlan:
    """Return the plan, blocked if a Service or a Deployment could not be created: waiting does not resolve it."""
    for problem in advice:
        missing = problem.kind in _REQUIRED_KINDS and (problem.kind, problem.name) not in snapshot.children
        if missing and problem.reason in _BLOCKING_REASONS and not isinstance(plan.outcome, Blocked):
            return replace(plan, outcome=Blocked(problem.reason, problem.message))
    return plan


def of_invalid(message: str) -> list[Condition]:
    message = f"the resource is not valid, so its children stay as they are: {message}"
    reasons = {c.READY: "SpecInvalid", c.SPEC_VALID: "Invalid", c.PROGRESSING: "SpecInvalid", c.DEGRADED: "SpecInvalid"}
    return [condition(type_, reason, message) for type_, reason in reasons.items()]


def of_failure(message: str) -> list[Condition]:
    return [condition(type_, "ReconcileFailed", message) for type_ in (c.READY, c.DEGRADED)]


def of_not_begun() -> list[Condition]:
    message = "spec.paused is true, and nothing was created before it was"
    return [
        condition(c.READY, "FrontendNotReady", message),
        condition(c.SPEC_VALID, "Valid", "the resource is valid"),
        condition(c.PROGRESSING, "Paused", "spec.paused is true: nothing is changed"),
    ]


def of_unusable(advice: Sequence[Problem]) -> list[Condition]:
    """Return the conditions while the deployment's own Secret is unusable, so that nothing can be rendered."""
    message = "; ".join(problem.message for problem in advice) or "the deployment's Secret does not exist yet"
    worst = advice[0].reason if advice else ""
    degraded = worst if worst in c.REASONS[c.DEGRADED] else "SecretMalformed"
    return [
        condition(c.READY, "SecretUnusable", message),
        condition(c.SPEC_VALID, "Valid", "the resource is valid"),
        condition(c.PROGRESSING, "SecretUnusable", message),
        *([condition(c.DEGRADED, degraded, message)] if advice else []),
    ]


def _ready(plan: RolloutPlan, groups: Sequence[Condition]) -> Condition:
    if isinstance(plan.outcome, Blocked) and plan.outcome.reason in _BLOCKING_REASONS:
        return condition(c.READY, "Blocked", plan.outcome.message)
    bad = [group for group in groups if group.status != "True"]
    if not bad:
        return condition(c.READY, "Serving", "every replica runs the current spec and serves")
    message = "; ".join(group.message for group in bad)
    if all(group.reason == "RollingOut" for group in bad):
        return condition(c.READY, "RollingOut", message)
    worst = next(group for group in bad if group.reason != "RollingOut")
    return condition(c.READY, worst.type.replace("Ready", "NotReady"), message)


def _progressing(plan: RolloutPlan) -> Condition:
    match plan.outcome:
        case Progress(message):
            return condition(c.PROGRESSING, "RollingOut", message)
        case Complete():
            return condition(c.PROGRESSING, "Complete", "the current spec is in effect")
        case Blocked(reason, message):
            return condition(c.PROGRESSING, reason, message)


def _group(type_: str, rollouts: Sequence[Rollout]) -> Condition | None:
    if not rollouts:
        return None
    message = "; ".join(
        f"{r.subject}: {r.available} of {r.desired} available, {r.updated} of the current version" for r in rollouts
    )
    if not any(rollout.desired for rollout in rollouts):
        return condition(type_, "ScaledToZero", f"no replicas are wanted: {message}")
    if all(rollout.complete for rollout in rollouts):
        return condition(type_, "AllReady", message)
    if all(r.available >= r.desired for r in rollouts) or any(not r.settled for r in rollouts):
        return condition(type_, "RollingOut", message)
    return condition(type_, "ReplicasMissing", message)


def _problems(snapshot: Snapshot, plan: RolloutPlan, advice: Sequence[Problem]) -> Iterator[tuple[str, str]]:
    for ref, path in snapshot.missing:
        yield c.MISSING[ref.kind], f"{path}: there is no {ref.kind} {ref.name}"
    for problem in advice:
        yield problem.reason, problem.message
    if isinstance(plan.outcome, Blocked) and plan.outcome.reason != "Paused":
        yield plan.outcome.reason, plan.outcome.message
    asks = {rollout.pool: rollout.asks for rollout in plan.rollouts}
    seen = {(rollout.blocked.reason, rollout.pool) for rollout in plan.rollouts if rollout.blocked is not None}
    for rollout in plan.rollouts:
        if rollout.blocked is not None:
            yield rollout.blocked.reason, rollout.blocked.message
    for pod in sorted(snapshot.pods, key=lambda pod: pod.name):
        trouble = pod_problem(pod, asks.get(pod.pool, ""))
        # One pod per pool is enough, and NoSurgeRoom already covers a surge replica without a node.
        if trouble is None or (trouble.reason, pod.pool) in seen or ("NoSurgeRoom", pod.pool) in seen:
            continue
        seen.add((trouble.reason, pod.pool))
        yield trouble.reason, trouble.message


def _degraded(problems: Iterator[tuple[str, str]], plan: RolloutPlan, before: Before) -> Condition:
    distinct = list(dict.fromkeys(problems))
    if distinct:
        return condition(c.DEGRADED, distinct[0][0], "; ".join(dict.fromkeys(message for _, message in distinct)))
    last = before.get(c.DEGRADED, {})
    if last.get("reason") == "SecretRecreated" and not isinstance(plan.outcome, Complete):
        # Reported once, by the reconcile that created the Secret; it ends when every pod has the new keys.
        return condition(c.DEGRADED, "SecretRecreated", str(last.get("message", "")))
    return condition(c.DEGRADED, "AsExpected", "nothing is wrong")


def _warnings(dep: MMRouterDeployment, snapshot: Snapshot, plan: RolloutPlan, before: Before) -> Iterator[Condition]:
    model = dep.spec.model
    if model.volume is None:
        if COMMIT.fullmatch(model.revision):
            yield condition(c.REVISION_PINNED, "Commit", f"model revision {model.revision}")
        else:
            yield condition(
                c.REVISION_PINNED,
                "ModelRevisionUnpinned",
                f"spec.model.revision is {model.revision!r}, which can move: pods that start at different times may "
                "load different models. Write the commit",
            )
    if any(pool.role in SET_ROLES for pool in dep.spec.pools):
        if pairs := mismatches(dep):
            message = "; ".join(pair.sentence() for pair in pairs)
            yield condition(c.COMPATIBLE, "LayoutsDiffer", f"{message}. They are not paired")
        else:
            yield condition(c.COMPATIBLE, "Compatible", "no prefill and decode pool differ in what must be equal")
    if dep.spec.frontend.api_keys is None:
        yield condition(
            c.AUTHENTICATED,
            "NoApiKeys",
            "spec.frontend.apiKeys is not set: every client may use the endpoint, and all share one cache",
        )
    else:
        yield condition(c.AUTHENTICATED, "ApiKeys", "clients need a key")
    if dep.spec.observability.pod_monitor == "Enabled":
        if not snapshot.capabilities.serves(POD_MONITOR_API):
            message = f"spec.observability.podMonitor is Enabled, and the cluster does not serve {POD_MONITOR_API}"
            yield condition(c.MONITORING, "PodMonitorUnavailable", message)
        else:
            yield condition(c.MONITORING, "Available", "PodMonitors exist")
    if (accepted := gateway_accepted(dep, snapshot)) is not None:
        yield accepted
    if dep.spec.frontend.pod_template or any(pool.pod_template for pool in dep.spec.pools):
        without_effect = overridden(dep, snapshot.config)
        if without_effect:
            message = f"fields that the operator sets itself, so they have no effect: {', '.join(without_effect)}"
            yield condition(c.OVERLAID, "FieldsOverridden", message)
        else:
            yield condition(c.OVERLAID, "Applied", "every field of the podTemplates is in effect")
    yield from _of_manifests(dep, plan, before)


def _of_manifests(dep: MMRouterDeployment, plan: RolloutPlan, before: Before) -> Iterator[Condition]:
    """Yield the conditions judged by the applied manifests. They stay unchanged if none is applied, as while paused."""
    asked = [pool.name for pool in dep.spec.pools if pool.autoscaling is not None]
    if not plan.apply:
        for type_ in (c.AUTOSCALING, c.RESTRICTED):
            yield from _unchanged(before.get(type_))
        return
    if asked:
        scaled = {pool_of(m) for m in plan.apply if m["kind"] in SCALERS}
        # While a set switches, its autoscalers are removed temporarily.
        moving = {rollout.pool for rollout in plan.rollouts if not rollout.settled and rollout.role in SET_ROLES}
        lacking = [name for name in asked if name not in scaled and name not in moving]
        if lacking:
            message = (
                f"pools {', '.join(lacking)} keep their replicas: the cluster serves neither metrics of pods nor KEDA "
                "with a configured Prometheus, or their role has no such metric"
            )
            yield condition(c.AUTOSCALING, "AutoscalingUnavailable", message)
        else:
            yield condition(c.AUTOSCALING, "Available", f"pools {', '.join(asked)} follow their load")
    violated = [
        f"{f'pool {pool_of(m)}' if pool_of(m) else 'frontend'}: {place}: {problem}"
        for m in plan.apply
        if m["kind"] == "Deployment"
        for place, problem in violations(m["spec"]["template"]["spec"])
    ]
    if violated:
        shared = is_host_path(dep) and any(is_shared(pool) for pool in dep.spec.pools)
        message = "not within the Pod Security level restricted: " + "; ".join(dict.fromkeys(violated))
        yield condition(c.RESTRICTED, "NodeSharedMemory" if shared else "BelowRestricted", message)
    else:
        yield condition(c.RESTRICTED, "Restricted", "every pod is within the Pod Security level restricted")


def _unchanged(last: Mapping[str, Any] | None) -> Iterator[Condition]:
    """Yield a condition of the previous status, also one with a reason of another release."""
    match last:
        case {
            "type": str(type_),
            "status": "True" | "False" | "Unknown" as status,
            "reason": str(reason),
            "message": str(message),
        }:
            yield Condition(type_, status, reason, message)
