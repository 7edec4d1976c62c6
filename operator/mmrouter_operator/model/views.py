"""Reads the few fields that the operator uses out of raw Kubernetes objects. Pure."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

from mmrouter_operator.model.kinds import COMPATIBILITY, POOL_LABEL, RENDERING_HASH, ROLE_LABEL, SET_TARGET
from mmrouter_operator.model.snapshot import (
    ChildView,
    DeploymentView,
    GatewayChildView,
    GatewayReport,
    PodView,
    RevisionView,
)

CRASH_LOOP = "CrashLoopBackOff"
RESTARTS = 2
"""Restarts from which a container that is not ready counts as crashing repeatedly, also while it runs and in the minute
in which the kubelet reports its end before it reports the back-off."""
LONGEST_WORDS = 200
"""Characters kept of a container's last message."""

BAD_WAITING: Final = {
    **dict.fromkeys(("ImagePullBackOff", "ErrImagePull", "InvalidImageName", "ErrImageNeverPull"), "ImagePullFailed"),
    **dict.fromkeys(
        ("CreateContainerConfigError", "CreateContainerError", "RunContainerError"), "ContainerConfigError"
    ),
    CRASH_LOOP: CRASH_LOOP,
}
"""Reasons of a waiting container that do not pass by themselves -> reason of a condition.

ContainerCreating and PodInitializing pass.
"""


def child_view(obj: Mapping[str, Any]) -> ChildView:
    if obj.get("kind") == "Deployment":
        return deployment_view(obj)
    if obj.get("kind") in ("HTTPRoute", "InferencePool"):
        return GatewayChildView(**_identity(obj), reports=_gateway_reports(obj))
    return ChildView(**_identity(obj))


def deployment_view(obj: Mapping[str, Any]) -> DeploymentView:
    """Return the view of an ``apps/v1`` Deployment. Counts that the API leaves out are 0; replicas default to 1."""
    spec, status = obj.get("spec") or {}, obj.get("status") or {}
    template = _metadata(spec.get("template") or {})
    conditions = _by_type(status)
    failure = conditions.get("ReplicaFailure", {})
    own = _metadata(obj)
    target = own["annotations"].get(SET_TARGET, "")
    return DeploymentView(
        **_identity(obj),
        replicas=spec.get("replicas", 1),
        observed_generation=status.get("observedGeneration", 0),
        updated=status.get("updatedReplicas", 0),
        ready=status.get("readyReplicas", 0),
        available=status.get("availableReplicas", 0),
        total=status.get("replicas", 0),
        progressing_reason=conditions.get("Progressing", {}).get("reason", ""),
        failure=failure.get("message", "") if failure.get("status") == "True" else "",
        replicas_managers=_replicas_managers(obj),
        pool=own["labels"].get(POOL_LABEL, ""),
        role=own["labels"].get(ROLE_LABEL, ""),
        template_hash=template["annotations"].get(RENDERING_HASH, ""),
        compatibility=template["labels"].get(COMPATIBILITY, ""),
        set_target=int(target) if target.isdecimal() else None,
    )


def pod_view(obj: Mapping[str, Any]) -> PodView:
    metadata, spec, status = obj["metadata"], obj.get("spec") or {}, obj.get("status") or {}
    marks = _metadata(obj)
    conditions = _by_type(status)
    containers_ready = conditions.get("ContainersReady", {})
    scheduled = conditions.get("PodScheduled", {})
    stuck = scheduled.get("status") == "False" and scheduled.get("reason") == "Unschedulable"
    gates = [gate["conditionType"] for gate in spec.get("readinessGates") or []]
    return PodView(
        name=metadata["name"],
        namespace=metadata.get("namespace", ""),
        uid=metadata.get("uid", ""),
        pool=marks["labels"].get(POOL_LABEL, ""),
        role=marks["labels"].get(ROLE_LABEL, ""),
        ip=status.get("podIP", ""),
        node=spec.get("nodeName", ""),
        phase=status.get("phase", "Pending"),
        ready=_is_true(conditions.get("Ready")),
        containers_ready=_is_true(containers_ready),
        deleting="deletionTimestamp" in metadata,
        created=_seconds(metadata.get("creationTimestamp")) or 0.0,
        started=_seconds(containers_ready.get("lastTransitionTime")) if _is_true(containers_ready) else None,
        template_hash=marks["annotations"].get(RENDERING_HASH, ""),
        gates={gate: _is_true(conditions.get(gate)) for gate in gates},
        gate_times={gate: time for gate in gates if (time := conditions.get(gate, {}).get("lastTransitionTime"))},
        unschedulable=scheduled.get("message", "") if stuck else "",
        waiting=_waiting(status),
    )


def revision_view(obj: Mapping[str, Any]) -> RevisionView:
    """Return the view of a ControllerRevision that the operator wrote."""
    identity = _identity({"kind": "ControllerRevision", **obj})
    return RevisionView(
        identity["name"], obj.get("revision", 0), obj.get("data") or {}, identity["uid"], identity["owner"]
    )


def _identity(obj: Mapping[str, Any]) -> dict[str, Any]:
    metadata = obj["metadata"]
    owners = metadata.get("ownerReferences") or []
    return {
        "kind": obj["kind"],
        "name": metadata["name"],
        "uid": metadata.get("uid", ""),
        "resource_version": metadata.get("resourceVersion", ""),
        "owner": next((owner["uid"] for owner in owners if owner.get("controller")), ""),
        "generation": metadata.get("generation", 0),
        "deleting": "deletionTimestamp" in metadata,
    }


def _gateway_reports(obj: Mapping[str, Any]) -> tuple[GatewayReport, ...]:
    metadata, reports = obj["metadata"], []
    for parent in (obj.get("status") or {}).get("parents") or []:
        ref, conditions = parent["parentRef"], _by_type(parent)
        accepted = conditions.get("Accepted", {})
        # A report without a generation is taken for one on the present one.
        if accepted.get("observedGeneration", metadata.get("generation", 0)) < metadata.get("generation", 0):
            continue
        refused = [
            f"{type_} is False, {condition['reason']}: {condition.get('message', '')}"
            for type_ in ("Accepted", "ResolvedRefs")
            if (condition := conditions.get(type_, {})).get("status") == "False"
        ]
        names = (ref.get("namespace") or metadata.get("namespace", ""), ref["name"], ref.get("sectionName", ""))
        reports.append(GatewayReport("/".join(filter(None, names)), _is_true(accepted), "; ".join(refused)))
    return tuple(reports)


def _metadata(obj: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    metadata = obj.get("metadata") or {}
    return {"labels": metadata.get("labels") or {}, "annotations": metadata.get("annotations") or {}}


def _by_type(status: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return {condition["type"]: condition for condition in status.get("conditions") or []}


def _is_true(condition: Mapping[str, Any] | None) -> bool:
    return condition is not None and condition.get("status") == "True"


def _replicas_managers(obj: Mapping[str, Any]) -> tuple[str, ...]:
    entries = obj["metadata"].get("managedFields") or []
    owners = (e for e in entries if "f:replicas" in ((e.get("fieldsV1") or {}).get("f:spec") or {}))
    return tuple(dict.fromkeys(entry.get("manager", "") for entry in owners))


def _waiting(status: Mapping[str, Any]) -> tuple[str, str, str] | None:
    for kind in ("initContainerStatuses", "containerStatuses"):
        for container in status.get(kind) or []:
            waiting = (container.get("state") or {}).get("waiting") or {}
            reason, message = waiting.get("reason"), waiting.get("message", "")
            if reason == CRASH_LOOP or _starts_again(container):
                return container["name"], CRASH_LOOP, _ended(container) or message
            if reason in BAD_WAITING:
                return container["name"], reason, message
    return None


def _starts_again(container: Mapping[str, Any]) -> bool:
    """Whether a container that runs now, or has just failed, has ended so often that a start is no sign of recovery."""
    state = container.get("state") or {}
    between = "running" in state or bool((state.get("terminated") or {}).get("exitCode"))
    often = container.get("restartCount", 0) >= RESTARTS
    return between and often and not container.get("ready") and _ended(container) != ""


def _ended(container: Mapping[str, Any]) -> str:
    state, before = container.get("state") or {}, container.get("lastState") or {}
    last = state.get("terminated") or before.get("terminated") or {}
    if not last:
        return ""
    reason = f" {last['reason']}" if last.get("reason") not in (None, "", "Error") else ""
    words = _last_words(last.get("message") or "")
    return f"restarted {container.get('restartCount', 0)} times, last: exit {last.get('exitCode', 0)}{reason}{words}"


def _last_words(message: str) -> str:
    """Return the last line of a message that may be the end of a log; `kubectl logs --previous` has more."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return f": {lines[-1][:LONGEST_WORDS]}" if lines else ""


def _seconds(timestamp: str | None) -> float | None:
    return datetime.fromisoformat(timestamp).timestamp() if timestamp else None
