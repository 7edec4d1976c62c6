"""The Role of the frontend: what a router may ask the API server."""

from typing import Any

from mmrouter_lib.api import MMRouterDeployment
from mmrouter_operator.render.common import object_metadata


def frontend_role(dep: MMRouterDeployment) -> str:
    """Name of the Role and of its RoleBinding."""
    return f"{dep.metadata.name}-frontend"


def render_roles(dep: MMRouterDeployment) -> list[dict[str, Any]]:
    """Return the one Role: read and watch pods in the deployment's namespace, nothing else.

    RBAC cannot narrow a list or a watch to labels, so it is all pods of the namespace. The API server lets the operator
    grant only what it holds itself: every rule here must stand in the operator's ClusterRole too.
    """
    return [
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "Role",
            "metadata": object_metadata(dep, frontend_role(dep), "frontend"),
            "rules": [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}],
        }
    ]
