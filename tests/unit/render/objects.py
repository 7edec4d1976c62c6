"""What the render tests share: finding objects and containers, and deployments that differ in one thing."""

import copy
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml
from kubernetes_validate import utils

from mmrouter_lib.api import MMRouterDeployment, parse_deployment, to_json
from mmrouter_operator.model.credentials import SecretData, new_secret_data
from mmrouter_operator.render import render
from mmrouter_operator.render.pod.pod_security_violations import violations

# It reads a megabyte of schemas anew for every object.
utils.schema_contents = cache(utils.schema_contents)

Object = dict[str, Any]
GOLDEN = Path(__file__).parent / "golden"
GROUPS = {
    "vllm": ("shortest", "whole", "disaggregated"),
    "sglang": ("sglang", "sglang-disaggregated"),
    "transfer": ("node", "handover"),
}
"""File of `golden/` -> the resources of `golden/deployments.yaml` whose children it holds."""
GOLDENS = tuple(name for names in GROUPS.values() for name in names)
SECRETS = SecretData(
    identity_key=bytes(range(32)),
    sidecar_public="a" * 40,
    sidecar_secret="b" * 40,
    router_public="c" * 40,
    router_secret="d" * 40,
    control_token="control-token",
    engine_key="engine-key",
)


@cache
def _resources() -> dict[str, Object]:
    found: dict[str, Object] = yaml.safe_load((GOLDEN / "deployments.yaml").read_text())
    return found


def resource(name: str) -> Object:
    """Return a resource of `golden/deployments.yaml`, as it is written."""
    return copy.deepcopy(_resources()[name])


def load(name: str) -> MMRouterDeployment:
    return parse_deployment(resource(name))


SHORTEST, WHOLE, SGLANG = load("shortest"), load("whole"), load("sglang")


def valid(objects: list[Object]) -> None:
    """Check objects by the API's schemas: the oldest that is supported, that of the test level, the newest."""
    assert objects
    for obj in objects:
        for version in ("1.29", "1.35", "1.37"):
            kubernetes_validate.validate(obj, version, strict=True)


def deployments(objects: list[Object]) -> list[Object]:
    return [obj for obj in objects if obj["kind"] == "Deployment"]


def name(obj: Object) -> str:
    found: str = obj["metadata"]["name"]
    return found


def named(objects: list[Object], kind: str, called: str) -> Object:
    return next(obj for obj in objects if (obj["kind"], obj["metadata"]["name"]) == (kind, called))


def containers(obj: Object) -> Iterator[Object]:
    spec = obj["spec"]["template"]["spec"]
    yield from spec.get("initContainers", [])
    yield from spec["containers"]


def template_labels(obj: Object) -> dict[str, str]:
    labels: dict[str, str] = obj["spec"]["template"]["metadata"]["labels"]
    return labels


def change(dep: MMRouterDeployment, **spec: Any) -> MMRouterDeployment:
    """Return the deployment with other sections of its spec: ``change(dep, routing={...})``."""
    obj = to_json(dep)
    obj["spec"].update(spec)
    obj["metadata"]["uid"] = dep.metadata.uid
    return parse_deployment(obj)


def with_pool(dep: MMRouterDeployment, **fields: Any) -> MMRouterDeployment:
    """Return the deployment with its first pool alone, changed."""
    return change(dep, pools=[{**to_json(dep)["spec"]["pools"][0], **fields}])


def pod_of(dep: MMRouterDeployment, component: str) -> Object:
    """Return the pod spec of one pool, or of the frontend."""
    obj = named(render(dep, secrets=SECRETS), "Deployment", f"{dep.metadata.name}-{component}")
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


def rendered(dep: MMRouterDeployment, **site: Any) -> list[Object]:
    """Return all children; ``site``: capabilities and settings."""
    return render(dep, secrets=SECRETS, **site)


def children(dep: MMRouterDeployment, kind: str, **site: Any) -> list[Object]:
    """Return the rendered children of one kind."""
    return [obj for obj in rendered(dep, **site) if obj["kind"] == kind]


def selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Whether a ``metav1.LabelSelector`` selects something with these labels, as for the API server; an empty one
    selects everything.
    """
    for expression in selector.get("matchExpressions", []):
        value, values = labels.get(expression["key"]), expression.get("values", [])
        fits = {
            "Exists": value is not None,
            "DoesNotExist": value is None,
            "In": value in values,
            "NotIn": value not in values,
        }
        if not fits[expression["operator"]]:
            return False
    required: Mapping[str, str] = selector.get("matchLabels", {})
    return required.items() <= labels.items()
