"""The HTTPRoute of the Gateway API: which requests of a Gateway go to the deployment."""

from typing import Any, Final

from mmrouter_lib.api import MMRouterDeployment
from mmrouter_operator.model.kinds import GATEWAY_API, INFERENCE_POOL_API
from mmrouter_operator.render.child import ChildKind, RenderInputs, object_metadata

KIND: Final = ChildKind("HTTPRoute", GATEWAY_API, optional=True)


def render(inputs: RenderInputs) -> list[dict[str, Any]]:
    """Return the route if one is wanted and the cluster serves its API and that of its destination."""
    dep, capabilities = inputs.dep, inputs.capabilities
    gateway = dep.spec.frontend.gateway
    if gateway is None or not all(capabilities.serves(api) for api in route_apis(dep)):
        return []
    rule: dict[str, Any] = {"backendRefs": [_destination(dep)]}
    if gateway.model_header is not None:
        header = {"type": "Exact", "name": gateway.model_header, "value": dep.spec.model.served_name}
        rule["matches"] = [{"headers": [header]}]
    if gateway.request_timeout is not None:
        rule["timeouts"] = {"request": gateway.request_timeout}
    spec: dict[str, Any] = {
        "parentRefs": [ref.model_dump(by_alias=True, exclude_none=True) for ref in gateway.parent_refs],
        "rules": [rule],
    }
    if gateway.hostnames:
        spec["hostnames"] = list(gateway.hostnames)
    return [KIND.manifest(object_metadata(dep, dep.metadata.name, "frontend"), spec=spec)]


def route_apis(dep: MMRouterDeployment) -> tuple[str, ...]:
    """Return the APIs without which the route cannot exist: its own, and that of the pool where it leads to one."""
    return (GATEWAY_API, *((INFERENCE_POOL_API,) if dep.spec.frontend.has_picker else ()))


def _destination(dep: MMRouterDeployment) -> dict[str, Any]:
    if dep.spec.frontend.has_picker:
        return {"group": INFERENCE_POOL_API.partition("/")[0], "kind": "InferencePool", "name": dep.metadata.name}
    return {"name": dep.metadata.name, "port": dep.spec.frontend.service.port}
