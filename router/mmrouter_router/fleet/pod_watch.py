"""Discovery from the cluster's API: follows this deployment's pods and publishes a membership after every change.

While the API server is away the last membership stays in effect and requests are served: the feed of a removed pod
detects its end.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kubernetes.aio.client.api_client import ApiClient

from mmrouter_kube.connection import in_cluster
from mmrouter_kube.list_watch import ListWatch
from mmrouter_router.core.settings import ApiServer
from mmrouter_router.fleet.membership import Membership, Peer
from mmrouter_router.fleet.pods import DEPLOYMENT_LABEL, is_leaving, membership_of, parse_pod
from mmrouter_router.fleet.workers import Member
from mmrouter_router.telemetry.metrics import Metrics

log = logging.getLogger("mmrouter.discovery")


async def watch_pods(
    server: ApiServer, deployment: str, own_uid: str, update: Callable[[Membership], None], metrics: Metrics
) -> None:
    """Call ``update`` with the membership of a deployment in the pod's own namespace, now and after every change.

    ``own_uid`` is this router's pod. Ends only by cancellation.
    """

    def path() -> str:
        return f"/api/v1/namespaces/{(server.folder / 'namespace').read_text().strip()}/pods"

    def connect() -> ApiClient:
        return ApiClient(in_cluster(server.host, server.port, server.folder))

    pods = _PodListener(own_uid, update, metrics)
    await ListWatch(connect, path, f"{DEPLOYMENT_LABEL}={deployment}", pods).run()


class _PodListener:
    """Keeps the members and peers among the watched pods; see ``mmrouter_kube.list_watch.Listener``."""

    def __init__(self, own_uid: str, update: Callable[[Membership], None], metrics: Metrics) -> None:
        self._own_uid, self._update, self._metrics = own_uid, update, metrics
        self._by_uid: dict[str, Member | Peer] = {}
        self._leaving = False
        self._published: Membership | None = None
        self._disconnected = False

    def list_started(self) -> None:
        """Nothing to note: only the watch adds pods."""

    def listed(self, objects: Sequence[Mapping[str, Any]]) -> None:
        for pod in objects:
            self._take(pod)

    def list_complete(self, uids: frozenset[str]) -> None:
        for uid in self._by_uid.keys() - uids:
            del self._by_uid[uid]
        self._publish()

    def event(self, type: str, obj: Mapping[str, Any]) -> None:
        if type == "DELETED":
            uid = obj["metadata"]["uid"]
            self._by_uid.pop(uid, None)
            self._leaving = self._leaving or uid == self._own_uid
        else:
            self._take(obj)
        self._publish()

    def connected(self) -> None:
        self._metrics.discovery_synced.set(1)
        if self._disconnected:
            self._disconnected = False
            log.info("connected to the API server again")

    def failed(self, reason: str, error: Exception) -> None:
        self._metrics.discovery_errors.labels(reason).inc()
        self._metrics.discovery_synced.set(0)
        if not self._disconnected and reason != "expired":
            self._disconnected = True
            log.warning("the API server cannot be watched, the last membership stays in effect: %r", error)

    def _take(self, pod: Mapping[str, Any]) -> None:
        uid = pod["metadata"]["uid"]
        member = parse_pod(pod)
        if member is None:
            self._by_uid.pop(uid, None)
        else:
            self._by_uid[uid] = member
        if uid == self._own_uid:
            self._leaving = self._leaving or is_leaving(pod)

    def _publish(self) -> None:
        now = membership_of(self._by_uid.values(), self._own_uid, leaving=self._leaving)
        if now != self._published:
            self._published = now
            self._update(now)
