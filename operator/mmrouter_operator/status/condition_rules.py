"""The conditions of a deployment: what was observed, judged. Pure; the words are in ``conditions.py``."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mmrouter_lib.api import MMRouterDeployment
from mmrouter_operator.model.problems import CHILD_NAME_TAKEN, CHILD_REFUSED, Problem
from mmrouter_operator.model.snapshot import Snapshot
from mmrouter_operator.planning.planner import RolloutPlan
from mmrouter_operator.planning.readiness_gates import counted_frontends, counted_reports, is_verified, ready_frontends
from mmrouter_operator.planning.rollout import Blocked, Complete, Progress, Rollout, pod_problem, pool_of
from mmrouter_operator.render import overridden
from mmrouter_operator.render.kv_layouts import unequal
from mmrouter_operator.render.pod.pod_security import violations
from mmrouter_operator.render.pod.template_inputs import SET_ROLES
from mmrouter_operator.render.podmonitor import podmonitor_unavailable
from mmrouter_operator.status import conditions as c
from mmrouter_operator.status.conditions import Condition, condition
from mmrouter_operator.status.pipeline_condition import of_chain
from mmrouter_operator.status.shared_memory_condition import of_pressure

COMMIT = re.compile(r"[0-9a-f]{40}")
GROUPS: Mapping[str, frozenset[str]] = {
    c.FRONTEND_READY: frozenset({"frontend"}),
    c.WORKERS_READY: frozenset({"worker", "prefill", "decode"}),
    c.ENCODERS_READY: frozenset({"encoder"}),
    c.RENDERERS_READY: frozenset({"renderer"}),
}
"""Condition -> roles that it speaks of. One without pools is left out."""

_NOT_READY = {
    c.FRONTEND_READY: "FrontendNotReady",
    c.WORKERS_READY: "WorkersNotReady",
    c.ENCODERS_READY: "EncodersNotReady",
    c.RENDERERS_READY: "RenderersNotReady",
}
_NEEDED = frozenset({"Service", "Deployment"})
_STOPS = frozenset({CHILD_NAME_TAKEN, CHILD_REFUSED})
_LONGEST = 4000
"""Characters of a message: what does not fit is the tenth pod with the same trouble."""

Before = Mapping[str, Mapping[str, Any]]
"""The conditions of the status before, by type."""


def of_valid(
    dep: MMRouterDeployment, snapshot: Snapshot, plan: RolloutPlan, advice: Sequence[Problem], before: Before
) -> list[Condition]:
    """Return the conditions of a resource that could be rendered."""
    groups = [_group(type_, [r for r in plan.rollouts if r.role in roles]) for type_, roles in GROUPS.items()]
    present = [group for group in groups if group is not None]
    degraded = _degraded(_problems(snapshot, plan, advice), plan, before)
    exact = _exact(dep, snapshot, plan, before)
    chain = of_chain(dep, snapshot, plan, before.get(c.CHAIN))
    pressure = of_pressure(dep, snapshot, before.get(c.PRESSURE))
    shown = [
        _ready(plan, present),
        condition(c.SPEC_VALID, "Valid", "the resource is valid"),
        _progressing(plan),
        degraded,
        *present,
        exact,
        *(item for item in (chain, pressure) if item is not None),
        *_warnings(dep, snapshot, plan, before),
    ]
    return [_bounded(item) for item in shown]


def with_what_is_lacking(plan: RolloutPlan, snapshot: Snapshot, advice: Sequence[Problem]) -> RolloutPlan:
    """Return the plan, blocked if a Service or a Deployment could not be made: waiting alone would not bring it."""
    for problem in advice:
        lacks = problem.kind in _NEEDED and (problem.kind, problem.name) not in snapshot.children
        if lacks and problem.reason in _STOPS and not isinstance(plan.outcome, Blocked):
            return replace(plan, outcome=Blocked(problem.reason, problem.message))
    return plan


def of_invalid(message: str) -> list[Condition]:
    """Return the conditions that can be told of a resource that cannot be read or rendered."""
    said = f"the resource is not valid, so its children stay as they are: {message}"
    return [
        _bounded(item)
        for item in (
            condition(c.READY, "SpecInvalid", said),
            condition(c.SPEC_VALID, "Invalid", message),
            condition(c.PROGRESSING, "SpecInvalid", said),
            condition(c.DEGRADED, "SpecInvalid", said),
        )
    ]


def of_failure(message: str) -> list[Condition]:
    """Return the conditions when the operator itself failed at a resource: whether it serves is not known."""
    found = (condition(c.READY, "ReconcileFailed", message), condition(c.DEGRADED, "ReconcileFailed", message))
    return [_bounded(item) for item in found]


def of_not_begun() -> list[Condition]:
    """Return the conditions of a deployment that was paused before anything was made for it."""
    said = "spec.paused is true, and nothing was created before it was"
    return [
        condition(c.READY, "FrontendNotReady", said),
        condition(c.SPEC_VALID, "Valid", "the resource is valid"),
        condition(c.PROGRESSING, "Paused", "spec.paused is true: nothing is changed"),
    ]


def of_unusable(advice: Sequence[Problem]) -> list[Condition]:
    """Return the conditions while the deployment's own Secret is of no use, so that nothing can be rendered."""
    said = "; ".join(problem.message for problem in advice) or "the deployment's Secret is not there yet"
    worst = advice[0].reason if advice else ""
    degraded = worst if worst in c.REASONS[c.DEGRADED] else "SecretMalformed"
    return [
        _bounded(item)
        for item in (
            condition(c.READY, "SecretUnusable", said),
            condition(c.SPEC_VALID, "Valid", "the resource is valid"),
            condition(c.PROGRESSING, "SecretUnusable", said),
            *([condition(c.DEGRADED, degraded, said)] if advice else []),
        )
    ]


def _ready(plan: RolloutPlan, groups: Sequence[Condition]) -> Condition:
    if isinstance(plan.outcome, Blocked) and plan.outcome.reason in _STOPS:
        return condition(c.READY, "Blocked", plan.outcome.message)
    bad = [group for group in groups if group.status != "True"]
    if not bad:
        return condition(c.READY, "Serving", "every replica runs the current spec and serves")
    said = "; ".join(group.message for group in bad)
    if all(group.reason == "RollingOut" for group in bad):
        return condition(c.READY, "RollingOut", said)
    worst = next(group for group in bad if group.reason != "RollingOut")
    return condition(c.READY, _NOT_READY[worst.type], said)


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
    said = "; ".join(
        f"{r.subject}: {r.available} of {r.desired} available, {r.updated} of the current version" for r in rollouts
    )
    if not any(rollout.desired for rollout in rollouts):
        return condition(type_, "ScaledToZero", f"no replicas are wanted: {said}")
    if all(rollout.complete for rollout in rollouts):
        return condition(type_, "AllReady", said)
    if all(r.available >= r.desired for r in rollouts) or any(not r.settled for r in rollouts):
        return condition(type_, "RollingOut", said)
    return condition(type_, "ReplicasMissing", said)


def _problems(snapshot: Snapshot, plan: RolloutPlan, advice: Sequence[Problem]) -> Iterator[tuple[str, str]]:
    for missing in snapshot.missing:
        yield c.MISSING[missing.kind], f"{missing.path}: there is no {missing.kind} {missing.name}"
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
        found = pod_problem(pod, asks.get(pod.pool, ""))
        # One pod speaks for its pool. A surge replica without a node was told of already, by a better name.
        if found is None or (found.reason, pod.pool) in seen or ("NoSurgeRoom", pod.pool) in seen:
            continue
        seen.add((found.reason, pod.pool))
        yield found.reason, found.message


def _degraded(problems: Iterator[tuple[str, str]], plan: RolloutPlan, before: Before) -> Condition:
    found = list(dict.fromkeys(problems))
    if found:
        return condition(c.DEGRADED, found[0][0], "; ".join(dict.fromkeys(message for _, message in found)))
    last = before.get(c.DEGRADED, {})
    if last.get("reason") == "SecretRecreated" and not isinstance(plan.outcome, Complete):
        # It is told once, by the reconcile that made the Secret; it is over when every pod has the new keys.
        return condition(c.DEGRADED, "SecretRecreated", str(last.get("message", "")))
    return condition(c.DEGRADED, "AsExpected", "nothing is wrong")


def _exact(dep: MMRouterDeployment, snapshot: Snapshot, plan: RolloutPlan, before: Before) -> Condition:
    pods = [pod for pod in snapshot.pods if pod.pool and pod.containers_ready and not pod.deleting]
    if not pods:
        return condition(c.EXACT, "NoReplicas", "no engine runs yet")
    fronts = counted_frontends(snapshot)
    last = before.get(c.EXACT, {})
    if not fronts and ready_frontends(snapshot) and last.get("reason") in c.REASONS[c.EXACT]:
        # An operator that has just started knows nothing yet; what it said last still stands.
        return condition(c.EXACT, str(last["reason"]), str(last.get("message", "")))
    if not any(snapshot.reports.get(front.uid) for front in fronts):
        return condition(c.EXACT, "FrontendNotHeard", "no frontend has told yet which engines it proved")
    reports = {pod.name: (pod, counted_reports(pod, snapshot)) for pod in pods}
    for name, (_, said) in sorted(reports.items()):
        for report in said:
            if report is not None and report.verified == "False" and not is_verified(said):
                cause = ": ".join(part for part in (report.cause, report.message) if part)
                return condition(c.EXACT, "NotExact", f"pod {name}: {cause or 'its blocks are not those predicted'}")
    waiting = [pod for pod, said in reports.values() if not is_verified(said)]
    timeout = dep.spec.verification.timeout_seconds
    late = sorted(pod.name for pod in waiting if pod.started is not None and snapshot.now >= pod.started + timeout)
    if late:
        said_late = f"not proved within {timeout} s: {', '.join(late)}"
        return condition(c.EXACT, "NotVerifiedInTime", said_late)
    if waiting:
        names = ", ".join(sorted(pod.name for pod in waiting))
        return condition(c.EXACT, "Verifying", f"not proved yet: {names}")
    if not all(rollout.settled for rollout in plan.rollouts):
        return condition(c.EXACT, "Verifying", "replicas of the current spec are on their way")
    return condition(c.EXACT, "Verified", f"all {len(pods)} engine pods are proved")


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
        if pairs := unequal(dep):
            said = "; ".join(pair.sentence() for pair in pairs)
            yield condition(c.COMPATIBLE, "LayoutsDiffer", f"{said}. They are not paired")
        else:
            yield condition(c.COMPATIBLE, "Compatible", "prefill and decode pools say nothing that keeps them apart")
    if dep.spec.frontend.api_keys is None:
        yield condition(
            c.AUTHENTICATED,
            "NoApiKeys",
            "spec.frontend.apiKeys is not set: whoever reaches the endpoint may use it, and all share one cache",
        )
    else:
        yield condition(c.AUTHENTICATED, "ApiKeys", "clients need a key")
    if dep.spec.observability.pod_monitor == "Enabled":
        if podmonitor_unavailable(dep, snapshot.capabilities):
            said = "spec.observability.podMonitor is Enabled, and the cluster does not serve monitoring.coreos.com/v1"
            yield condition(c.MONITORING, "PodMonitorUnavailable", said)
        else:
            yield condition(c.MONITORING, "Available", "PodMonitors are there")
    if dep.spec.frontend.pod_template or any(pool.pod_template for pool in dep.spec.pools):
        without_effect = overridden(dep, snapshot.config)
        if without_effect:
            said = f"fields that are the operator's own, so they have no effect: {', '.join(without_effect)}"
            yield condition(c.OVERLAID, "FieldsOverridden", said)
        else:
            yield condition(c.OVERLAID, "Applied", "every field of the podTemplates is in effect")
    yield from _of_manifests(dep, plan, before)


def _of_manifests(dep: MMRouterDeployment, plan: RolloutPlan, before: Before) -> Iterator[Condition]:
    """Return what the manifests tell. Where nothing is applied, as while paused, it stays as it was."""
    asked = [pool.name for pool in dep.spec.pools if pool.autoscaling is not None]
    if not plan.apply:
        for type_ in (c.AUTOSCALING, c.RESTRICTED):
            yield from _again(before.get(type_))
        return
    if asked:
        scaled = {pool_of(m) for m in plan.apply if m["kind"] in ("HorizontalPodAutoscaler", "ScaledObject")}
        # While a set switches, its autoscalers are away for a while.
        moving = {rollout.pool for rollout in plan.rollouts if not rollout.settled and rollout.role in SET_ROLES}
        lacking = [name for name in asked if name not in scaled and name not in moving]
        if lacking:
            said = (
                f"pools {', '.join(lacking)} keep their replicas: the cluster serves neither metrics of pods nor KEDA "
                "with a Prometheus that the operator knows, or their role has no such metric"
            )
            yield condition(c.AUTOSCALING, "AutoscalingUnavailable", said)
        else:
            yield condition(c.AUTOSCALING, "Available", f"pools {', '.join(asked)} follow their load")
    found = [
        f"{f'pool {pool_of(m)}' if pool_of(m) else 'frontend'}: {place}: {problem}"
        for m in plan.apply
        if m["kind"] == "Deployment"
        for place, problem in violations(m["spec"]["template"]["spec"])
    ]
    if found:
        shared = any(pool.shared_memory.scope == "node" for pool in dep.spec.pools)
        said = "not within the Pod Security level restricted: " + "; ".join(dict.fromkeys(found))
        yield condition(c.RESTRICTED, "NodeSharedMemory" if shared else "BelowRestricted", said)
    else:
        yield condition(c.RESTRICTED, "Restricted", "every pod is within the Pod Security level restricted")


def _again(last: Mapping[str, Any] | None) -> Iterator[Condition]:
    """Yield a condition as it was told before, also for a reason that only another release knows."""
    match last:
        case {
            "type": str(type_),
            "status": "True" | "False" | "Unknown" as status,
            "reason": str(reason),
            "message": str(said),
        }:
            yield Condition(type_, status, reason, said)


def _bounded(item: Condition) -> Condition:
    if len(item.message) <= _LONGEST:
        return item
    return Condition(item.type, item.status, item.reason, item.message[:_LONGEST] + "...")
