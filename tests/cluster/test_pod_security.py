"""The server's own Pod Security admission: at level `restricted` it refuses exactly the pods that we name."""

from collections.abc import Iterator
from typing import Any

import pytest
from cluster.controlplane import ControlPlane
from cluster.resources import Object, apply
from unit.render.objects import exceptions
from unit.render.test_children import GOLDENS, load
from unit.render.test_pods_security import CASES, broken_by

from mmrouter_lib.api import MMRouterDeployment
from mmrouter_operator.model.credentials import new_secret_data
from mmrouter_operator.render import render

ENFORCED = {"pod-security.kubernetes.io/enforce": "restricted", "pod-security.kubernetes.io/enforce-version": "latest"}


@pytest.fixture
def restricted(cluster: ControlPlane) -> Iterator[str]:
    """A namespace that takes pods of the level `restricted` only."""
    with cluster.namespace(**ENFORCED) as name:
        yield name


def refused(cluster: ControlPlane, namespace: str, dep: MMRouterDeployment) -> dict[str, str]:
    """Return pool -> what the server has against the security of its pod; a frontend is `frontend`."""
    metadata = dep.metadata.model_copy(update={"namespace": namespace, "uid": ""})
    objects = render(dep.model_copy(update={"metadata": metadata}), secrets=new_secret_data())
    for obj in objects:
        if obj["kind"] == "ServiceAccount":
            apply(cluster, namespace, obj)
    found = {}
    for obj in objects:
        if obj["kind"] != "Deployment":
            continue
        name = obj["metadata"]["name"].removeprefix(f"{dep.metadata.name}-")
        answer = cluster.request("POST", f"/api/v1/namespaces/{namespace}/pods", _pod(name, obj), dryRun="All")
        if "violates PodSecurity" in (message := str(answer.json().get("message", ""))):
            found[name] = message
    return found


def _pod(name: str, obj: Object) -> Any:
    template = obj["spec"]["template"]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {**template["metadata"], "name": name},
        "spec": template["spec"],
    }


@pytest.mark.parametrize("name", GOLDENS)
def test_the_server_refuses_the_pods_of_our_exceptions_and_no_others(
    cluster: ControlPlane, restricted: str, name: str
) -> None:
    dep = load(name)
    found = refused(cluster, restricted, dep)
    assert set(found) == {pool for pool, _ in exceptions(dep)}, found


def test_both_agree_on_every_way_to_break_the_level(cluster: ControlPlane, restricted: str) -> None:
    """But for two ways that are no valid pod of ours to begin with: validation refuses them first."""
    dep = load("shortest")
    found = {
        str((place, patch)): set(refused(cluster, restricted, broken_by(dep, place, patch)))
        for place, patch, _ in CASES
        if not any(key in patch for key in ("procMount", "windowsOptions"))
    }
    assert len(found) == len(CASES) - 2
    assert {case: pools for case, pools in found.items() if pools != {"worker"}} == {}
