"""Names, labels, owner references and selectors of child objects."""

from typing import Any

from mmrouter_lib.api import MMRouterDeployment, Pool, Role
from mmrouter_operator.model.labels import DEPLOYMENT_LABEL, FRONTEND_ROLE, POOL_LABEL, ROLE_LABEL

Selector = dict[str, Any]
"""A ``metav1.LabelSelector``. Only our own labels are used: they never change (docs/children.md)."""


def frontend_name(dep: MMRouterDeployment) -> str:
    """Name of the frontend's Deployment."""
    return f"{dep.metadata.name}-frontend"


def pool_name(dep: MMRouterDeployment, pool: Pool) -> str:
    """Name of a pool's Deployment, before a generation is added to it."""
    return f"{dep.metadata.name}-{pool.name}"


def config_name(dep: MMRouterDeployment) -> str:
    """Name of the ConfigMap."""
    return f"{dep.metadata.name}-config"


def secret_name(dep: MMRouterDeployment) -> str:
    """Name of the Secret."""
    return f"{dep.metadata.name}-secrets"


def labels(dep: MMRouterDeployment, component: str) -> dict[str, str]:
    """Return the labels of every child."""
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
