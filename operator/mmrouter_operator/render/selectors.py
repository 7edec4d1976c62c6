"""Which pods of a deployment are meant. Only labels that never change are used: our own (docs/children.md)."""

from typing import Any

from mmrouter_lib.api import MMRouterDeployment, Pool, Role
from mmrouter_operator.render.common import DEPLOYMENT_LABEL, FRONTEND_ROLE, POOL_LABEL, ROLE_LABEL

Selector = dict[str, Any]
"""A ``metav1.LabelSelector``."""


def frontend_pods(dep: MMRouterDeployment) -> Selector:
    """Return the selector of the frontend's pods."""
    return {"matchLabels": {DEPLOYMENT_LABEL: dep.metadata.name, ROLE_LABEL: FRONTEND_ROLE}}


def pool_pods(dep: MMRouterDeployment, pool: Pool) -> Selector:
    """Return the selector of one pool's pods."""
    return {"matchLabels": {DEPLOYMENT_LABEL: dep.metadata.name, POOL_LABEL: pool.name}}


def engine_pods(dep: MMRouterDeployment, *roles: Role) -> Selector:
    """Return the selector of the engine pods of all pools, or of the pools with one of these roles."""
    named: dict[str, Any] = {"key": ROLE_LABEL, "operator": "In", "values": sorted(roles)}
    some: dict[str, Any] = {"key": POOL_LABEL, "operator": "Exists"}
    return {"matchLabels": {DEPLOYMENT_LABEL: dep.metadata.name}, "matchExpressions": [named if roles else some]}
