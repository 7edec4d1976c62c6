"""The resource -> Kubernetes objects: pure, one file per child kind, plain dicts out."""

from typing import Any

from mmrouter.api import MMRouterDeployment
from mmrouter_operator.render.configmap import render_configmap
from mmrouter_operator.render.frontend import render_frontend
from mmrouter_operator.render.pool import render_pool
from mmrouter_operator.render.secret import SecretData, render_secret
from mmrouter_operator.render.service import render_service

__all__ = ["SecretData", "render"]


def render(dep: MMRouterDeployment, *, secrets: SecretData) -> list[dict[str, Any]]:
    """Return the children of a deployment, in the order to apply them.

    Raises ``mmrouter.api.SpecError`` that names the field which this release cannot render.
    """
    return [
        render_configmap(dep),
        render_secret(dep, secrets),
        *(render_pool(dep, secrets, number) for number in range(len(dep.spec.pools))),
        render_frontend(dep, secrets),
        render_service(dep),
    ]
