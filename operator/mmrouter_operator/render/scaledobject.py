"""KEDA's ScaledObjects, for clusters with KEDA and without pod metrics, if the operator has a Prometheus address."""

from typing import Any, Final

from mmrouter_lib.api import MMRouterDeployment, Pool
from mmrouter_lib.api.pools import Autoscaling
from mmrouter_operator.model.kinds import KEDA_API
from mmrouter_operator.render.child import ChildKind, RenderInputs, object_metadata, pool_labels, pool_name
from mmrouter_operator.render.hpa import METRICS, scale_down, scaled_pools
from mmrouter_operator.render.podmonitor import DEPLOYMENT_TARGET_LABEL, POOL_TARGET_LABEL

KIND: Final = ChildKind("ScaledObject", KEDA_API, optional=True)

POLLING_SECONDS = 15
FAILURES = 3
"""Polls in a row without an answer after which the fallback applies."""


def render(inputs: RenderInputs) -> list[dict[str, Any]]:
    """Return one ScaledObject per autoscaled pool; none if HorizontalPodAutoscalers are used, or KEDA cannot be."""
    return [_scaled_object(inputs, pool, scaling) for pool, scaling in scaled_pools(inputs, "ScaledObject")]


def _scaled_object(inputs: RenderInputs, pool: Pool, scaling: Autoscaling) -> dict[str, Any]:
    dep = inputs.dep
    name = pool_name(dep, pool)
    trigger = {
        "type": "prometheus",
        # The sum over the pods divided by the replicas; the fallback below exists for this type only.
        "metricType": "AverageValue",
        "metadata": {
            "serverAddress": inputs.config.prometheus_address,
            "query": _query(dep, pool, METRICS[scaling.metric]),
            "threshold": scaling.target,
            # An empty answer is an error, after which the fallback applies, and not a load of zero.
            "ignoreNullValues": "false",
        },
    }
    return KIND.manifest(
        object_metadata(dep, name, "engine", pool_labels(pool)),
        spec={
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": name},
            "pollingInterval": POLLING_SECONDS,
            "minReplicaCount": scaling.min_replicas,
            "maxReplicaCount": scaling.max_replicas,
            "fallback": {
                "failureThreshold": FAILURES,
                "replicas": min(max(pool.replicas, scaling.min_replicas), scaling.max_replicas),
                # Without measurements no warm replica is removed.
                "behavior": "currentReplicasIfHigher",
            },
            "advanced": {"horizontalPodAutoscalerConfig": {"behavior": {"scaleDown": scale_down()}}},
            "triggers": [trigger],
        },
    )


def _query(dep: MMRouterDeployment, pool: Pool, metric: str) -> str:
    """Return the PromQL over the labels that our PodMonitor sets; another Prometheus setup must set the same."""
    labels = {
        "namespace": dep.metadata.namespace,
        DEPLOYMENT_TARGET_LABEL: dep.metadata.name,
        POOL_TARGET_LABEL: pool.name,
    }
    # Names and namespaces are DNS labels: nothing in them needs quoting.
    matchers = ",".join(f'{label}="{value}"' for label, value in labels.items())
    return f"sum({metric}{{{matchers}}})"
