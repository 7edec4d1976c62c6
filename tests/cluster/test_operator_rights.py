"""The operator's ClusterRole: enough for everything it does, and nothing in it that it never uses."""

import time
from pathlib import Path

import yaml
from cluster.controlplane import ControlPlane
from cluster.deployments import SECONDS, Deployed, named, pod_metrics
from cluster.hollow_kubelet import Hollow
from cluster.operators import CLUSTER_ROLE, USER, operator
from cluster.test_optional_apis import PROMETHEUS, gateway_apis, optional_apis, scaled
from waiting import wait_for

__all__ = ["gateway_apis", "optional_apis"]

Right = tuple[str, str, str]

UNSEEN = {
    # Requested by an admission plugin, of the authorizer and not as a request: test_rights.py.
    ("update", "mmrouter.io", "mmrouterdeployments/finalizers"),
    # Held to be granted: frontends of the previous version have it.
    ("get", "", "pods"),
    # Gates open on the report of a frontend, and none runs here: test_running.py.
    ("patch", "", "pods/status"),
}


def granted() -> set[Right]:
    rules = yaml.safe_load(CLUSTER_ROLE.read_text())["rules"]
    return {
        (verb, group, resource)
        for rule in rules
        for verb in rule["verbs"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }


def used(plane: ControlPlane, since: float, namespace: str) -> dict[Right, set[int]]:
    """Right -> the statuses of the answers; not in namespaces that are being deleted, where nothing may be made."""
    found: dict[Right, set[int]] = {}
    for row in plane.audit(since):
        if row.user == USER and row.resource not in ("", "leases") and row.namespace in ("", namespace):
            resource = "/".join(filter(None, (row.resource, row.subresource)))
            # An apply of something new is audited as a patch that created it.
            for verb in {row.verb, "create"} if (row.verb, row.code) == ("patch", 201) else {row.verb}:
                found.setdefault((verb, row.group, resource), set()).add(row.code)
    return found


def scale_and_return(deployed: Deployed, plural: str) -> None:
    """Have a pool scaled by objects of a kind, and then by none."""
    name = f"by-{plural}"
    deployed.apply(scaled(name))
    wait_for(lambda: deployed.get(plural, f"{name}-worker"), SECONDS, f"{plural} are made")
    without = named(name)
    without["spec"]["observability"] = {"podMonitor": "Disabled"}
    deployed.apply(without)
    wait_for(lambda: deployed.get(plural, f"{name}-worker") is None, SECONDS, f"{plural} are deleted")


def test_every_right_is_used_and_none_is_missing(
    optional_apis: ControlPlane, gateway_apis: ControlPlane, kubelet: Hollow, namespace: str, tmp_path: Path
) -> None:
    assert optional_apis is gateway_apis
    crd = gateway_apis
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump({"prometheusAddress": PROMETHEUS}))
    began = time.time()
    deployed = Deployed(crd, namespace)
    resource = named("rights")
    spec = resource["spec"]
    spec["model"]["volume"] = {"persistentVolumeClaim": {"claimName": "weights"}}
    spec["model"]["tokenSecret"] = {"name": "hub", "key": "token"}
    claims = [{"name": "a", "resourceClaimName": "gpu"}, {"name": "b", "resourceClaimTemplateName": "gpu"}]
    pod = {"runtimeClassName": "kata", "priorityClassName": "high", "resourceClaims": claims}
    extra = {"name": "more", "role": "worker", "replicas": 2, "accelerator": {"kind": "nvidia"}}
    with operator(crd, options=[f"--config={config}"]):
        # Names of every kind that the operator looks for; none of them exists.
        deployed.apply(
            {**resource, "spec": {**spec, "pools": [*spec["pools"], {**extra, "podTemplate": {"spec": pod}}]}}
        )
        deployed.settled("rights")
        # What a pool takes with it: its Deployment, its budget; the policies go when they are not wanted.
        for change in ({"networkPolicy": {"enabled": False}}, {"model": {"id": spec["model"]["id"]}}):
            deployed.apply({**resource, "spec": {**spec, **change}})
            deployed.settled("rights")
        # Embeddings that travel by files have a claim, which goes with the encoders.
        encoders = {"name": "encode", "role": "encoder", "replicas": 1, "accelerator": {"kind": "cpu"}}
        for pools in ([*spec["pools"], encoders], spec["pools"]):
            deployed.apply({**resource, "spec": {**spec, "pools": pools}})
            deployed.settled("rights")
        # A gateway's pool goes with the picker, its route and the page's Service with the fields that ask for them.
        route = {"parentRefs": [{"name": "public"}]}
        gateway = {"mode": "endpointPicker", "gateway": route, "service": {"pagePort": 9000}}
        for frontend in (gateway, {"mode": "frontend"}):
            deployed.apply({**resource, "spec": {**spec, "frontend": {**spec.get("frontend", {}), **frontend}}})
            deployed.settled("rights")
        # Revisions are kept for a while; each change of a template makes one.
        for number in range(6):
            deployed.apply({**resource, "spec": {**spec, "engine": {"type": "vllm", "args": [f"--seed={number}"]}}})
            deployed.settled("rights")
        scale_and_return(deployed, "scaledobjects")
    # Started anew, because an operator reads the served APIs only every two minutes.
    with pod_metrics(crd), operator(crd, options=[f"--config={config}"]):
        scale_and_return(deployed, "horizontalpodautoscalers")
        assert granted() >= UNSEEN
        missing = granted() - UNSEEN

        def unused() -> set[Right]:
            return missing - used(crd, began, namespace).keys()

        wait_for(lambda: not unused(), SECONDS, "every right is used", known=unused)
        refused = {right for right, codes in used(crd, began, namespace).items() if codes & {401, 403}}
        assert not refused
