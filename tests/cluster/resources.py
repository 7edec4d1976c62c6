"""MMRouterDeployments for tests, and what the operator made of them."""

import copy
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from cluster.access import Access
from cluster.controlplane import APPLY

from mmrouter_lib.api import parse_deployment
from mmrouter_operator.cluster.operator_kinds import CORE_CHILDREN, KINDS
from mmrouter_operator.model.credentials import new_secret_data
from mmrouter_operator.model.kinds import RESOURCE, Ref
from mmrouter_operator.render import render

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "examples" / "models" / "tiny-qwen2-vl"
MANAGER = "test"
MARK = "example.com/mark"
RBAC = "rbac.authorization.k8s.io"
Object = dict[str, Any]


def resource(name: str = "demo", *, replicas: int = 1, frontends: int = 1, **spec: Any) -> Object:
    """Return a small deployment: one pool on CPU, with the model of the examples. ``spec``: over that."""
    whole = {
        "model": {"id": "mmrouter/tiny-qwen2-vl", "volume": {"hostPath": {"path": str(MODEL)}}},
        "engine": {"type": "vllm", "blockSize": 16},
        "frontend": {"replicas": frontends},
        "pools": [{"name": "worker", "role": "worker", "replicas": replicas, "accelerator": {"kind": "cpu"}}],
    }
    return deployment(name, {**whole, **spec})


def deployment(name: str, spec: Object) -> Object:
    """Return a deployment with this spec and no other."""
    return {"apiVersion": KINDS[RESOURCE].api, "kind": RESOURCE, "metadata": {"name": name}, "spec": spec}


def marked(frontend: str = "1", engine: str = "1") -> Object:
    """Return a deployment of two frontends and two engines, with marks in their pods; another mark is a rollout."""
    made = resource(frontends=2, replicas=2)
    made["spec"]["frontend"]["podTemplate"] = {"metadata": {"annotations": {MARK: frontend}}}
    made["spec"]["pools"][0]["podTemplate"] = {"metadata": {"annotations": {MARK: engine}}}
    return made


def path(kind: str, namespace: str, name: str = "", subresource: str = "") -> str:
    return KINDS[kind].path(namespace, name, subresource)


def apply(plane: Access, namespace: str, body: Object) -> Object:
    """Apply as a user does, server-side, and return the object. Raises ``httpx.HTTPStatusError``."""
    where = path(body["kind"], namespace, body["metadata"]["name"])
    answer = plane.request("PATCH", where, body, APPLY, fieldManager=MANAGER, force="true")
    assert answer.is_success, answer.text
    made: Object = answer.json()
    return made


def get(plane: Access, kind: str, namespace: str, name: str) -> Object:
    """Return an object that is there. Raises ``httpx.HTTPStatusError``."""
    found: Object = plane.read(path(kind, namespace, name))
    return found


def delete(plane: Access, kind: str, namespace: str, name: str) -> None:
    plane.request("DELETE", path(kind, namespace, name), propagationPolicy="Background").raise_for_status()


def make_account(plane: Access, namespace: str, name: str, *rules: Object) -> None:
    """Make a ServiceAccount and a Role of these rules for it. Raises ``httpx.HTTPStatusError``."""
    rbac = f"/apis/{RBAC}/v1/namespaces/{namespace}"
    subject = {"kind": "ServiceAccount", "name": name, "namespace": namespace}
    for where, body in (
        (f"/api/v1/namespaces/{namespace}/serviceaccounts", {}),
        (f"{rbac}/roles", {"rules": list(rules)}),
        (f"{rbac}/rolebindings", binding("Role", name, subject)),
    ):
        plane.request("POST", where, {**body, "metadata": {"name": name}}).raise_for_status()


def binding(kind: str, role: str, subject: Mapping[str, str]) -> Object:
    """Return what binds a role of a kind (``Role``, ``ClusterRole``) to a subject; it has no name yet."""
    reference = {"apiGroup": RBAC, "kind": kind, "name": role}
    return {"apiVersion": f"{RBAC}/v1", "kind": f"{kind}Binding", "roleRef": reference, "subjects": [subject]}


def children(plane: Access, namespace: str) -> dict[tuple[str, str], Object]:
    """Return every child of every deployment of a namespace: (kind, name) -> object."""
    found = {}
    for kind in CORE_CHILDREN:
        for item in plane.read(path(kind, namespace))["items"]:
            owners = item["metadata"].get("ownerReferences") or []
            if any(owner["kind"] == RESOURCE and owner.get("controller") for owner in owners):
                found[kind, item["metadata"]["name"]] = {**item, "kind": kind, "apiVersion": CORE_CHILDREN[kind].api}
    return found


def expected(body: Mapping[str, Any], namespace: str) -> set[tuple[str, str]]:
    """Return (kind, name) of the children that a deployment must have, without its ControllerRevisions."""
    made = copy.deepcopy(dict(body))
    made["metadata"] |= {"namespace": namespace, "uid": "0", "generation": 1}
    rendered = render(parse_deployment(made), secrets=new_secret_data())
    return {(ref.kind, ref.name) for ref in map(Ref.of, rendered)}


def complete(plane: Access, body: Mapping[str, Any], namespace: str) -> bool:
    return all_there(plane, expected(body, namespace), namespace)


def all_there(plane: Access, wanted: Iterable[tuple[str, str]], namespace: str) -> bool:
    return all(plane.request("GET", path(kind, namespace, name)).is_success for kind, name in wanted)


def status(plane: Access, namespace: str, name: str = "demo") -> Object:
    return dict(get(plane, RESOURCE, namespace, name).get("status") or {})


def condition(plane: Access, type: str, namespace: str, name: str = "demo") -> Object:
    conditions = status(plane, namespace, name).get("conditions") or []
    return next((dict(found) for found in conditions if found["type"] == type), {})


def is_done(plane: Access, namespace: str, name: str, generation: int) -> bool:
    ready = condition(plane, "Ready", namespace, name)
    return ready.get("status") == "True" and ready.get("observedGeneration") == generation


def bare(obj: Mapping[str, Any]) -> Object:
    """Return what is the same in every cluster and namespace: no identities, no addresses, no times."""
    made = copy.deepcopy(dict(obj))
    made.pop("status", None)
    metadata = made["metadata"]
    for field in ("uid", "resourceVersion", "creationTimestamp", "managedFields", "namespace", "generation"):
        metadata.pop(field, None)
    for owner in metadata.get("ownerReferences") or []:
        owner.pop("uid", None)
    if made["kind"] == "Service":
        for field in ("clusterIP", "clusterIPs"):
            made["spec"].pop(field, None)
    return made
