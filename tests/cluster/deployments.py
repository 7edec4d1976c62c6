"""A namespace with deployments in it, as the tests of the operator look at it."""

import copy
from typing import Any

import yaml
from cluster.controlplane import ControlPlane
from waiting import wait_for

CHILDREN = (
    *("serviceaccounts", "roles", "rolebindings", "configmaps", "secrets", "networkpolicies", "poddisruptionbudgets"),
    *("deployments", "services", "horizontalpodautoscalers", "controllerrevisions"),
)
LABEL = "mmrouter.io/deployment"
SECONDS = 20.0
APPLY = "application/apply-patch+yaml"
MERGE = "application/merge-patch+json"

MINIMAL: dict[str, Any] = {
    "apiVersion": "mmrouter.io/v1alpha1",
    "kind": "MMRouterDeployment",
    "metadata": {"name": "vl"},
    "spec": {
        "model": {"id": "Qwen/Qwen2.5-VL-3B-Instruct"},
        "engine": {"type": "vllm"},
        "pools": [{"name": "worker", "role": "worker", "replicas": 2, "accelerator": {"kind": "nvidia"}}],
    },
}


class Deployed:
    """A namespace with deployments in it."""

    def __init__(self, plane: ControlPlane, namespace: str) -> None:
        self.plane, self.namespace = plane, namespace

    def apply(self, resource: dict[str, Any]) -> None:
        done = self.plane.kubectl("apply", "-n", self.namespace, "-f", "-", stdin=yaml.safe_dump(resource))
        assert done.returncode == 0, done.stderr

    def path(self, kind: str, name: str = "") -> str:
        groups = {
            "mmrouterdeployments": "apis/mmrouter.io/v1alpha1",
            **dict.fromkeys(("deployments", "controllerrevisions"), "apis/apps/v1"),
            **dict.fromkeys(("roles", "rolebindings"), "apis/rbac.authorization.k8s.io/v1"),
            "networkpolicies": "apis/networking.k8s.io/v1",
            "poddisruptionbudgets": "apis/policy/v1",
            "horizontalpodautoscalers": "apis/autoscaling/v2",
            "events": "apis/events.k8s.io/v1",
        }
        return f"/{groups.get(kind, 'api/v1')}/namespaces/{self.namespace}/{kind}" + (f"/{name}" if name else "")

    def get(self, kind: str, name: str) -> dict[str, Any] | None:
        answer = self.plane.request("GET", self.path(kind, name))
        return answer.json() if answer.is_success else None

    def children(self, name: str) -> dict[tuple[str, str], dict[str, Any]]:
        found = {}
        for kind in CHILDREN:
            items = self.plane.request("GET", self.path(kind), labelSelector=f"{LABEL}={name}").json()["items"]
            found |= {(kind, item["metadata"]["name"]): item for item in items}
        return found

    def resource(self, name: str) -> dict[str, Any]:
        found = self.get("mmrouterdeployments", name)
        assert found is not None
        return found

    def condition(self, name: str, type_: str) -> dict[str, Any] | None:
        """The condition, once it speaks of the resource's current generation."""
        resource = self.resource(name)
        found = [item for item in resource.get("status", {}).get("conditions", []) if item["type"] == type_]
        if not found or found[0].get("observedGeneration") != resource["metadata"]["generation"]:
            return None
        return found[0]

    def await_condition(self, name: str, type_: str, status: str, reason: str = "") -> dict[str, Any]:
        def there() -> dict[str, Any] | None:
            found = self.condition(name, type_)
            fits = found and found["status"] == status and reason in ("", found["reason"])
            return found if fits else None

        try:
            found: dict[str, Any] = wait_for(there, SECONDS, f"{type_}={status} {reason}")
        except TimeoutError as error:
            raise AssertionError(f"{error}; status is {self.resource(name).get('status')}") from error
        return found

    def settled(self, name: str) -> dict[tuple[str, str], dict[str, Any]]:
        """The children, once the status speaks of the whole spec and both Deployments exist."""
        self.await_condition(name, "SpecValid", "True")
        return self.children(name)


def named(name: str) -> dict[str, Any]:
    resource = copy.deepcopy(MINIMAL)
    resource["metadata"]["name"] = name
    return resource
