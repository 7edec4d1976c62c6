"""What a watch of the cluster's API keeps of its objects; the last objects stay while the API is away."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

from prometheus_client import Counter, Gauge

from mmrouter_router.core.settings import ApiServer

T = TypeVar("T")


class DiscoveryMetrics(Protocol):
    """``discovery_synced``: 1 while the watch is connected; ``discovery_errors``: its failures by reason."""

    discovery_synced: Gauge
    discovery_errors: Counter


class WatchedObjects(Generic[T]):
    """Keeps the watched objects that ``parse`` returns something for, by uid; a ``mmrouter_kube.list_watch.Listener``.

    ``publish`` is called after every change. ``kept``: what stays in effect, for the log.
    """

    def __init__(
        self,
        parse: Callable[[Mapping[str, Any]], T | None],
        publish: Callable[[], None],
        metrics: DiscoveryMetrics,
        log: logging.Logger,
        kept: str,
    ) -> None:
        self._parse, self._publish, self._metrics, self._log, self._kept = parse, publish, metrics, log, kept
        self.by_uid: dict[str, T] = {}
        self._disconnected = False

    async def watch(self, server: ApiServer, path: Callable[[], str], selector: str) -> None:
        """Follow the objects at ``path`` with these labels until cancelled."""
        # Imported here so that only a process in a cluster loads the cluster client.
        from kubernetes.aio.client.api_client import ApiClient  # noqa: PLC0415

        from mmrouter_kube.in_cluster_config import in_cluster  # noqa: PLC0415
        from mmrouter_kube.list_watch import ListWatch  # noqa: PLC0415

        def connect() -> ApiClient:
            return ApiClient(in_cluster(server.host, server.port, server.folder))

        await ListWatch(connect, path, selector, self).run()

    def list_started(self) -> None:
        """Nothing to note: only the watch adds objects."""

    def listed(self, objects: Sequence[Mapping[str, Any]]) -> None:
        for obj in objects:
            self.take(obj)

    def list_complete(self, uids: frozenset[str]) -> None:
        for uid in self.by_uid.keys() - uids:
            del self.by_uid[uid]
        self._publish()

    def event(self, type: str, obj: Mapping[str, Any]) -> None:
        if type == "DELETED":
            self.removed(obj["metadata"]["uid"])
        else:
            self.take(obj)
        self._publish()

    def connected(self) -> None:
        self._metrics.discovery_synced.set(1)
        if self._disconnected:
            self._disconnected = False
            self._log.info("connected to the API server again")

    def failed(self, reason: str, error: Exception) -> None:
        self._metrics.discovery_errors.labels(reason).inc()
        self._metrics.discovery_synced.set(0)
        if not self._disconnected and reason != "expired":
            self._disconnected = True
            self._log.warning("the API server cannot be watched, the last %s stay in effect: %r", self._kept, error)

    def take(self, obj: Mapping[str, Any]) -> None:
        uid, parsed = obj["metadata"]["uid"], self._parse(obj)
        if parsed is None:
            self.by_uid.pop(uid, None)
        else:
            self.by_uid[uid] = parsed

    def removed(self, uid: str) -> None:
        self.by_uid.pop(uid, None)
