"""Renders a resource into Kubernetes objects. Pure: one file per kind of child, plain dicts out."""

from typing import Any, Final

from mmrouter_lib.api import MMRouterDeployment, SpecError
from mmrouter_operator.model.config import OperatorConfig
from mmrouter_operator.model.credentials import SecretData, fingerprint
from mmrouter_operator.model.kinds import Capabilities
from mmrouter_operator.render import (
    configmap,
    controllerrevision,
    frontend,
    hpa,
    httproute,
    inferencepool,
    networkpolicy,
    pdb,
    persistentvolumeclaim,
    podmonitor,
    pool,
    role,
    rolebinding,
    scaledobject,
    secret,
    service,
    serviceaccount,
)
from mmrouter_operator.render.child import ChildKind, RenderInputs

__all__ = ["CHILD_KINDS", "overridden", "render"]

_CHILDREN: Final = (
    controllerrevision,
    serviceaccount,
    role,
    rolebinding,
    configmap,
    secret,
    networkpolicy,
    pdb,
    persistentvolumeclaim,
    pool,
    frontend,
    service,
    inferencepool,
    httproute,
    hpa,
    scaledobject,
    podmonitor,
)
"""Every child: a module with its ``KIND`` and ``render(inputs)``, in the order of the rendered objects."""

CHILD_KINDS: Final[dict[str, ChildKind]] = {child.KIND.kind: child.KIND for child in _CHILDREN}
"""Every kind of child by name."""

NAME_LENGTH = 63
"""Longest name of a Service and longest label value; the resource's own bounds keep every child below it."""

_CORE_ONLY = Capabilities()
_DEFAULTS = OperatorConfig()


def render(
    dep: MMRouterDeployment,
    *,
    secrets: SecretData,
    capabilities: Capabilities = _CORE_ONLY,
    config: OperatorConfig = _DEFAULTS,
) -> list[dict[str, Any]]:
    """Return the children of a deployment, prerequisites of pods before the pods.

    ``capabilities`` are the APIs that the cluster serves beyond the core, ``config`` the site's settings.
    Raises ``mmrouter_lib.api.SpecError`` that names the field which this release cannot render.
    """
    inputs = RenderInputs(dep, secrets, fingerprint(secrets), capabilities, config)
    objects = [obj for child in _CHILDREN for obj in child.render(inputs)]
    for obj in objects:
        name = obj["metadata"]["name"]
        if len(name) > NAME_LENGTH:
            raise SpecError([("metadata.name", f"is too long: {obj['kind']} {name} would have more than 63 letters")])
    return objects


def overridden(dep: MMRouterDeployment, config: OperatorConfig = _DEFAULTS) -> tuple[str, ...]:
    """Return the fields of podTemplates that have no effect, because the operator sets them itself.

    Raises ``SpecError`` for what cannot be rendered.
    """
    pools = (pool.pool_template(dep, number, "", config) for number in range(len(dep.spec.pools)))
    return tuple(
        path for finished in (frontend.frontend_template(dep, "", config), *pools) for path in finished.restored
    )
