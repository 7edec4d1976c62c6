"""Decides the readiness gates of engine pods (docs/architecture.md). Pure.

| gate | opens when |
|---|---|
| routable | every ready frontend can route to the pod (by its snapshot, heartbeat or answer, depending on the role) |
| verified | one frontend proved the pod (canary, generation or image, by role), or it has nothing to prove |

After ``verification.timeoutSeconds`` with its containers ready its gates open anyway under ``Degrade``, if a
frontend can reach it: serving without overlap is better than not serving. The reason says so, and the condition
ExactRoutingVerified is False. A gate that is open stays open: a restarting frontend reports no pod for a moment, and
must not take the service down with it.
"""

from collections.abc import Mapping, Sequence

from mmrouter_lib.api import MMRouterDeployment
from mmrouter_operator.model.kinds import FRONTEND_ROLE, GATES, ROUTABLE, VERIFIED
from mmrouter_operator.model.snapshot import FrontendReport, PodView, Snapshot, WorkerReport

HEARING_SECONDS = 30.0
"""How long a ready frontend may take to send its first report, before its silence counts."""

NOTHING_TO_PROVE = "not_probed"
"""A frontend's cause for an engine that holds no cache and answers no plain request: an encoder of SGLang."""

Gate = tuple[bool, str, str]
"""Value, reason and message of a pod condition."""


def gate_changes(dep: MMRouterDeployment, snapshot: Snapshot) -> dict[str, dict[str, Gate]]:
    """Return by pod uid all gates of the pods of which one must change."""
    result = {}
    for pod in snapshot.pods:
        if not pod.pool or pod.deleting or not pod.gates:
            continue
        wanted = {gate: _gate(gate, dep, pod, snapshot) for gate in pod.gates if gate in (ROUTABLE, VERIFIED)}
        if any(value != pod.gates[gate] for gate, (value, _, _) in wanted.items()):
            result[pod.uid] = wanted
    return result


def closed_gates(snapshot: Snapshot) -> dict[str, int]:
    """Return by the last part of a gate's name the engine pods whose containers are ready and whose gate is closed."""
    pods = [pod for pod in snapshot.pods if pod.pool and pod.containers_ready and not pod.deleting]
    return {gate.rpartition("/")[2]: sum(not pod.gates.get(gate, True) for pod in pods) for gate in GATES}


def ready_frontends(snapshot: Snapshot) -> list[PodView]:
    """Return the frontends that clients can reach now."""
    return [
        pod for pod in snapshot.pods if pod.role == FRONTEND_ROLE and not pod.pool and pod.ready and not pod.deleting
    ]


def reports_on(pod: PodView, snapshot: Snapshot, frontends: Sequence[PodView]) -> list[WorkerReport]:
    """Return each of these frontends' report on a pod; a missing report counts as one that is not routable."""
    unknown = WorkerReport(pod.role)
    reports = (snapshot.reports.get(front.uid) for front in frontends)
    return [unknown if report is None else report.workers.get(pod.uid, unknown) for report in reports]


def counted_frontends(snapshot: Snapshot) -> list[PodView]:
    """Return the ready frontends that have reported, or should have by now.

    Right after the start of the operator or of a frontend, a missing report means nothing.
    """
    return [pod for pod in ready_frontends(snapshot) if snapshot.reports.get(pod.uid) or _silent(pod, snapshot)]


def all_frontends_counted(snapshot: Snapshot) -> bool:
    """Whether every ready frontend has reported, or had time to."""
    return len(counted_frontends(snapshot)) == len(ready_frontends(snapshot))


def counted_reports(pod: PodView, snapshot: Snapshot) -> list[WorkerReport]:
    """Return the reports on a pod by :func:`counted_frontends`."""
    return reports_on(pod, snapshot, counted_frontends(snapshot))


def _silent(pod: PodView, snapshot: Snapshot) -> bool:
    return snapshot.now >= max(snapshot.listening_since, pod.started or pod.created) + HEARING_SECONDS


def is_routable(reports: Sequence[WorkerReport]) -> bool:
    """Whether every ready frontend can route to the pod, and there is one."""
    return bool(reports) and all(report.routable for report in reports)


def is_verified(reports: Sequence[WorkerReport]) -> bool:
    """Whether some frontend proved the pod, or reached it where there is nothing to prove.

    One is enough, because frontends share the result in their heartbeats.
    """
    return any(report.verified == "True" or _proves_nothing(report) for report in reports)


def _proves_nothing(report: WorkerReport) -> bool:
    return report.routable and report.cause == NOTHING_TO_PROVE


def _gate(gate: str, dep: MMRouterDeployment, pod: PodView, snapshot: Snapshot) -> Gate:
    reports = reports_on(pod, snapshot, ready_frontends(snapshot))
    value, reason, message = _routable(pod, reports) if gate == ROUTABLE else _verified(pod, reports)
    if value:
        return value, reason, message
    if pod.gates[gate]:
        return True, "StaysOpen", f"it was open; now: {message}"
    if _overdue(dep, pod, snapshot.now) and _reachable(gate, pod, reports, snapshot.reports):
        seconds = dep.spec.verification.timeout_seconds
        return True, f"{reason}InTime", f"let in after {seconds} s all the same: {message}"
    return value, reason, message


def _routable(pod: PodView, reports: Sequence[WorkerReport]) -> Gate:
    if not reports:
        return False, "NoFrontend", "no frontend is ready"
    holding = sum(report.routable for report in reports)
    message = f"{holding} of {len(reports)} ready frontends hold it"
    if holding == len(reports):
        return True, "Held", message
    cause = next((report.message for report in reports if not report.routable and report.message), "")
    return False, "NotHeld", message + (f": {cause}" if cause else "")


def _verified(pod: PodView, reports: Sequence[WorkerReport]) -> Gate:
    if any(_proves_nothing(report) for report in reports):
        return True, "NothingToProve", "it answers, and it holds no cache of which something could be wrong"
    if is_verified(reports):
        return True, "Proved", "a frontend proved it"
    failed = next((report for report in reports if report.verified == "False"), None)
    if failed is not None:
        return False, "NotExact", ": ".join(part for part in (failed.cause, failed.message) if part) or "not exact"
    waiting = next((report.message for report in reports if report.message), "")
    return False, "NotProved", "no frontend has proved it yet" + (f": {waiting}" if waiting else "")


def _overdue(dep: MMRouterDeployment, pod: PodView, now: float) -> bool:
    if dep.spec.verification.on_failure != "Degrade" or pod.started is None or not pod.containers_ready:
        return False
    return now >= pod.started + dep.spec.verification.timeout_seconds


def _reachable(
    gate: str, pod: PodView, reports: Sequence[WorkerReport], heard: Mapping[str, FrontendReport | None]
) -> bool:
    """Whether opening the gate helps: a frontend can route to the pod, or frontends do not track its role at all."""
    if gate == VERIFIED or any(report.routable for report in reports):
        return True
    followed = any(
        w.role == pod.role for report in heard.values() if report is not None for w in report.workers.values()
    )
    return bool(reports) and not followed
