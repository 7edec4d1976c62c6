"""Engine pods go where their accelerator is, and while there is none the resource says what it waits for."""

from collections.abc import Iterator
from typing import Any

import pytest
from cluster.access import Access
from cluster.controlplane import wait_for
from cluster.resources import apply, get, is_done
from e2e.deploying import READY_SECONDS, example, make_model

from mmrouter_operator.ref import RESOURCE

LABEL = "nvidia.com/gpu.present"
DEVICE = "nvidia.com/gpu"
MERGE = "application/merge-patch+json"


@pytest.fixture
def bare_node(operated: Access) -> Iterator[str]:
    """The name of a node that takes pods and has no GPU, before the test and after it."""
    items = operated.request("GET", "/api/v1/nodes").raise_for_status().json()["items"]
    name = next(item["metadata"]["name"] for item in items if not item["spec"].get("taints"))
    equip(operated, name, None)
    yield name
    equip(operated, name, None)


def equip(cluster: Access, name: str, devices: str | None) -> None:
    """Give a node GPUs as a device plugin and a labeller would, or take them away."""
    path = f"/api/v1/nodes/{name}"
    label = {"metadata": {"labels": {LABEL: "true" if devices else None}}}
    cluster.request("PATCH", path, label, MERGE).raise_for_status()
    status = {"status": {"capacity": {DEVICE: devices}, "allocatable": {DEVICE: devices}}}
    cluster.request("PATCH", f"{path}/status", status, MERGE).raise_for_status()


def told(cluster: Access, namespace: str, reason: str) -> str:
    """Return what the deployment's conditions of a reason say."""
    found = get(cluster, RESOURCE, namespace, "gpu") or {}
    conditions = found.get("status", {}).get("conditions", [])
    return "\n".join(each["message"] for each in conditions if each["reason"] == reason)


def scheduled(pod: dict[str, Any]) -> str:
    """Return whether a pod has a node: ``True``, or ``False`` with the scheduler's reason."""
    conditions = {each["type"]: each for each in pod["status"].get("conditions") or []}
    found = conditions.get("PodScheduled", {})
    return f"{found.get('status')} {found.get('reason', '')}".strip()


def test_pods_of_a_gpu_pool_wait_for_a_node_with_gpus_and_the_conditions_say_so(
    operated: Access, bare_node: str
) -> None:
    body = example()
    body["metadata"]["name"] = "gpu"
    body["spec"]["frontend"]["replicas"] = 1
    body["spec"]["pools"] = [{"name": "worker", "role": "worker", "replicas": 1, "accelerator": {"kind": "nvidia"}}]
    with operated.namespace() as namespace:
        pods = f"/api/v1/namespaces/{namespace}/pods"

        def engines() -> list[dict[str, Any]]:
            items: list[dict[str, Any]]
            items = operated.request("GET", pods, labelSelector="mmrouter.io/role=worker").json()["items"]
            return items

        make_model(operated, namespace)
        generation = apply(operated, namespace, body)["metadata"]["generation"]
        wait_for(lambda: [scheduled(pod) for pod in engines()] == ["False Unschedulable"], 30, "the pod has no node")
        said = wait_for(lambda: told(operated, namespace, "Unschedulable"), 30, "a condition tells it", every=0.2)
        assert LABEL in said or DEVICE in said

        equip(operated, bare_node, "4")
        wait_for(lambda: is_done(operated, namespace, "gpu", generation), READY_SECONDS, "Ready is True", every=0.2)
        (engine,) = engines()
        assert engine["spec"]["nodeName"] == bare_node
        (container,) = engine["spec"]["containers"]
        assert container["resources"]["limits"][DEVICE] == "1"
