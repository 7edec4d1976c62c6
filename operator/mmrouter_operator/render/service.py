"""The Service that clients use."""

from typing import Any, Final

from mmrouter_operator.render.child import ChildKind, RenderInputs, frontend_labels, object_metadata
from mmrouter_operator.render.frontend import PICKER_PORT

KIND: Final = ChildKind("Service", "v1", wave=1, guard="removal", local=True, lifecycle="permanent")


def render(inputs: RenderInputs) -> list[dict[str, Any]]:
    """Return the one Service. It has the deployment's name, so ``<name>.<namespace>.svc`` is the endpoint's host."""
    dep = inputs.dep
    service = dep.spec.frontend.service
    port = {"name": "http", "port": service.port, "targetPort": "http", "protocol": "TCP"}
    if dep.spec.frontend.tls is not None:
        port |= {"name": "https", "appProtocol": "https"}
    ports = [port]
    if dep.spec.frontend.mode == "endpointPicker":
        picker = {"name": "picker", "port": PICKER_PORT, "targetPort": "picker", "protocol": "TCP"}
        # Names of HTTP/2 without TLS (Gateway API, GEP-1911), and with it (Services of the inference extension).
        ports.append(picker | {"appProtocol": "kubernetes.io/h2c" if dep.spec.frontend.tls is None else "http2"})
    spec = {"type": service.type, "selector": frontend_labels(dep), "ports": ports}
    return [KIND.manifest(object_metadata(dep, dep.metadata.name, "frontend"), spec=spec)]
