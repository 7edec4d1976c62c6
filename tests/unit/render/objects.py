"""What the render tests share: finding objects and containers, and deployments that differ in one thing."""

from collections.abc import Iterator
from typing import Any

from mmrouter_lib.api import MMRouterDeployment, parse_deployment, to_json
from mmrouter_operator.model.config import OperatorConfig
from mmrouter_operator.model.credentials import SecretData, new_secret_data
from mmrouter_operator.model.kinds import Capabilities
from mmrouter_operator.render import render
from mmrouter_operator.render.pod.pod_security import violations

Object = dict[str, Any]
DEFAULTS = OperatorConfig()
NOTHING_SERVED = Capabilities()
SECRETS = SecretData(
    identity_key=bytes(range(32)),
    sidecar_public="a" * 40,
    sidecar_secret="b" * 40,
    router_public="c" * 40,
    router_secret="d" * 40,
    control_token="control-token",
    engine_key="engine-key",
)


def deployments(objects: list[Object]) -> list[Object]:
    return [obj for obj in objects if obj["kind"] == "Deployment"]


def named(objects: list[Object], kind: str, name: str) -> Object:
    return next(obj for obj in objects if (obj["kind"], obj["metadata"]["name"]) == (kind, name))


def containers(obj: Object) -> Iterator[Object]:
    spec = obj["spec"]["template"]["spec"]
    yield from spec.get("initContainers", [])
    yield from spec["containers"]


def template_labels(obj: Object) -> dict[str, str]:
    labels: dict[str, str] = obj["spec"]["template"]["metadata"]["labels"]
    return labels


def change(dep: MMRouterDeployment, **spec: Any) -> MMRouterDeployment:
    """Return the deployment with other sections of its spec."""
    obj = to_json(dep)
    obj["spec"].update(spec)
    return parse_deployment(obj)


def with_pool(dep: MMRouterDeployment, **fields: Any) -> MMRouterDeployment:
    """Return the deployment with its first pool alone, changed."""
    return change(dep, pools=[{**to_json(dep)["spec"]["pools"][0], **fields}])


def pod_of(dep: MMRouterDeployment, secrets: SecretData, component: str) -> Object:
    """Return the pod spec of one pool, or of the frontend."""
    obj = named(render(dep, secrets=secrets), "Deployment", f"{dep.metadata.name}-{component}")
    pod: Object = obj["spec"]["template"]["spec"]
    return pod


def exceptions(dep: MMRouterDeployment) -> tuple[tuple[str, str], ...]:
    """Return (pool, sentence) for what keeps pods from the level `restricted`; a frontend is `frontend`."""
    cut = len(dep.metadata.name) + 1
    return tuple(
        (obj["metadata"]["name"][cut:], f"{place}: {problem}")
        for obj in deployments(render(dep, secrets=new_secret_data()))
        for place, problem in violations(obj["spec"]["template"]["spec"])
    )


def container(pod: Object, name: str) -> Object:
    everyone = [*pod.get("initContainers", []), *pod["containers"]]
    found: Object = next(one for one in everyone if one["name"] == name)
    return found


def variables(one: Object) -> dict[str, Any]:
    """Return a container's environment: the value, or where it comes from."""
    return {item["name"]: item.get("value", item.get("valueFrom")) for item in one["env"]}


def children(
    dep: MMRouterDeployment,
    kind: str,
    *,
    capabilities: Capabilities = NOTHING_SERVED,
    config: OperatorConfig = DEFAULTS,
) -> list[Object]:
    """Return the rendered children of one kind."""
    objects = render(dep, secrets=SECRETS, capabilities=capabilities, config=config)
    return [obj for obj in objects if obj["kind"] == kind]
