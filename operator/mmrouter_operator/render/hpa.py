"""HorizontalPodAutoscalers, in clusters that serve metrics of pods (through Prometheus Adapter, for example)."""

from typing import Any, Final

from mmrouter_lib.api import MMRouterDeployment, Pool
from mmrouter_operator.render.autoscaler_choice import METRICS, quantity, scale_down, scaled_pools
from mmrouter_operator.render.child import ChildKind, RenderInputs
from mmrouter_operator.render.metadata import object_metadata, pool_labels, pool_name

KIND: Final = ChildKind("HorizontalPodAutoscaler", "autoscaling/v2")


def render(inputs: RenderInputs) -> list[dict[str, Any]]:
    """Return one HorizontalPodAutoscaler per autoscaled pool; none in clusters without metrics of pods."""
    pools = scaled_pools(inputs.dep, "HorizontalPodAutoscaler", inputs.capabilities, inputs.config)
    return [_hpa(inputs.dep, pool) for pool in pools]


def _hpa(dep: MMRouterDeployment, pool: Pool) -> dict[str, Any]:
    scaling = pool.autoscaling
    assert scaling is not None  # scaled_pools() returns no other
    name = pool_name(dep, pool)
    target = {"type": "AverageValue", "averageValue": quantity(scaling.target)}
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": object_metadata(dep, name, "engine", pool_labels(pool)),
        "spec": {
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": name},
            "minReplicas": scaling.min_replicas,
            "maxReplicas": scaling.max_replicas,
            "metrics": [{"type": "Pods", "pods": {"metric": {"name": METRICS[scaling.metric]}, "target": target}}],
            "behavior": {"scaleDown": scale_down()},
        },
    }
