"""The Role of the frontend: its rights on the API server."""

from typing import Any, Final

from mmrouter_lib.api import MMRouterDeployment
from mmrouter_operator.render.child import ChildKind, RenderInputs
from mmrouter_operator.render.metadata import object_metadata

KIND: Final = ChildKind("Role", "rbac.authorization.k8s.io/v1", wave=1, guard="removal", lifecycle="permanent")


def frontend_role(dep: MMRouterDeployment) -> str:
    """Name of the Role and of its RoleBinding."""
    return f"{dep.metadata.name}-frontend"


def render(inputs: RenderInputs) -> list[dict[str, Any]]:
    """Return the one Role: read and watch pods in the deployment's namespace.

    RBAC cannot narrow a list or a watch to labels, so it covers all pods of the namespace. The API server lets the
    operator grant only rights that it has: every rule here must be in the operator's ClusterRole too.
    """
    return [
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "Role",
            "metadata": object_metadata(inputs.dep, frontend_role(inputs.dep), "frontend"),
            "rules": [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}],
        }
    ]
