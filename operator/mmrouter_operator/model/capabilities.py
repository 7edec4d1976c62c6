"""What this cluster serves beyond the core: found by discovery, given to the renderers as a value."""

from dataclasses import dataclass

POD_MONITOR_API = "monitoring.coreos.com/v1"
KEDA_API = "keda.sh/v1alpha1"
POD_METRICS_APIS = ("custom.metrics.k8s.io/v1beta2", "custom.metrics.k8s.io/v1beta1")
DRA_API = "resource.k8s.io/v1"


@dataclass(frozen=True, slots=True)
class Capabilities:
    """``apis``: served ``group/version`` texts."""

    apis: frozenset[str] = frozenset()

    def serves(self, *apis: str) -> bool:
        """Whether any of these ``group/version`` is served."""
        return any(api in self.apis for api in apis)
