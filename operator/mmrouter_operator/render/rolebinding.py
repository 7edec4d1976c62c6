"""The RoleBinding that gives the frontend's account its Role."""

from typing import Any, Final

from mmrouter_operator.render.child import ChildKind, RenderInputs, frontend_name, object_metadata

KIND: Final = ChildKind("RoleBinding", "rbac.authorization.k8s.io/v1", wave=2, guard="removal", lifecycle="permanent")


def render(inputs: RenderInputs) -> list[dict[str, Any]]:
    """Return the one RoleBinding. Its ``roleRef`` can never change, so the Role's name is fixed."""
    dep = inputs.dep
    subject = {"kind": "ServiceAccount", "name": frontend_name(dep), "namespace": dep.metadata.namespace}
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": frontend_name(dep)}
    return [KIND.manifest(object_metadata(dep, frontend_name(dep), "frontend"), roleRef=role, subjects=[subject])]
