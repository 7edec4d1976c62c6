"""The resource -> Kubernetes objects: pure, one file per child kind, plain dicts out."""

from typing import Any

from mmrouter_lib.api import MMRouterDeployment, SpecError
from mmrouter_operator.model.capabilities import Capabilities
from mmrouter_operator.model.config import OperatorConfig
from mmrouter_operator.render.configmap import render_configmap
from mmrouter_operator.render.frontend import frontend_template, render_frontend
from mmrouter_operator.render.hpa import render_hpas
from mmrouter_operator.render.networkpolicy import render_networkpolicies
from mmrouter_operator.render.pdb import render_pdbs
from mmrouter_operator.render.podmonitor import render_podmonitors
from mmrouter_operator.render.pool import pool_template, render_pool
from mmrouter_operator.render.role import render_roles
from mmrouter_operator.render.rolebinding import render_rolebindings
from mmrouter_operator.render.scaledobject import render_scaledobjects
from mmrouter_operator.render.secret import SecretData, fingerprint, render_secret
from mmrouter_operator.render.service import render_service
from mmrouter_operator.render.serviceaccount import render_serviceaccounts

__all__ = ["Capabilities", "SecretData", "overridden", "render"]

NAME_LENGTH = 63
"""Of a Service, and of what becomes a label; the resource's own bounds keep every child below it."""

_NOTHING_MORE = Capabilities()
_DEFAULTS = OperatorConfig()


def render(
    dep: MMRouterDeployment,
    *,
    secrets: SecretData,
    capabilities: Capabilities = _NOTHING_MORE,
    config: OperatorConfig = _DEFAULTS,
) -> list[dict[str, Any]]:
    """Return the children of a deployment, in the order to apply them: what pods need comes before the pods.

    ``capabilities`` is what the cluster serves beyond the core, ``config`` what the site told the operator.
    Raises ``mmrouter_lib.api.SpecError`` that names the field which this release cannot render.
    """
    keys = fingerprint(secrets)
    children = [
        *render_serviceaccounts(dep),
        *render_roles(dep),
        *render_rolebindings(dep),
        render_configmap(dep),
        render_secret(dep, secrets),
        # Before the pods: none of them is ever open.
        *render_networkpolicies(dep, config),
        *render_pdbs(dep),
        *(render_pool(dep, number, keys, config) for number in range(len(dep.spec.pools))),
        render_frontend(dep, keys, config),
        render_service(dep),
        *render_hpas(dep, capabilities, config),
        *render_scaledobjects(dep, capabilities, config),
        *render_podmonitors(dep, capabilities),
    ]
    for child in children:
        if len(child["metadata"]["name"]) > NAME_LENGTH:
            name = child["metadata"]["name"]
            raise SpecError([("metadata.name", f"is too long: {child['kind']} {name} would have more than 63 letters")])
    return children


def overridden(dep: MMRouterDeployment, config: OperatorConfig = _DEFAULTS) -> tuple[str, ...]:
    """Return the fields of podTemplates that have no effect, because what they set is the operator's own.

    Raises ``SpecError`` for what cannot be rendered.
    """
    pools = (pool_template(dep, number, "", config) for number in range(len(dep.spec.pools)))
    return tuple(place for finished in (frontend_template(dep, "", config), *pools) for place in finished.put_back)
