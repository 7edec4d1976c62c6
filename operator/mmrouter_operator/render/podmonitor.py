"""PodMonitors for the Prometheus operator: routers, and engines through their sidecars."""

import re
from typing import Any, Final

from mmrouter_lib.api import MMRouterDeployment, Role
from mmrouter_operator.model.capabilities import POD_MONITOR_API, Capabilities
from mmrouter_operator.render.common import DEPLOYMENT_LABEL, POOL_LABEL, ROLE_LABEL, frontend_name, object_metadata
from mmrouter_operator.render.selectors import Selector, engine_pods, frontend_pods

METRICS_PATH = "/metrics"
ENGINE_METRICS_PATH = "/engine/metrics"
"""Where the sidecar shows what its engine says of itself."""

DEPLOYMENT_TARGET_LABEL = "mmrouter_deployment"
POOL_TARGET_LABEL = "pool"
ROLE_TARGET_LABEL = "role"
"""Labels of every series, from the labels of its pod."""

INTERVAL = "15s"
FOLLOWED_ROLES: Final[tuple[Role, ...]] = ("decode", "encoder", "prefill", "worker")
"""Roles whose pods have a sidecar."""


def render_podmonitors(dep: MMRouterDeployment, capabilities: Capabilities) -> list[dict[str, Any]]:
    """Return a PodMonitor for the frontend and one for the engines, where they are wanted and the API is served.

    An engine's own HTTP port takes ``/metrics`` without a key, and much else, so NetworkPolicy opens it for frontends
    only. Its metrics are therefore scraped through the sidecar. A renderer has no sidecar and is not scraped.
    """
    if dep.spec.observability.pod_monitor == "Disabled" or not capabilities.serves(POD_MONITOR_API):
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


def podmonitor_unavailable(dep: MMRouterDeployment, capabilities: Capabilities) -> bool:
    """Whether PodMonitors are demanded and the cluster has no such API: for the condition's PodMonitorUnavailable."""
    return dep.spec.observability.pod_monitor == "Enabled" and not capabilities.serves(POD_MONITOR_API)


def _monitor(
    dep: MMRouterDeployment, name: str, component: str, selector: Selector, paths: list[str]
) -> dict[str, Any]:
    endpoints = [
        {"port": "metrics", "path": path, "interval": INTERVAL, "relabelings": [_metrics_path(path), *_relabelings()]}
        for path in paths
    ]
    return {
        "apiVersion": POD_MONITOR_API,
        "kind": "PodMonitor",
        "metadata": object_metadata(dep, name, component),
        "spec": {
            "selector": selector,
            "namespaceSelector": {"matchNames": [dep.metadata.namespace]},
            "podMetricsEndpoints": endpoints,
        },
    }


def _relabelings() -> list[dict[str, Any]]:
    """Return the rules that carry a pod's marks over to its series: whose, which pool, which role; the frontend has
    no pool. Pods of the deployment have no other labels that a dashboard or an autoscaler asks for.
    """
    return [
        {"sourceLabels": [_meta(label)], "targetLabel": target}
        for label, target in (
            (DEPLOYMENT_LABEL, DEPLOYMENT_TARGET_LABEL),
            (POOL_LABEL, POOL_TARGET_LABEL),
            (ROLE_LABEL, ROLE_TARGET_LABEL),
        )
    ]


def _metrics_path(path: str) -> dict[str, Any]:
    """Return the rule that tells apart two endpoints of one port, which otherwise share all their target labels."""
    return {"targetLabel": "metrics_path", "replacement": path}


def _meta(label: str) -> str:
    """Return Prometheus' name of a pod label: what is no letter, digit or underscore becomes an underscore."""
    return "__meta_kubernetes_pod_label_" + re.sub(r"[^A-Za-z0-9_]", "_", label)
