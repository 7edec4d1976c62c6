"""PodMonitors for the Prometheus operator: routers, and engines through their sidecars."""

import re
from typing import Any, Final

from mmrouter_lib.api import MMRouterDeployment, Role
from mmrouter_operator.model.kinds import DEPLOYMENT_LABEL, POD_MONITOR_API, POOL_LABEL, ROLE_LABEL
from mmrouter_operator.render.child import (
    ChildKind,
    RenderInputs,
    Selector,
    engine_pods,
    frontend_name,
    frontend_pods,
    object_metadata,
)

KIND: Final = ChildKind("PodMonitor", POD_MONITOR_API, optional=True)

METRICS_PATH = "/metrics"
ENGINE_METRICS_PATH = "/engine/metrics"
"""Where the sidecar serves its engine's own metrics."""

DEPLOYMENT_TARGET_LABEL = "mmrouter_deployment"
POOL_TARGET_LABEL = "pool"
ROLE_TARGET_LABEL = "role"
TARGET_LABELS: Final = {
    DEPLOYMENT_LABEL: DEPLOYMENT_TARGET_LABEL,
    POOL_LABEL: POOL_TARGET_LABEL,
    ROLE_LABEL: ROLE_TARGET_LABEL,
}
"""Label of a pod -> label of every series of it."""

INTERVAL = "15s"
FOLLOWED_ROLES: Final[tuple[Role, ...]] = ("decode", "encoder", "prefill", "worker")
"""Roles whose pods have a sidecar."""


def render(inputs: RenderInputs) -> list[dict[str, Any]]:
    """Return a PodMonitor for the frontend and one for the engines, if they are wanted and the API is served.

    An engine's HTTP port serves ``/metrics`` and much else without a key, so NetworkPolicy opens it to frontends only,
    and its metrics are scraped through the sidecar. A renderer has no sidecar and is not scraped.
    """
    dep = inputs.dep
    if dep.spec.observability.pod_monitor == "Disabled" or not inputs.capabilities.serves(POD_MONITOR_API):
        return []
    return [
        _monitor(dep, frontend_name(dep), "frontend", frontend_pods(dep), [METRICS_PATH]),
        _monitor(
            dep,
            f"{dep.metadata.name}-engine",
            "engine",
            engine_pods(dep, *FOLLOWED_ROLES),
            [METRICS_PATH, ENGINE_METRICS_PATH],
        ),
    ]


def _monitor(
    dep: MMRouterDeployment, name: str, component: str, selector: Selector, paths: list[str]
) -> dict[str, Any]:
    # Prometheus' name of a pod label: every other character than letters, digits and _ becomes _.
    copied = [
        {"sourceLabels": [f"__meta_kubernetes_pod_label_{re.sub(r'[^A-Za-z0-9_]', '_', label)}"], "targetLabel": target}
        for label, target in TARGET_LABELS.items()
    ]
    endpoints = [
        # The path as a label distinguishes two endpoints of one port, which otherwise have equal target labels.
        {"port": "metrics", "path": path, "interval": INTERVAL}
        | {"relabelings": [{"targetLabel": "metrics_path", "replacement": path}, *copied]}
        for path in paths
    ]
    namespaces = {"matchNames": [dep.metadata.namespace]}
    spec = {"selector": selector, "namespaceSelector": namespaces, "podMetricsEndpoints": endpoints}
    return KIND.manifest(object_metadata(dep, name, component), spec=spec)
