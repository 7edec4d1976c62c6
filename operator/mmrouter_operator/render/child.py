"""Declaration of a kind of child object, what every renderer takes, and names, labels and selectors of children."""

from dataclasses import dataclass
from typing import Any, Literal

from mmrouter_lib.api import MMRouterDeployment, Pool, Role
from mmrouter_operator.model.config import OperatorConfig
from mmrouter_operator.model.credentials import SecretData
from mmrouter_operator.model.kinds import DEPLOYMENT_LABEL, FRONTEND_ROLE, POOL_LABEL, ROLE_LABEL, Capabilities, Kind


@dataclass(frozen=True, slots=True)
class RenderInputs:
    """What the children of a deployment are rendered from. ``keys`` is the fingerprint of ``secrets``."""

    dep: MMRouterDeployment
    secrets: SecretData
    keys: str
    capabilities: Capabilities
    config: OperatorConfig


@dataclass(frozen=True, slots=True)
class ChildKind(Kind):
    """A kind of child object, declared once in its render file.

    The order of writes, the watches, the operator's RBAC rules, pruning and what the local substrate runs follow from
    this declaration.
    """

    wave: int = 4
    """Children of a lower wave are written first: pods must find what they mount. Workloads are wave 3."""
    guard: Literal["creation", "removal", "none"] = "none"
    """``creation``: no new Deployment is created while a child of this kind cannot be written, because its pods would
    run unprotected. ``removal``: nothing that it replaces is deleted. The first implies the second."""
    local: bool = False
    """Whether the local substrate (``mmrouter up``) acts on it; the others have a meaning only in a cluster."""
    fixed: bool = False
    """Whether an existing one is left as it is, because Kubernetes changes it for others only, as it grows a claim."""
    optional: bool = False
    """Whether it exists only in clusters that serve its API."""
    lifecycle: Literal["pruned", "permanent", "created"] = "pruned"
    """``pruned``: deleted once it is no longer rendered. ``permanent``: rendered for every deployment, so never
    deleted. ``created``: created once and never changed."""

    def manifest(self, metadata: dict[str, Any], **fields: Any) -> dict[str, Any]:
        """Return an object of this kind; ``fields`` are those beside its metadata."""
        return {"apiVersion": self.api, "kind": self.kind, "metadata": metadata, **fields}

    @property
    def verbs(self) -> list[str]:
        """What the operator must be allowed to do with it. ``get`` looks at an object of its name before the first
        write; ``create`` and ``patch`` are server-side apply."""
        more = {"pruned": ["patch", "delete"], "permanent": ["patch"], "created": []}
        return ["get", "list", "watch", "create", *more[self.lifecycle]]


Selector = dict[str, Any]
"""A ``metav1.LabelSelector``. Only our own labels are used: they never change (docs/children.md)."""


def frontend_name(dep: MMRouterDeployment) -> str:
    return f"{dep.metadata.name}-frontend"


def pool_name(dep: MMRouterDeployment, pool: Pool) -> str:
    """Name of a pool's Deployment, before a generation is added to it."""
    return f"{dep.metadata.name}-{pool.name}"


def config_name(dep: MMRouterDeployment) -> str:
    return f"{dep.metadata.name}-config"


def secret_name(dep: MMRouterDeployment) -> str:
    return f"{dep.metadata.name}-secrets"


def labels(dep: MMRouterDeployment, component: str) -> dict[str, str]:
    return {
        "app.kubernetes.io/name": "mmrouter",
        "app.kubernetes.io/instance": dep.metadata.name,
        "app.kubernetes.io/component": component,
        "app.kubernetes.io/part-of": "mmrouter",
        "app.kubernetes.io/managed-by": "mmrouter-operator",
        DEPLOYMENT_LABEL: dep.metadata.name,
    }


def pool_labels(pool: Pool) -> dict[str, str]:
    """Return the labels that a pool's children have besides."""
    return {POOL_LABEL: pool.name, ROLE_LABEL: pool.role}


def object_metadata(
    dep: MMRouterDeployment, name: str, component: str, more: dict[str, str] | None = None
) -> dict[str, Any]:
    """Return the metadata of a child, with an owner reference if the resource has a uid."""
    metadata: dict[str, Any] = {
        "name": name,
        "namespace": dep.metadata.namespace,
        "labels": labels(dep, component) | (more or {}),
    }
    if dep.metadata.uid:
        metadata["ownerReferences"] = [
            {
                "apiVersion": dep.api_version,
                "kind": dep.kind,
                "name": dep.metadata.name,
                "uid": dep.metadata.uid,
                "controller": True,
                "blockOwnerDeletion": True,
            }
        ]
    return metadata


def frontend_labels(dep: MMRouterDeployment) -> dict[str, str]:
    """Return the labels by which Deployment and Service select the frontend's pods. They can never change."""
    return {DEPLOYMENT_LABEL: dep.metadata.name, ROLE_LABEL: FRONTEND_ROLE}


def frontend_pods(dep: MMRouterDeployment) -> Selector:
    """Return the selector of the frontend's pods."""
    return {"matchLabels": frontend_labels(dep)}


def pool_pods(dep: MMRouterDeployment, pool: Pool) -> Selector:
    """Return the selector of one pool's pods."""
    return {"matchLabels": {DEPLOYMENT_LABEL: dep.metadata.name, POOL_LABEL: pool.name}}


def engine_pods(dep: MMRouterDeployment, *roles: Role) -> Selector:
    """Return the selector of the engine pods of all pools, or of the pools with one of these roles."""
    if roles:
        expression: dict[str, Any] = {"key": ROLE_LABEL, "operator": "In", "values": sorted(roles)}
    else:
        expression = {"key": POOL_LABEL, "operator": "Exists"}
    return {"matchLabels": {DEPLOYMENT_LABEL: dep.metadata.name}, "matchExpressions": [expression]}
