"""Kinds of objects and their API paths, references to objects, and the API versions that a cluster serves."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

RESOURCE: Final = "MMRouterDeployment"

KEDA_API: Final = "keda.sh/v1alpha1"
POD_MONITOR_API: Final = "monitoring.coreos.com/v1"
POD_METRICS_APIS: Final = ("custom.metrics.k8s.io/v1beta2", "custom.metrics.k8s.io/v1beta1")
DRA_API: Final = "resource.k8s.io/v1"


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of object. ``api`` is its ``group/version``, without a group for the core."""

    kind: str
    api: str

    @property
    def plural(self) -> str:
        """The name of the collection in URL paths and RBAC rules."""
        name = self.kind.lower()
        if name.endswith("y"):
            return f"{name[:-1]}ies"
        return f"{name}es" if name.endswith("s") else f"{name}s"

    @property
    def group(self) -> str:
        """The API group, empty for the core."""
        return self.api.rpartition("/")[0]

    @property
    def namespaced(self) -> bool:
        """Whether objects of this kind are in a namespace."""
        return self.kind not in ("RuntimeClass", "PriorityClass")

    def path(self, namespace: str = "", name: str = "", subresource: str = "") -> str:
        """Return the URL path of the collection, or of one object."""
        parts = ["apis" if "/" in self.api else "api", self.api]
        if self.namespaced and namespace:
            parts += ["namespaces", namespace]
        parts += [self.plural, name, subresource]
        return "/" + "/".join(part for part in parts if part)


@dataclass(frozen=True, slots=True)
class Ref:
    """Reference to one object. ``namespace`` is empty for a kind without namespaces."""

    api: str
    kind: str
    namespace: str
    name: str

    @classmethod
    def of(cls, obj: Mapping[str, Any]) -> "Ref":
        """Return the reference to a manifest or a live object."""
        metadata = obj["metadata"]
        return cls(obj["apiVersion"], obj["kind"], metadata.get("namespace", ""), metadata["name"])

    def path(self, subresource: str = "") -> str:
        """Return the URL path of the object."""
        return Kind(self.kind, self.api).path(self.namespace, self.name, subresource)


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The API versions that a cluster serves. ``apis``: ``group/version`` strings."""

    apis: frozenset[str] = frozenset()

    def serves(self, *apis: str) -> bool:
        """Whether any of these ``group/version`` is served."""
        return any(api in self.apis for api in apis)
