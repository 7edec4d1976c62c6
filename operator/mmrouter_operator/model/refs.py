"""The address of one object, and the path of its kind in the API. Pure data."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MANAGED_BY = "app.kubernetes.io/managed-by=mmrouter-operator"
"""Selector of every child."""


@dataclass(frozen=True, slots=True)
class Ref:
    """One object. ``namespace`` is empty for a kind that has none."""

    api_version: str
    kind: str
    namespace: str
    name: str

    @classmethod
    def of(cls, obj: Mapping[str, Any]) -> "Ref":
        """Return the address of a manifest or of a live object."""
        metadata = obj["metadata"]
        return cls(obj["apiVersion"], obj["kind"], metadata.get("namespace", ""), metadata["name"])


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of object: its API and the plural in its path."""

    api_version: str
    plural: str
    namespaced: bool = True

    @property
    def group(self) -> str:
        """The API group, empty for the core."""
        return self.api_version.partition("/")[0] if "/" in self.api_version else ""

    def path(self, namespace: str = "", name: str = "", subresource: str = "") -> str:
        """Return the URL path of the collection, or of one object."""
        parts = ["apis" if "/" in self.api_version else "api", self.api_version]
        if self.namespaced and namespace:
            parts += ["namespaces", namespace]
        parts += [self.plural, name, subresource]
        return "/" + "/".join(part for part in parts if part)


RESOURCE = "MMRouterDeployment"

CHILDREN: Mapping[str, Kind] = {
    "ControllerRevision": Kind("apps/v1", "controllerrevisions"),
    "ServiceAccount": Kind("v1", "serviceaccounts"),
    "Role": Kind("rbac.authorization.k8s.io/v1", "roles"),
    "RoleBinding": Kind("rbac.authorization.k8s.io/v1", "rolebindings"),
    "ConfigMap": Kind("v1", "configmaps"),
    "Secret": Kind("v1", "secrets"),
    "Service": Kind("v1", "services"),
    "NetworkPolicy": Kind("networking.k8s.io/v1", "networkpolicies"),
    "PodDisruptionBudget": Kind("policy/v1", "poddisruptionbudgets"),
    "Deployment": Kind("apps/v1", "deployments"),
    "HorizontalPodAutoscaler": Kind("autoscaling/v2", "horizontalpodautoscalers"),
}
"""What a deployment is made of, in every cluster."""

OPTIONAL_CHILDREN: Mapping[str, Kind] = {
    "ScaledObject": Kind("keda.sh/v1alpha1", "scaledobjects"),
    "PodMonitor": Kind("monitoring.coreos.com/v1", "podmonitors"),
}
"""Children that exist only where their API is served."""

KINDS: Mapping[str, Kind] = {
    RESOURCE: Kind("mmrouter.io/v1alpha1", "mmrouterdeployments"),
    **CHILDREN,
    **OPTIONAL_CHILDREN,
    "Pod": Kind("v1", "pods"),
    "PersistentVolumeClaim": Kind("v1", "persistentvolumeclaims"),
    "RuntimeClass": Kind("node.k8s.io/v1", "runtimeclasses", namespaced=False),
    "PriorityClass": Kind("scheduling.k8s.io/v1", "priorityclasses", namespaced=False),
    "ResourceClaim": Kind("resource.k8s.io/v1", "resourceclaims"),
    "ResourceClaimTemplate": Kind("resource.k8s.io/v1", "resourceclaimtemplates"),
    "Lease": Kind("coordination.k8s.io/v1", "leases"),
    "Event": Kind("events.k8s.io/v1", "events"),
}
"""Every kind that the operator reads or writes, by name."""
