"""The Service that clients talk to."""

from typing import Any

from mmrouter_lib.api import MMRouterDeployment
from mmrouter_operator.render.common import object_metadata
from mmrouter_operator.render.frontend import frontend_selector


def render_service(dep: MMRouterDeployment) -> dict[str, Any]:
    """Return the Service; it has the deployment's name, so the endpoint is ``http://<name>.<namespace>.svc``."""
    service = dep.spec.frontend.service
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": object_metadata(dep, dep.metadata.name, "frontend"),
        "spec": {
            "type": service.type,
            "selector": frontend_selector(dep),
            "ports": [{"name": "http", "port": service.port, "targetPort": "http", "protocol": "TCP"}],
        },
    }
