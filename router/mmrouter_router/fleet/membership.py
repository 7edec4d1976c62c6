"""Membership of a deployment (engine pods and other frontends), from ``workers.json`` or the cluster's API.

Either source calls back with a :class:`Membership`. A router outside of a cluster reads the file (docs/architecture.md)
again on change. In a cluster this deployment's pods are watched; while the API server is away the last membership stays
in effect and requests are served: the feed of a removed pod detects its end.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from mmrouter_router.core.settings import ApiServer
from mmrouter_router.fleet.watched_objects import WatchedObjects
from mmrouter_router.fleet.workers import Member
from mmrouter_router.telemetry.metrics import Metrics

log = logging.getLogger("mmrouter.discovery")

POLL_SECONDS = 0.1  # interval of the file's ``stat``; it bounds how long a dead worker is still a candidate


@dataclass(frozen=True, slots=True)
class Peer:
    """A frontend. ``ready``: it takes requests."""

    uid: str
    name: str
    ip: str
    ready: bool = True


class Membership(NamedTuple):
    """All engine pods and other frontends at one moment. ``leaving``: this router's own pod is being deleted."""

    members: tuple[Member, ...]
    peers: tuple[Peer, ...] = ()
    leaving: bool = False


class _File(msgspec.Struct):
    workers: tuple[Member, ...]
    frontends: tuple[Peer, ...] = ()


def parse(raw: bytes) -> Membership:
    """Parse the file's text. Raises ``ValueError`` that names the field."""
    try:
        file = msgspec.json.decode(raw, type=_File)
    except msgspec.DecodeError as error:
        raise ValueError(f"workers.json: {error}") from error
    return Membership(file.workers, file.frontends)


async def watch_file(path: Path, update: Callable[[Membership], None]) -> None:
    """Call ``update`` with the file's content now and after every change; a missing or malformed one is ignored."""
    last: tuple[int, int] | None = None
    while True:
        try:
            status = path.stat()
            stamp = (status.st_mtime_ns, status.st_ino)
            if stamp != last:
                membership = parse(path.read_bytes())
                last = stamp
                update(membership)
        except FileNotFoundError:
            pass
        except ValueError as error:
            log.warning("%s", error)
        await asyncio.sleep(POLL_SECONDS)


DEPLOYMENT_LABEL, POOL_LABEL, ROLE_LABEL = "mmrouter.io/deployment", "mmrouter.io/pool", "mmrouter.io/role"
COMPATIBILITY_LABEL, LAYOUT_LABEL = "mmrouter.io/compatibility", "mmrouter.io/kv-layout"
TLS_LABEL = "mmrouter.io/engine-tls"
FRONTEND, RENDERER = "frontend", "renderer"
ENGINE_ROLES = frozenset({"worker", "prefill", "decode", "encoder", RENDERER})
GATES = frozenset({"mmrouter.io/routable", "mmrouter.io/verified"})
"""Readiness gates that the operator opens once (docs/architecture.md, "Readiness gates")."""
SIDECAR = "sidecar"  # name of the init container that relays an engine's events

OVER = frozenset({"Failed", "Succeeded"})


def parse_pod(pod: Mapping[str, Any]) -> Member | Peer | None:
    """Return the engine pod or frontend that an object describes; ``None``: neither, without an address, or ended.

    An engine's ``ready`` ignores the condition Ready, whose gates wait for this router. A pod that is being deleted is
    draining.
    """
    metadata, status = pod.get("metadata") or {}, pod.get("status") or {}
    labels = metadata.get("labels") or {}
    uid, name, ip = metadata.get("uid"), metadata.get("name"), status.get("podIP")
    if not uid or not name or not ip or status.get("phase") in OVER:
        return None
    role = labels.get(ROLE_LABEL)
    if role == FRONTEND:
        return Peer(uid, name, ip, ready=_is_true(status, "Ready") and not is_leaving(pod))
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
        tls=TLS_LABEL in labels,
    )


def is_leaving(pod: Mapping[str, Any]) -> bool:
    return bool((pod.get("metadata") or {}).get("deletionTimestamp"))


def membership_of(pods: Iterable[Member | Peer], own_uid: str, *, leaving: bool) -> Membership:
    ordered = sorted(pods, key=lambda pod: (pod.name, pod.uid))
    peers = tuple(pod for pod in ordered if isinstance(pod, Peer) and pod.uid != own_uid)
    return Membership(tuple(pod for pod in ordered if isinstance(pod, Member)), peers, leaving)


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


async def watch_pods(
    server: ApiServer, deployment: str, own_uid: str, update: Callable[[Membership], None], metrics: Metrics
) -> None:
    """Call ``update`` with a deployment's membership now and after every change; ``own_uid``: of this router's pod."""

    def path() -> str:
        return f"/api/v1/namespaces/{(server.folder / 'namespace').read_text().strip()}/pods"

    await _PodListener(own_uid, update, metrics).watch(server, path, f"{DEPLOYMENT_LABEL}={deployment}")


class _PodListener(WatchedObjects["Member | Peer"]):
    """Keeps the members and peers among the watched pods."""

    def __init__(self, own_uid: str, update: Callable[[Membership], None], metrics: Metrics) -> None:
        super().__init__(parse_pod, self._publish_membership, metrics, log, "members")
        self._own_uid, self._update = own_uid, update
        self._leaving = False
        self._published: Membership | None = None

    def removed(self, uid: str) -> None:
        super().removed(uid)
        self._leaving = self._leaving or uid == self._own_uid

    def take(self, obj: Mapping[str, Any]) -> None:
        super().take(obj)
        if obj["metadata"]["uid"] == self._own_uid:
            self._leaving = self._leaving or is_leaving(obj)

    def _publish_membership(self) -> None:
        now = membership_of(self.by_uid.values(), self._own_uid, leaving=self._leaving)
        if now != self._published:
            self._published = now
            self._update(now)
