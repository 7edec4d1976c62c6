"""The Service that clients use, and that of the live page where a port is given for it."""

from typing import Any, Final

from mmrouter_operator.render.child import ChildKind, RenderInputs, frontend_labels, object_metadata
from mmrouter_operator.render.frontend import PICKER_PORT

KIND: Final = ChildKind("Service", "v1", wave=1, guard="removal", local=True)


def render(inputs: RenderInputs) -> list[dict[str, Any]]:
    """Return the Service with the deployment's name, so that ``<name>.<namespace>.svc`` is the endpoint's host, and the
    page's. The page reads the decisions of one frontend, so a client's connections lead to the same one.
    """
    dep = inputs.dep
    service = dep.spec.frontend.service
    port = {"name": "http", "port": service.port, "targetPort": "http", "protocol": "TCP"}
    if dep.spec.frontend.tls is not None:
        port |= {"name": "https", "appProtocol": "https"}
    ports = [port]
    if dep.spec.frontend.has_picker:
        picker = {"name": "picker", "port": PICKER_PORT, "targetPort": "picker", "protocol": "TCP"}
        # Names of HTTP/2 without TLS (Gateway API, GEP-1911), and with it (Services of the inference extension).
        ports.append(
            picker | {"appProtocol": "kubernetes.io/h2c" if dep.spec.frontend.picker_tls == "none" else "http2"}
        )
    spec = {"type": service.type, "selector": frontend_labels(dep), "ports": ports}
    services = [KIND.manifest(object_metadata(dep, dep.metadata.name, "frontend"), spec=spec)]
    if service.page_port is not None:
        page = {"name": "http", "port": service.page_port, "targetPort": "control", "protocol": "TCP"}
        sticky = {"selector": frontend_labels(dep), "ports": [page], "sessionAffinity": "ClientIP"}
        services.append(KIND.manifest(object_metadata(dep, f"{dep.metadata.name}-page", "frontend"), spec=sticky))
    return services
