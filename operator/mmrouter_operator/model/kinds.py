"""Kinds of objects, references to them, served API versions, and the labels and annotations that the operator uses."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

RESOURCE: Final = "MMRouterDeployment"

KEDA_API: Final = "keda.sh/v1alpha1"
POD_MONITOR_API: Final = "monitoring.coreos.com/v1"
POD_METRICS_APIS: Final = ("custom.metrics.k8s.io/v1beta2", "custom.metrics.k8s.io/v1beta1")
GATEWAY_API: Final = "gateway.networking.k8s.io/v1"
INFERENCE_POOL_API: Final = "inference.networking.k8s.io/v1"
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


CHILD_SELECTOR: Final = "app.kubernetes.io/managed-by=mmrouter-operator"
"""Label selector of every child."""

DEPLOYMENT_LABEL: Final = "mmrouter.io/deployment"
POOL_LABEL: Final = "mmrouter.io/pool"
ROLE_LABEL: Final = "mmrouter.io/role"
FRONTEND_ROLE: Final = "frontend"

COMPATIBILITY: Final = "mmrouter.io/compatibility"
"""Label of engine pods; engines with equal values can read each other's KV blocks."""
KV_LAYOUT: Final = "mmrouter.io/kv-layout"
"""Label of prefill and decode pods when their layouts differ within a deployment; only equal ones are paired."""
SHARED_MEMORY: Final = "mmrouter.io/shared-memory"
"""Label of engine pods that share their node's tmpfs directory; its value is the scope. Frontends are placed near these
pods and do not have the label: they should not attract each other."""

ENGINE_TLS: Final = "mmrouter.io/engine-tls"
"""Label of engine pods whose HTTP port serves TLS. Routers send plain HTTP to pods without it, from before a change."""
INPUTS_HASH: Final = "mmrouter.io/template-hash"
"""Annotation of pod templates: the hash of their inputs (:mod:`mmrouter_operator.render.pod.spec_hashes`)."""
FORMER_HASH: Final = "mmrouter.io/former-template-hash"
"""Annotation of Deployments: the hash that the previous version gives to the same inputs, where that is another one.
Pods that it made are kept."""
RENDERING_HASH: Final = "mmrouter.io/rendering-hash"
"""Annotation of pod templates: the hash of their content, set when one is chosen
(:mod:`mmrouter_operator.planning.template_choice`)."""
SET_TARGET: Final = "mmrouter.io/set-target"
"""Annotation of a set pool's Deployment: replicas that an autoscaled pool had when its set began to switch."""
REPLACE_KEYS: Final = "mmrouter.io/replace-keys"
"""Annotation of a deployment's Secret: ``"true"`` makes its deletion a replacement of all keys."""
ADOPT: Final = "mmrouter.io/adopt"
"""Annotation of the resource: ``"true"``, or the operator version whose rendering may replace the stored one."""

ROUTABLE: Final = "mmrouter.io/routable"
"""Readiness gate: the frontends can route to the pod."""
VERIFIED: Final = "mmrouter.io/verified"
"""Readiness gate: the engine's block hashes were proved to be those that the router predicts."""
GATES: Final = (ROUTABLE, VERIFIED)
"""Readiness gates of engine pods, for every role (docs/architecture.md). Pods keep the list they were created with."""
