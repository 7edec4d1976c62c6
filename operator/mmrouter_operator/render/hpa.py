"""HorizontalPodAutoscalers, where somebody serves the metrics of pods (Prometheus Adapter, for one)."""

from typing import Any

from mmrouter_lib.api import MMRouterDeployment, Pool
from mmrouter_operator.model.capabilities import Capabilities
from mmrouter_operator.model.config import OperatorConfig
from mmrouter_operator.render.autoscaling import METRICS, quantity, scale_down, scaled_pools
from mmrouter_operator.render.common import POOL_LABEL, ROLE_LABEL, object_metadata


def render_hpas(dep: MMRouterDeployment, capabilities: Capabilities, config: OperatorConfig) -> list[dict[str, Any]]:
    """Return one HorizontalPodAutoscaler per autoscaled pool; none where the cluster has no metrics of pods."""
    return [_hpa(dep, pool) for pool in scaled_pools(dep, "HorizontalPodAutoscaler", capabilities, config)]


def _hpa(dep: MMRouterDeployment, pool: Pool) -> dict[str, Any]:
    scaling = pool.autoscaling
    assert scaling is not None  # scaled_pools() returns no other
    name = f"{dep.metadata.name}-{pool.name}"
    target = {"type": "AverageValue", "averageValue": quantity(scaling.target)}
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": object_metadata(dep, name, "engine", {POOL_LABEL: pool.name, ROLE_LABEL: pool.role}),
        "spec": {
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": name},
            "minReplicas": scaling.min_replicas,
            "maxReplicas": scaling.max_replicas,
            "metrics": [{"type": "Pods", "pods": {"metric": {"name": METRICS[scaling.metric]}, "target": target}}],
            "behavior": {"scaleDown": scale_down()},
        },
    }
