"""The Role of the frontend: its rights on the API server."""

from typing import Any, Final

from mmrouter_operator.render.child import ChildKind, RenderInputs, frontend_name, object_metadata

KIND: Final = ChildKind("Role", "rbac.authorization.k8s.io/v1", wave=1, guard="removal", lifecycle="permanent")


def render(inputs: RenderInputs) -> list[dict[str, Any]]:
    """Return the one Role: list and watch pods in the deployment's namespace.

    RBAC cannot narrow a list or a watch to labels, so it covers all pods of the namespace. The API server lets the
    operator grant only rights that it has: every rule here must be in the operator's ClusterRole too.
    """
    rules = [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"]}]
    return [KIND.manifest(object_metadata(inputs.dep, frontend_name(inputs.dep), "frontend"), rules=rules)]
