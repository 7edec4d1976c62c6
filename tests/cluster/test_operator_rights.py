"""The operator's ClusterRole: enough for everything it does, and nothing in it that it never uses."""

import time

import yaml
from cluster.controlplane import ControlPlane
from cluster.deployments import SECONDS, Deployed, named
from cluster.hollow_kubelet import Hollow
from cluster.operators import CLUSTER_ROLE, USER, operator
from waiting import wait_for

Right = tuple[str, str, str]

ASKED_INSIDE = {"create"}
"""An apply of something new is audited as a patch; the server asks for `create` as well."""
ELSEWHERE = {"keda.sh", "monitoring.coreos.com", "autoscaling"}
"""Groups whose children need what this cluster does not serve: test_optional_apis.py."""
UNSEEN = {
    # Asked by an admission plugin that is off here.
    ("update", "mmrouter.io", "mmrouterdeployments/finalizers"),
    # Held to be granted: the frontend's Role has it.
    ("get", "", "pods"),
    # Gates open on the word of a frontend, and none runs here: test_running.py.
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
            found.setdefault((row.verb, row.group, resource), set()).add(row.code)
    return found


def test_every_right_is_used_and_none_is_missing(crd: ControlPlane, kubelet: Hollow, namespace: str) -> None:
    began = time.time()
    deployed = Deployed(crd, namespace)
    resource = named("rights")
    spec = resource["spec"]
    spec["model"]["volume"] = {"persistentVolumeClaim": {"claimName": "weights"}}
    spec["model"]["tokenSecret"] = {"name": "hub", "key": "token"}
    claims = [{"name": "a", "resourceClaimName": "gpu"}, {"name": "b", "resourceClaimTemplateName": "gpu"}]
    pod = {"runtimeClassName": "kata", "priorityClassName": "high", "resourceClaims": claims}
    extra = {"name": "more", "role": "worker", "replicas": 2, "accelerator": {"kind": "nvidia"}}
    with operator(crd):
        # Names of every kind that the operator looks for; none of them exists.
        deployed.apply(
            {**resource, "spec": {**spec, "pools": [*spec["pools"], {**extra, "podTemplate": {"spec": pod}}]}}
        )
        deployed.settled("rights")
        # What a pool takes with it: its Deployment, its budget; the policies go when they are not wanted.
        for change in ({"networkPolicy": {"enabled": False}}, {"model": {"id": spec["model"]["id"]}}):
            deployed.apply({**resource, "spec": {**spec, **change}})
            deployed.settled("rights")
        # Revisions are kept for a while; each change of a template makes one.
        for number in range(6):
            deployed.apply({**resource, "spec": {**spec, "engine": {"type": "vllm", "args": [f"--seed={number}"]}}})
            deployed.settled("rights")
        missing = (
            granted() - {right for right in granted() if right[0] in ASKED_INSIDE or right[1] in ELSEWHERE} - UNSEEN
        )

        def unused() -> set[Right]:
            return missing - used(crd, began, namespace).keys()

        wait_for(lambda: not unused(), SECONDS, "every right is used", known=unused)
        refused = {right for right, codes in used(crd, began, namespace).items() if codes & {401, 403}}
        assert not refused
