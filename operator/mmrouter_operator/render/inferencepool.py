"""The InferencePool of the Gateway API Inference Extension: the engines, and the picker that chooses among them."""

from typing import Any, Final

from mmrouter_lib.engines.base.launch import HTTP_PORT
from mmrouter_operator.model.kinds import DEPLOYMENT_LABEL, INFERENCE_POOL_API, ROLE_LABEL
from mmrouter_operator.render.child import ChildKind, RenderInputs, object_metadata
from mmrouter_operator.render.frontend import PICKER_PORT

KIND: Final = ChildKind("InferencePool", INFERENCE_POOL_API, optional=True)


def render(inputs: RenderInputs) -> list[dict[str, Any]]:
    """Return the pool if the deployment has a picker and the cluster serves the API.

    Its failure mode is FailClose: engines answer nothing without the key that the picker adds.
    """
    dep = inputs.dep
    if dep.spec.frontend.mode != "endpointPicker" or not inputs.capabilities.serves(INFERENCE_POOL_API):
        return []
    spec = {
        "selector": {"matchLabels": {DEPLOYMENT_LABEL: dep.metadata.name, ROLE_LABEL: "worker"}},
        "targetPorts": [{"number": HTTP_PORT}],
        "endpointPickerRef": {
            "kind": "Service",
            "name": dep.metadata.name,
            "port": {"number": PICKER_PORT},
            "failureMode": "FailClose",
        },
    }
    return [KIND.manifest(object_metadata(dep, dep.metadata.name, "engine"), spec=spec)]
