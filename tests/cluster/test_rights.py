"""Each right of the operator is needed: its request is refused to an account that has every other right.

The requests are those of the operator's client: server-side apply, which needs `create` and `patch`, a POST of Secrets,
Events and Leases, and metadata of objects that a resource names.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from cluster.conftest import CRDS
from cluster.controlplane import APPLY, ControlPlane, control_plane
from cluster.deployments import MERGE, definition, served
from cluster.operators import CLUSTER_ROLE, LEASE_ROLE
from cluster.resources import RBAC, binding
from cluster.test_optional_apis import SCHEMAS, gateway_definitions
from waiting import wait_for

from mmrouter_operator.cluster.operator_kinds import KINDS
from mmrouter_operator.model.kinds import RESOURCE

Right = tuple[str, str, str]
"""Group, resource (with a subresource), verb."""
PLURALS = {(kind.group, kind.plural): kind for kind in KINDS.values()}
POSTED = {"secrets", "events", "leases"}
CLUSTER_ROLES = f"/apis/{RBAC}/v1/clusterroles"
BINDINGS = f"/apis/{RBAC}/v1/clusterrolebindings"
SECONDS = 60
LABELS = {"app": "thing"}
UTILIZATION = {"type": "Utilization", "averageUtilization": 50}
ALLOWED = (200, 201, 404)
"""404: there is no such object, which an account without the right is not shown."""
CONTENT: dict[str, dict[str, Any]] = {
    "Service": {"spec": {"ports": [{"port": 80}]}},
    "HTTPRoute": {"spec": {"parentRefs": [{"name": "public"}]}},
    "InferencePool": {
        "spec": {
            "selector": {"matchLabels": LABELS},
            "targetPorts": [{"number": 8000}],
            "endpointPickerRef": {"name": "thing", "port": {"number": 9002}},
        }
    },
    "PersistentVolumeClaim": {"spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1"}}}},
    "ControllerRevision": {"revision": 1, "data": {"template": {}}},
    "HorizontalPodAutoscaler": {
        "spec": {
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": "thing"},
            "maxReplicas": 2,
            "metrics": [{"type": "Resource", "resource": {"name": "cpu", "target": UTILIZATION}}],
        }
    },
    "Event": {
        "eventTime": "2026-01-01T00:00:00.000000Z",
        **{"reportingController": "test.example/test", "reportingInstance": "test", "action": "Test", "reason": "Test"},
        "type": "Normal",
    },
    "Deployment": {
        "spec": {
            "selector": {"matchLabels": LABELS},
            "template": {"metadata": {"labels": LABELS}, "spec": {"containers": [{"name": "thing", "image": "thing"}]}},
        }
    },
    "RoleBinding": binding("Role", "granted", {"kind": "ServiceAccount", "name": "default"}),
}
"""What a kind must have to be valid: the server looks whether an account may create what it applies last."""


def rights() -> list[Right]:
    rules = [rule for file in (CLUSTER_ROLE, LEASE_ROLE) for rule in yaml.safe_load(file.read_text())["rules"]]
    return sorted(
        {
            (group, resource, verb)
            for rule in rules
            for group in rule["apiGroups"]
            for resource in rule["resources"]
            for verb in rule["verbs"]
        }
    )


RIGHTS = rights()


@dataclass(frozen=True)
class Accounts:
    """``everything`` has all rights; ``lacking`` has all but one of them."""

    plane: ControlPlane
    namespace: str
    everything: str
    lacking: dict[Right, str]

    def status(self, user: str, right: Right) -> int:
        """Return the status of the request that needs a right, sent as a user; nothing is stored."""
        return request(self.plane.http, self.namespace, user, right)


def request(http: httpx.Client, namespace: str, user: str, right: Right) -> int:
    group, resource, verb = right
    plural, _, subresource = resource.partition("/")
    kind = PLURALS[group, plural]
    body: dict[str, Any] = {"apiVersion": kind.api, "kind": kind.kind, "metadata": {"name": "thing"}}
    if kind.kind == "Event":
        body["regarding"] = {"kind": "Pod", "namespace": namespace, "name": "thing"}
    body = CONTENT.get(kind.kind, {}) | body
    one, params = kind.path(namespace, "thing", subresource), {"dryRun": "All"}
    headers = {"impersonate-user": user, "content-type": "application/json"}
    match verb:
        case "list":
            return http.get(kind.path(namespace), params={"limit": "1"}, headers=headers).status_code
        case "watch":
            # From what the server has in memory: otherwise it sends the head after seconds without an event.
            params = {"watch": "1", "resourceVersion": "0"}
            with http.stream("GET", kind.path(namespace), params=params, headers=headers) as answer:
                return answer.status_code
        case "get":
            return http.get(one, headers=headers).status_code
        case "delete":
            return http.delete(one, headers=headers, params=params).status_code
        case "create" if plural in POSTED:
            return http.post(kind.path(namespace), json=body, headers=headers, params=params).status_code
        case "create" | "patch" if not subresource:
            headers["content-type"] = APPLY
            params |= {"fieldManager": "test", "force": "true"}
            return http.patch(one, json=body, headers=headers, params=params).status_code
        case "patch":
            headers["content-type"] = MERGE
            return http.patch(one, json={"status": {}}, headers=headers, params=params).status_code
        case "update" if subresource == "finalizers":
            # Asked by admission, of an account that makes a child which blocks the deletion of its owner.
            owner = {"apiVersion": kind.api, "kind": RESOURCE, "name": "any", "uid": "0", "blockOwnerDeletion": True}
            child = {"kind": "Secret", "metadata": {"name": "child", "ownerReferences": [owner]}}
            path = KINDS["Secret"].path(namespace)
            return http.post(path, json={"apiVersion": "v1", **child}, headers=headers, params=params).status_code
        case "update":
            return http.put(one, json=body, headers=headers, params=params).status_code
    raise AssertionError(right)


@pytest.fixture(scope="module")
def enforcing(kube_bin: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """A control plane that lets a child block the deletion of its owner only by the right to do so, as OpenShift's."""
    option = "--enable-admission-plugins=OwnerReferencesPermissionEnforcement"
    with control_plane(tmp_path_factory.mktemp("enforcing"), kube_bin, CRDS, apiserver=(option,)) as plane:
        yield plane


@pytest.fixture(scope="module")
def accounts(enforcing: ControlPlane) -> Iterator[Accounts]:
    """Users of these rights, known to the API server, in a cluster that serves every optional API."""
    made: list[str] = []

    def make(user: str, granted: list[Right]) -> str:
        rules = [{"apiGroups": [group], "resources": [name], "verbs": [verb]} for group, name, verb in granted]
        subject = {"kind": "User", "name": user, "apiGroup": RBAC}
        for path, body in ((CLUSTER_ROLES, {"rules": rules}), (BINDINGS, binding("ClusterRole", user, subject))):
            enforcing.request("POST", path, {**body, "metadata": {"name": user}}).raise_for_status()
            made.append(f"{path}/{user}")
        return user

    definitions = [definition(kind, group, version, spec) for (group, version, kind), spec in SCHEMAS.items()]
    with served(enforcing, *definitions, *gateway_definitions()), enforcing.namespace() as namespace:
        body = {"metadata": {"name": "granted"}, "rules": []}
        enforcing.request("POST", f"/apis/{RBAC}/v1/namespaces/{namespace}/roles", body).raise_for_status()
        try:
            lacking = {right: make(f"without-{n}", [r for r in RIGHTS if r != right]) for n, right in enumerate(RIGHTS)}
            found = Accounts(enforcing, namespace, make("everything", RIGHTS), lacking)
            # The last account that was made is known when it may list.
            wait_for(lambda: found.status(found.everything, ("", "pods", "list")) == 200, SECONDS, "rights are known")
            yield found
        finally:
            for path in made:
                enforcing.request("DELETE", path)


@pytest.mark.parametrize("right", RIGHTS, ids=lambda right: " ".join(filter(None, right)))
def test_the_request_of_a_right_is_refused_without_it_and_by_nothing_else(accounts: Accounts, right: Right) -> None:
    assert accounts.status(accounts.everything, right) in ALLOWED
    assert accounts.status(accounts.lacking[right], right) == 403
