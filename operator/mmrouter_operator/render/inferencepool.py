"""The InferencePool of the Gateway API Inference Extension: where requests go, and the picker that chooses there."""

from typing import Any, Final

from mmrouter_lib.engines.base.launch import HTTP_PORT as ENGINE_PORT
from mmrouter_operator.model.kinds import DEPLOYMENT_LABEL, INFERENCE_POOL_API, ROLE_LABEL
from mmrouter_operator.render.child import ChildKind, RenderInputs, frontend_labels, object_metadata
from mmrouter_operator.render.frontend import HTTP_PORT, PICKER_PORT

KIND: Final = ChildKind("InferencePool", INFERENCE_POOL_API, optional=True)


def render(inputs: RenderInputs) -> list[dict[str, Any]]:
    """Return the pool, of workers or of frontends, if the deployment has a picker and the cluster serves the API.

    A pool of workers fails closed, because engines answer nothing without the key that the picker adds. Any frontend
    can serve a request, so without a picker the gateway chooses one itself.
    """
    dep = inputs.dep
    if not dep.spec.frontend.has_picker or not inputs.capabilities.serves(INFERENCE_POOL_API):
        return []
    of_frontends = dep.spec.frontend.mode == "frontendPicker"
    workers = {DEPLOYMENT_LABEL: dep.metadata.name, ROLE_LABEL: "worker"}
    spec = {
        "selector": {"matchLabels": frontend_labels(dep) if of_frontends else workers},
        "targetPorts": [{"number": HTTP_PORT if of_frontends else ENGINE_PORT}],
        "endpointPickerRef": {
            "kind": "Service",
            "name": dep.metadata.name,
            "port": {"number": PICKER_PORT},
            "failureMode": "FailOpen" if of_frontends else "FailClose",
        },
    }
    component = "frontend" if of_frontends else "engine"
    return [KIND.manifest(object_metadata(dep, dep.metadata.name, component), spec=spec)]
