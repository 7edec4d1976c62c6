"""The deployments of a namespace, from a watch of the cluster's API; the last list stays while the API is away."""

import logging
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, Final

from mmrouter_router.core.settings import ApiServer
from mmrouter_router.fleet.watched_objects import WatchedObjects
from mmrouter_router.gateway.metrics import GatewayMetrics
from mmrouter_router.gateway.model_routes import Deployment, Exact

log = logging.getLogger("mmrouter.gateway")

SERVICE_PORT: Final = 80
EXACT_ROUTING: Final = "ExactRoutingVerified"
_STANDINGS: Final[Mapping[str, Exact]] = {"True": "True", "False": "False"}

Update = Callable[[tuple[Deployment, ...]], None]


def parse_deployment(resource: Mapping[str, Any]) -> Deployment | None:
    """Return the deployment that an object describes, ``None`` for one that is being deleted.

    Only what the gateway uses is read, so that an object with a newer release's fields is read too.
    """
    metadata, spec, status = (resource.get(name) or {} for name in ("metadata", "spec", "status"))
    if metadata.get("deletionTimestamp"):
        return None
    name, namespace, model = metadata["name"], metadata["namespace"], spec.get("model") or {}
    frontend = spec.get("frontend") or {}
    conditions = {condition.get("type"): condition.get("status") for condition in status.get("conditions") or ()}
    return Deployment(
        name=name,
        model=model.get("servedName") or name,
        host=f"{name}.{namespace}.svc",
        port=(frontend.get("service") or {}).get("port") or SERVICE_PORT,
        tls=bool(frontend.get("tls")),
        root=model.get("id") or "",
        created=_seconds(metadata.get("creationTimestamp") or ""),
        exact=_STANDINGS.get(conditions.get(EXACT_ROUTING) or "", "Unknown"),
        exact_ratio=_ratio((status.get("routing") or {}).get("exactRatio")),
    )


def _seconds(timestamp: str) -> int:
    try:
        return int(datetime.fromisoformat(timestamp).timestamp())
    except ValueError:
        return 0


def _ratio(text: Any) -> float | None:
    try:
        return float(text)
    except (TypeError, ValueError):
        return None


async def watch_deployments(
    server: ApiServer, namespace: str, selector: str, update: Update, metrics: GatewayMetrics
) -> None:
    """Call ``update`` with the deployments of a namespace that have these labels, now and after every change."""
    path = f"/apis/mmrouter.io/v1alpha1/namespaces/{namespace}/mmrouterdeployments"
    await DeploymentListener(update, metrics).watch(server, lambda: path, selector)


class DeploymentListener(WatchedObjects[Deployment]):
    """Keeps the watched deployments."""

    def __init__(self, update: Update, metrics: GatewayMetrics) -> None:
        super().__init__(parse_deployment, self._publish_sorted, metrics, log, "deployments")
        self._update = update
        self._published: tuple[Deployment, ...] | None = None

    def _publish_sorted(self) -> None:
        now = tuple(sorted(self.by_uid.values()))
        if now != self._published:
            self._published = now
            self._update(now)
