"""Translate pods of the cluster's API into members and peers. Pure."""

from collections.abc import Iterable, Mapping
from typing import Any

from mmrouter_router.fleet.membership import Membership, Peer
from mmrouter_router.fleet.workers import Member

DEPLOYMENT_LABEL, POOL_LABEL, ROLE_LABEL = "mmrouter.io/deployment", "mmrouter.io/pool", "mmrouter.io/role"
COMPATIBILITY_LABEL = "mmrouter.io/compatibility"
LAYOUT_LABEL = "mmrouter.io/kv-layout"
FRONTEND, RENDERER = "frontend", "renderer"
ENGINE_ROLES = frozenset({"worker", "prefill", "decode", "encoder", RENDERER})
GATES = frozenset({"mmrouter.io/routable", "mmrouter.io/verified"})
"""Readiness gates that the operator opens once (docs/architecture.md, "Readiness gates")."""
SIDECAR = "sidecar"
"""Name of the init container that relays an engine's events."""

OVER = frozenset({"Failed", "Succeeded"})


def parse_pod(pod: Mapping[str, Any]) -> Member | Peer | None:
    """Return the engine pod or frontend that an object describes; ``None``: neither, without an address, or ended.

    ``ready`` ignores the condition Ready: its gates wait for this router. A pod that is being deleted stays a member,
    draining, because its last answers are still under way.
    """
    metadata, status = pod.get("metadata") or {}, pod.get("status") or {}
    labels = metadata.get("labels") or {}
    uid, name, ip = metadata.get("uid"), metadata.get("name"), status.get("podIP")
    if not uid or not name or not ip or status.get("phase") in OVER:
        return None
    role = labels.get(ROLE_LABEL)
    if role == FRONTEND:
        return Peer(uid, name, ip)
    pool = labels.get(POOL_LABEL)
    if role not in ENGINE_ROLES or not pool:
        return None
    return Member(
        uid=uid,
        name=name,
        ip=ip,
        pool=pool,
        role=role,
        node=(pod.get("spec") or {}).get("nodeName") or "",
        ready=_is_true(status, "ContainersReady") if role == RENDERER else _sidecar_started(status),
        draining=is_leaving(pod),
        # Joined, so that engines which differ in either label are incompatible.
        compatibility="-".join(filter(None, (labels.get(name) for name in (COMPATIBILITY_LABEL, LAYOUT_LABEL)))),
        admitted=_gates_open(pod),
    )


def is_leaving(pod: Mapping[str, Any]) -> bool:
    """Whether a pod is being deleted."""
    return bool((pod.get("metadata") or {}).get("deletionTimestamp"))


def membership_of(pods: Iterable[Member | Peer], own_uid: str, *, leaving: bool) -> Membership:
    """Split into engine pods and other frontends, each in the order of their names."""
    ordered = sorted(pods, key=lambda pod: (pod.name, pod.uid))
    return Membership(
        tuple(pod for pod in ordered if isinstance(pod, Member)),
        tuple(pod for pod in ordered if isinstance(pod, Peer) and pod.uid != own_uid),
        leaving,
    )


def _sidecar_started(status: Mapping[str, Any]) -> bool:
    """A native sidecar is started once its startup probe has passed: its sockets are bound."""
    statuses = status.get("initContainerStatuses") or ()
    return any(container.get("name") == SIDECAR and container.get("started") for container in statuses)


def _gates_open(pod: Mapping[str, Any]) -> bool:
    gates = {gate.get("conditionType") for gate in (pod.get("spec") or {}).get("readinessGates") or ()}
    return all(_is_true(pod["status"], gate) for gate in gates & GATES)


def _is_true(status: Mapping[str, Any], kind: str) -> bool:
    conditions = status.get("conditions") or ()
    return any(condition.get("type") == kind and condition.get("status") == "True" for condition in conditions)
