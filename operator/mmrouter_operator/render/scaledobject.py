"""KEDA's ScaledObjects, where KEDA is there, nobody serves metrics of pods, and the operator knows a Prometheus."""

from typing import Any

from mmrouter_lib.api import MMRouterDeployment, Pool
from mmrouter_operator.model.capabilities import KEDA_API, Capabilities
from mmrouter_operator.model.config import OperatorConfig
from mmrouter_operator.render.autoscaling import METRICS, scale_down, scaled_pools
from mmrouter_operator.render.common import POOL_LABEL, ROLE_LABEL, object_metadata
from mmrouter_operator.render.podmonitor import DEPLOYMENT_TARGET_LABEL, POOL_TARGET_LABEL

POLLING_SECONDS = 15
FAILURES = 3
"""Polls in a row without an answer until the fallback counts."""


def render_scaledobjects(
    dep: MMRouterDeployment, capabilities: Capabilities, config: OperatorConfig
) -> list[dict[str, Any]]:
    """Return one ScaledObject per autoscaled pool; none where an HPA does it or KEDA cannot."""
    return [_scaled(dep, pool, config) for pool in scaled_pools(dep, "ScaledObject", capabilities, config)]


def _scaled(dep: MMRouterDeployment, pool: Pool, config: OperatorConfig) -> dict[str, Any]:
    scaling = pool.autoscaling
    assert scaling is not None  # scaled_pools() returns no other
    name = f"{dep.metadata.name}-{pool.name}"
    trigger = {
        "type": "prometheus",
        # The sum over the pods divided by the replicas; the fallback below exists for this type only.
        "metricType": "AverageValue",
        "metadata": {
            "serverAddress": config.prometheus_address,
            "query": _query(dep, pool, METRICS[scaling.metric]),
            "threshold": scaling.target,
            # No answer is no load of zero: it is an error, after which the fallback counts.
            "ignoreNullValues": "false",
        },
    }
    return {
        "apiVersion": KEDA_API,
        "kind": "ScaledObject",
        "metadata": object_metadata(dep, name, "engine", {POOL_LABEL: pool.name, ROLE_LABEL: pool.role}),
        "spec": {
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": name},
            "pollingInterval": POLLING_SECONDS,
            "minReplicaCount": scaling.min_replicas,
            "maxReplicaCount": scaling.max_replicas,
            "fallback": {
                "failureThreshold": FAILURES,
                "replicas": min(max(pool.replicas, scaling.min_replicas), scaling.max_replicas),
                # A blind scaler takes no warm replica away.
                "behavior": "currentReplicasIfHigher",
            },
            "advanced": {"horizontalPodAutoscalerConfig": {"behavior": {"scaleDown": scale_down()}}},
            "triggers": [trigger],
        },
    }


def _query(dep: MMRouterDeployment, pool: Pool, metric: str) -> str:
    """Return the PromQL over the labels that our PodMonitor gives; a Prometheus of another make must give the same."""
    labels = {
        "namespace": dep.metadata.namespace,
        DEPLOYMENT_TARGET_LABEL: dep.metadata.name,
        POOL_TARGET_LABEL: pool.name,
    }
    # Names and namespaces are DNS labels: nothing in them needs quoting.
    matchers = ",".join(f'{label}="{value}"' for label, value in labels.items())
    return f"sum({metric}{{{matchers}}})"
