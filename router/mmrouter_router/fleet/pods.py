"""Pods as the cluster's API describes them -> who is there. Pure."""

from collections.abc import Iterable, Mapping
from typing import Any

from mmrouter_router.fleet.discovery import Peer, Roster
from mmrouter_router.fleet.workers import Member

DEPLOYMENT_LABEL, POOL_LABEL, ROLE_LABEL = "mmrouter.io/deployment", "mmrouter.io/pool", "mmrouter.io/role"
COMPATIBILITY_LABEL = "mmrouter.io/compatibility"
LAYOUT_LABEL = "mmrouter.io/kv-layout"
FRONTEND, RENDERER = "frontend", "renderer"
ENGINE_ROLES = frozenset({"worker", "prefill", "decode", "encoder", RENDERER})
GATES = frozenset({"mmrouter.io/routable", "mmrouter.io/verified"})
"""Conditions that the operator opens once (docs/architecture.md, "Readiness gates")."""
SIDECAR = "sidecar"
"""Name of the init container that relays an engine's events."""

OVER = frozenset({"Failed", "Succeeded"})


def who(pod: Mapping[str, Any]) -> Member | Peer | None:
    """Return the engine pod or frontend that an object describes; ``None``: it is neither, has no address or is over.

    ``ready`` does not look at the condition Ready: its gates wait for this router. A pod that is being deleted stays,
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
        ready=_containers_ready(status) if role == RENDERER else _sidecar_started(status),
        draining=bool(metadata.get("deletionTimestamp")),
        # One text: whoever differs in either is no partner.
        compatibility="-".join(filter(None, (labels.get(name) for name in (COMPATIBILITY_LABEL, LAYOUT_LABEL)))),
        admitted=_gates_open(pod),
    )


def is_leaving(pod: Mapping[str, Any]) -> bool:
    """Whether a pod is being deleted."""
    return bool((pod.get("metadata") or {}).get("deletionTimestamp"))


def roster(known: Iterable[Member | Peer], own_uid: str, *, leaving: bool) -> Roster:
    """Sort them into engine pods and the other frontends, each in the order of their names."""
    everybody = sorted(known, key=lambda one: (one.name, one.uid))
    return Roster(
        tuple(one for one in everybody if isinstance(one, Member)),
        tuple(one for one in everybody if isinstance(one, Peer) and one.uid != own_uid),
        leaving,
    )


def _sidecar_started(status: Mapping[str, Any]) -> bool:
    """A native sidecar is started once its startup probe has passed: its sockets are bound."""
    return any(one.get("name") == SIDECAR and one.get("started") for one in status.get("initContainerStatuses") or ())


def _gates_open(pod: Mapping[str, Any]) -> bool:
    named = {one.get("conditionType") for one in (pod.get("spec") or {}).get("readinessGates") or ()}
    return all(_is_true(pod["status"], gate) for gate in named & GATES)


def _containers_ready(status: Mapping[str, Any]) -> bool:
    return _is_true(status, "ContainersReady")


def _is_true(status: Mapping[str, Any], condition: str) -> bool:
    return any(one.get("type") == condition and one.get("status") == "True" for one in status.get("conditions") or ())
