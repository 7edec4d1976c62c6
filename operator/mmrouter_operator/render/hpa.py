"""HorizontalPodAutoscalers, in clusters that serve metrics of pods (through Prometheus Adapter, for example).

Also which metric scales a pool, and which kind of autoscaler a cluster can use.
"""

from collections.abc import Iterator
from decimal import Decimal
from typing import Any, Final, Literal

from mmrouter_lib.api import MMRouterDeployment, Pool, Role
from mmrouter_lib.api.pools import Autoscaling
from mmrouter_operator.model.kinds import KEDA_API, POD_METRICS_APIS
from mmrouter_operator.render.child import ChildKind, RenderInputs, object_metadata, pool_labels, pool_name

KIND: Final = ChildKind("HorizontalPodAutoscaler", "autoscaling/v2")


def render(inputs: RenderInputs) -> list[dict[str, Any]]:
    """Return one HorizontalPodAutoscaler per autoscaled pool; none in clusters without metrics of pods."""
    return [_hpa(inputs.dep, pool, scaling) for pool, scaling in scaled_pools(inputs, "HorizontalPodAutoscaler")]


def _hpa(dep: MMRouterDeployment, pool: Pool, scaling: Autoscaling) -> dict[str, Any]:
    name = pool_name(dep, pool)
    target = {"type": "AverageValue", "averageValue": quantity(scaling.target)}
    return KIND.manifest(
        object_metadata(dep, name, "engine", pool_labels(pool)),
        spec={
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": name},
            "minReplicas": scaling.min_replicas,
            "maxReplicas": scaling.max_replicas,
            "metrics": [{"type": "Pods", "pods": {"metric": {"name": METRICS[scaling.metric]}, "target": target}}],
            "behavior": {"scaleDown": scale_down()},
        },
    )


Scaler = Literal["HorizontalPodAutoscaler", "ScaledObject"]

METRICS: Final[dict[str, str]] = {
    "kvUsage": "mmrouter_sidecar_kv_usage_ratio",
    "queueDepth": "mmrouter_sidecar_queue_depth",
    "encoderUtilization": "mmrouter_sidecar_busy_ratio",
}
"""``autoscaling.metric`` -> the gauge that every sidecar exports: one value per pod, over all ranks of its engine."""

ROLES: Final[dict[str, frozenset[Role]]] = {
    "kvUsage": frozenset({"worker", "prefill", "decode"}),
    "queueDepth": frozenset({"worker", "prefill", "decode", "encoder"}),
    "encoderUtilization": frozenset({"encoder"}),
}
"""``autoscaling.metric`` -> the roles that have it. Renderers have no sidecar, so they cannot be autoscaled."""

SCALE_DOWN_SECONDS = 300
"""How long the load must be low before a replica is removed: its cache is lost, and the next replica starts cold."""


def scaled_pools(inputs: RenderInputs, kind: Scaler) -> Iterator[tuple[Pool, Autoscaling]]:
    """Yield the pools that this kind of autoscaler scales. Never both kinds: they would fight over replicas."""
    by_hpa = inputs.capabilities.serves(*POD_METRICS_APIS)
    by_keda = not by_hpa and inputs.capabilities.serves(KEDA_API) and inputs.config.prometheus_address
    if by_hpa if kind == "HorizontalPodAutoscaler" else by_keda:
        for pool in inputs.dep.spec.pools:
            if pool.autoscaling is not None and pool.role in ROLES[pool.autoscaling.metric]:
                yield pool, pool.autoscaling


def scale_down() -> dict[str, Any]:
    """Return the scale-down behaviour of an HPA: slow, and after a stabilization window."""
    return {
        "stabilizationWindowSeconds": SCALE_DOWN_SECONDS,
        "selectPolicy": "Max",
        "policies": [
            {"type": "Pods", "value": 1, "periodSeconds": 60},
            {"type": "Percent", "value": 10, "periodSeconds": 60},
        ],
    }


def quantity(decimal: str) -> str:
    """Return a decimal number in the form in which the API server stores it: ``0.7`` is ``700m``, ``1000`` is ``1k``.

    In any other form the stored object would differ from the rendered one and count as drift.
    """
    nano = int(Decimal(decimal) * 10**9)
    if nano == 0:
        return "0"
    for suffix, size in (("G", 18), ("M", 15), ("k", 12), ("", 9), ("m", 6), ("u", 3)):
        if nano % 10**size == 0:
            return f"{nano // 10**size}{suffix}"
    return f"{nano}n"
