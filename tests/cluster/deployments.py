"""A namespace with deployments in it, as the tests of the operator look at it."""

import copy
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import yaml
from cluster.controlplane import ControlPlane
from cluster.resources import deployment
from waiting import wait_for

from mmrouter_operator.cluster.operator_kinds import KINDS

CHILDREN = (
    *("serviceaccounts", "roles", "rolebindings", "configmaps", "secrets", "networkpolicies", "poddisruptionbudgets"),
    *("deployments", "services", "horizontalpodautoscalers", "controllerrevisions"),
)
LABEL = "mmrouter.io/deployment"
SECONDS = 20.0
MERGE = "application/merge-patch+json"

MINIMAL = deployment(
    "vl",
    {
        "model": {"id": "Qwen/Qwen2.5-VL-3B-Instruct"},
        "engine": {"type": "vllm"},
        "pools": [{"name": "worker", "role": "worker", "replicas": 2, "accelerator": {"kind": "nvidia"}}],
    },
)
PLURALS = {kind.plural: kind for kind in KINDS.values()}


class Deployed:
    def __init__(self, plane: ControlPlane, namespace: str) -> None:
        self.plane, self.namespace = plane, namespace

    def apply(self, resource: dict[str, Any]) -> None:
        done = self.plane.kubectl("apply", "-n", self.namespace, "-f", "-", stdin=yaml.safe_dump(resource))
        assert done.returncode == 0, done.stderr

    def path(self, kind: str, name: str = "") -> str:
        return PLURALS[kind].path(self.namespace, name)

    def get(self, kind: str, name: str) -> dict[str, Any] | None:
        answer = self.plane.request("GET", self.path(kind, name))
        return answer.json() if answer.is_success else None

    def child(self, kind: str, name: str) -> dict[str, Any]:
        """Return an object that is there. Raises ``httpx.HTTPStatusError``."""
        found: dict[str, Any] = self.plane.read(self.path(kind, name))
        return found

    def children(self, name: str) -> dict[tuple[str, str], dict[str, Any]]:
        found = {}
        for kind in CHILDREN:
            items = self.plane.read(self.path(kind), labelSelector=f"{LABEL}={name}")["items"]
            found |= {(kind, item["metadata"]["name"]): item for item in items}
        return found

    def resource(self, name: str) -> dict[str, Any]:
        return self.child("mmrouterdeployments", name)

    def patch(self, kind: str, name: str, change: dict[str, Any]) -> dict[str, Any]:
        """Change an object as another manager does. Raises ``httpx.HTTPStatusError``."""
        answer = self.plane.request("PATCH", self.path(kind, name), change, MERGE, fieldManager="someone")
        changed: dict[str, Any] = answer.raise_for_status().json()
        return changed

    def delete(self, kind: str, name: str) -> None:
        self.plane.request("DELETE", self.path(kind, name)).raise_for_status()

    def condition(self, name: str, type_: str) -> dict[str, Any] | None:
        """The condition, once it speaks of the resource's current generation."""
        resource = self.resource(name)
        of_now = {"type": type_, "observedGeneration": resource["metadata"]["generation"]}.items()
        conditions: list[dict[str, Any]] = resource.get("status", {}).get("conditions", [])
        return next((item for item in conditions if of_now <= item.items()), None)

    def await_condition(self, name: str, type_: str, status: str, reason: str = "") -> dict[str, Any]:
        def there() -> dict[str, Any] | None:
            found = self.condition(name, type_)
            fits = found and found["status"] == status and reason in ("", found["reason"])
            return found if fits else None

        what = f"{type_}={status} {reason}"
        found: dict[str, Any] = wait_for(there, SECONDS, what, known=lambda: self.resource(name).get("status"))
        return found

    def settled(self, name: str) -> dict[tuple[str, str], dict[str, Any]]:
        self.await_condition(name, "SpecValid", "True")
        return self.children(name)

    def made(self, name: str) -> dict[tuple[str, str], dict[str, Any]]:
        """Apply the deployment of :func:`named` and return its children once they are there."""
        self.apply(named(name))
        return self.settled(name)


def named(name: str) -> dict[str, Any]:
    resource = copy.deepcopy(MINIMAL)
    resource["metadata"]["name"] = name
    return resource


CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"


def definition(kind: str, group: str, version: str, spec: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return a definition with a status of any content; ``spec``: the schema of that field."""
    status = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    properties = {"status": status, **({"spec": spec} if spec else {})}
    plural, schema = f"{kind.lower()}s", {"type": "object", "properties": properties}
    own = {"name": version, "served": True, "storage": True, "subresources": {"status": {}}}
    # The API server keeps some groups for Kubernetes' own projects.
    approved = {"api-approved.kubernetes.io": "unapproved, a test"} if group.endswith("k8s.io") else {}
    return {
        "metadata": {"name": f"{plural}.{group}", "annotations": approved},
        "spec": {
            "group": group,
            "scope": "Namespaced",
            "names": {"kind": kind, "plural": plural, "singular": kind.lower(), "listKind": f"{kind}List"},
            "versions": [{**own, "schema": {"openAPIV3Schema": schema}}],
        },
    }


@contextmanager
def served(plane: ControlPlane, *definitions: dict[str, Any]) -> Iterator[None]:
    """Serve definitions until the block ends, and wait until they are gone."""
    paths = [f"{CRDS}/{body['metadata']['name']}" for body in definitions]
    try:
        for body in definitions:
            plane.request("POST", CRDS, body).raise_for_status()
        for body in definitions:
            spec = body["spec"]
            api = f"/apis/{spec['group']}/{spec['versions'][0]['name']}/{spec['names']['plural']}"
            wait_for(lambda api=api: plane.request("GET", api).is_success, SECONDS, f"{api} is served")
        yield
    finally:
        for path in paths:
            plane.request("DELETE", path)
        for path in paths:
            wait_for(lambda path=path: plane.request("GET", path).status_code == 404, SECONDS, f"{path} is gone")


def pod_metrics(plane: ControlPlane) -> AbstractContextManager[None]:
    """Serve the API group of pod metrics until the block ends; it has no backend and gets no requests."""
    return served(plane, definition("StandIn", "custom.metrics.k8s.io", "v1beta2"))
