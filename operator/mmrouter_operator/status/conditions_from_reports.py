"""Conditions that are judged by the frontends' reports: exact routing, the pipeline's stages, shared memory. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from mmrouter_lib.api import MMRouterDeployment
from mmrouter_operator.model.snapshot import FrontendReport, Snapshot
from mmrouter_operator.planning.planner import RolloutPlan
from mmrouter_operator.planning.pod_readiness_gates import (
    counted_frontends,
    counted_reports,
    is_verified,
    ready_frontends,
)
from mmrouter_operator.planning.rollout_progress import Progress
from mmrouter_operator.status import conditions as c
from mmrouter_operator.status.conditions import Condition, condition

Before = Mapping[str, Mapping[str, Any]]
"""The conditions of the previous status, by type."""

STAGE_ROLES: Final = frozenset({"encoder", "prefill", "decode"})
"""Roles that serve one stage of a request. Without any of them there is no condition of the pipeline."""
_NO_ENCODER: Final = (
    "no encoder can take work: images are encoded where the prompt is computed, by SGLang they are refused"
)
MISSING_STAGES: Final[Mapping[str, tuple[str, str]]] = {
    "no_pair": ("NoPair", "no prefill and decode pod can take work together: what no worker takes is refused"),
    "no_decode": ("NoDecode", "no decode pod can take work: requests are answered where their prompt is computed"),
    "no_prefill": ("NoPrefill", "no prefill pod can take work: prompts are computed where they are decoded"),
    "no_encoder": ("NoEncoder", _NO_ENCODER),
}
"""A frontend's word for a missing stage -> reason and sentence, the most severe first."""


def exact_routing(dep: MMRouterDeployment, snapshot: Snapshot, plan: RolloutPlan, before: Before) -> Condition:
    """Return whether the predictions for every engine pod are verified."""
    pods = [pod for pod in snapshot.pods if pod.pool and pod.containers_ready and not pod.deleting]
    if not pods:
        return condition(c.EXACT, "NoReplicas", "no engine runs yet")
    if unheard := _unheard(c.EXACT, "which engines it proved", _reports(snapshot), snapshot, before):
        return unheard
    reports = {pod.name: (pod, counted_reports(pod, snapshot)) for pod in pods}
    for name, (_, of_pod) in sorted(reports.items()):
        for report in of_pod:
            if report.verified == "False" and not is_verified(of_pod):
                cause = ": ".join(part for part in (report.cause, report.message) if part)
                return condition(c.EXACT, "NotExact", f"pod {name}: {cause or 'its blocks differ from the prediction'}")
    waiting = [pod for pod, of_pod in reports.values() if not is_verified(of_pod)]
    timeout = dep.spec.verification.timeout_seconds
    late = sorted(pod.name for pod in waiting if pod.started is not None and snapshot.now >= pod.started + timeout)
    if late:
        return condition(c.EXACT, "NotVerifiedInTime", f"not proved within {timeout} s: {', '.join(late)}")
    if waiting:
        return condition(c.EXACT, "Verifying", f"not proved yet: {', '.join(sorted(pod.name for pod in waiting))}")
    if not all(rollout.settled for rollout in plan.rollouts):
        return condition(c.EXACT, "Verifying", "replicas of the current spec are starting")
    return condition(c.EXACT, "Verified", f"all {len(pods)} engine pods are proved")


def pipeline(dep: MMRouterDeployment, snapshot: Snapshot, plan: RolloutPlan, before: Before) -> Condition | None:
    """Return whether requests pass through every stage that has a pool; ``None`` if no pool serves a single stage.

    Only the frontends know: a Ready pod may take no work, and one that takes work may not be Ready yet.
    """
    if not any(pool.role in STAGE_ROLES for pool in dep.spec.pools):
        return None
    degraded = [report.degraded for report in _reports(snapshot) if report.degraded is not None]
    if unheard := _unheard(c.CHAIN, "which stages requests go through", degraded, snapshot, before):
        return unheard
    counts = {word: sum(word in stages for stages in degraded) for word in MISSING_STAGES}
    missing = [(*MISSING_STAGES[word], count) for word, count in counts.items() if count]
    if not missing:
        return condition(c.CHAIN, "EveryStage", "requests go through every stage that they need")
    message = "; ".join(
        sentence if count == len(degraded) else f"{count} of {len(degraded)} frontends: {sentence}"
        for _, sentence, count in missing
    )
    if before.get(c.CHAIN, {}).get("status") not in ("True", "False") and isinstance(plan.outcome, Progress):
        return condition(c.CHAIN, "Starting", f"pods are starting; until then {message}")
    return condition(c.CHAIN, missing[0][0], message)


def shared_memory(dep: MMRouterDeployment, snapshot: Snapshot, before: Before) -> Condition | None:
    """Return whether the nodes' shared directories have room for hand-overs; ``None`` if no pool shares memory.

    Sidecars measure it and frontends forward one bit and the limit, because the exact level changes with every
    request. The bit has a wide hysteresis, so the condition does not flicker.
    """
    if not any(pool.shared_memory.scope == "node" for pool in dep.spec.pools):
        return None
    if unheard := _unheard(c.PRESSURE, "how full the nodes' directories are", _reports(snapshot), snapshot, before):
        return unheard
    measured = sorted(_shared_directories(snapshot))
    if not measured:
        return condition(c.PRESSURE, "NotMeasured", "no sidecar has measured its node's directory yet")
    full: dict[str, tuple[str, int]] = {}
    for node, pod, limit, above in measured:
        if above:
            full.setdefault(node, (pod, limit))  # one pod per node is enough
    if not full:
        return condition(c.PRESSURE, "BelowHighWaterMark", "there is room in the shared directory of every node")
    nodes = "; ".join(
        f"node {node}, as pod {pod} says, of {limit / 2**20:.0f} MiB" for node, (pod, limit) in full.items()
    )
    message = f"images travel inside requests until there is room again in the shared directory of {nodes}"
    return condition(c.PRESSURE, "AboveHighWaterMark", message)


def devices(snapshot: Snapshot) -> Condition | None:
    """Return whether an engine computes on another kind of device; ``None`` where no engine reports its own."""
    reported = [
        (pod.name, report.device)
        for pod in snapshot.pods
        if not pod.deleting
        for report in counted_reports(pod, snapshot)
        if report.device is not None
    ]
    if not reported:
        return None
    others = {name: device for name, device in reported if device.requested not in ("", device.actual)}
    if not others:
        return condition(c.DEVICE, "AsRequested", "every engine that reports its device computes on the requested kind")
    named = (f"pod {name} on {device.actual} instead of {device.requested}" for name, device in sorted(others.items()))
    return condition(c.DEVICE, "OtherDevice", f"engines compute on another device: {', '.join(named)}")


def _unheard(type_: str, what: str, reports: Sequence[object], snapshot: Snapshot, before: Before) -> Condition | None:
    """Return the condition where no frontend has reported ``what``; ``None`` if one has.

    It stays as it was if the operator has just started, and no frontend has had time to report.
    """
    last = before.get(type_, {})
    early = ready_frontends(snapshot) and not counted_frontends(snapshot)
    if early and last.get("reason") in c.REASONS[type_]:
        return condition(type_, str(last["reason"]), str(last.get("message", "")))
    return None if reports else condition(type_, "FrontendNotHeard", f"no frontend has reported yet {what}")


def _reports(snapshot: Snapshot) -> list[FrontendReport]:
    reports = (snapshot.reports.get(frontend.uid) for frontend in counted_frontends(snapshot))
    return [report for report in reports if report is not None]


def _shared_directories(snapshot: Snapshot) -> Iterator[tuple[str, str, int, bool]]:
    """Yield node, pod, limit in bytes, and whether the high-water mark is exceeded by some frontend's report."""
    for pod in snapshot.pods:
        shared = [report.shared for report in counted_reports(pod, snapshot) if report.shared is not None]
        if shared and not pod.deleting:
            yield pod.node or pod.name, pod.name, max(s.limit for s in shared), any(s.above for s in shared)
