"""The hollow kubelet does with pods what a kubelet does, as far as the API can tell."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from cluster.controlplane import APPLY, ControlPlane
from cluster.hollow_kubelet import STRATEGIC, Hollow, hollow
from cluster.kubelet_status import running, status_patch
from cluster.slow_clients import Lost, Overtaken
from waiting import wait_for

GATE = "example.com/open"
LABELS = {"app": "one"}


def deployment(**spec: Any) -> dict[str, Any]:
    pod = {"containers": [{"name": "main", "image": "example.com/main"}], **spec}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "one"},
        "spec": {
            "replicas": 2,
            "selector": {"matchLabels": LABELS},
            "template": {"metadata": {"labels": LABELS}, "spec": pod},
        },
    }


@pytest.fixture
def apply(cluster: ControlPlane, namespace: str) -> Callable[[dict[str, Any]], None]:
    def do(body: dict[str, Any]) -> None:
        path = f"/apis/apps/v1/namespaces/{namespace}/deployments/one"
        cluster.request("PATCH", path, body, APPLY, fieldManager="test", force="true").raise_for_status()

    return do


def pods(cluster: ControlPlane, namespace: str) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = cluster.request("GET", f"/api/v1/namespaces/{namespace}/pods").json()["items"]
    return items


def is_true(pod: Mapping[str, Any], condition: str) -> bool:
    conditions = pod["status"].get("conditions") or []
    return any(c["type"] == condition and c["status"] == "True" for c in conditions)


def available(cluster: ControlPlane, namespace: str) -> int:
    one = cluster.request("GET", f"/apis/apps/v1/namespaces/{namespace}/deployments/one").json()
    return int(one["status"].get("availableReplicas", 0))


def test_pods_of_a_deployment_become_ready_with_an_address_each_and_are_not_written_again(
    cluster: ControlPlane, kubelet: Hollow, namespace: str, apply: Callable[[dict[str, Any]], None]
) -> None:
    apply(deployment(initContainers=[{"name": "side", "image": "example.com/side", "restartPolicy": "Always"}]))
    wait_for(lambda: available(cluster, namespace) == 2, 20, "two pods are available")
    found = pods(cluster, namespace)
    assert len({pod["status"]["podIP"] for pod in found}) == 2
    assert all(pod["status"]["initContainerStatuses"][0]["started"] for pod in found)
    for pod in found:
        ip, host = pod["status"]["podIP"], pod["status"]["hostIP"]
        assert status_patch(pod, running(pod), ip, host, "2026-01-01T00:00:00Z") is None


def test_a_pod_is_ready_only_when_its_gate_is_open(
    cluster: ControlPlane, kubelet: Hollow, namespace: str, apply: Callable[[dict[str, Any]], None]
) -> None:
    apply(deployment(readinessGates=[{"conditionType": GATE}]))
    wait_for(lambda: [is_true(p, "ContainersReady") for p in pods(cluster, namespace)] == [True] * 2, 20, "both run")
    assert not any(is_true(pod, "Ready") for pod in pods(cluster, namespace))
    one = pods(cluster, namespace)[0]["metadata"]["name"]
    patch = {"status": {"conditions": [{"type": GATE, "status": "True"}]}}
    cluster.request("PATCH", f"/api/v1/namespaces/{namespace}/pods/{one}/status", patch, STRATEGIC).raise_for_status()
    wait_for(lambda: available(cluster, namespace) == 1, 20, "the pod with the open gate is available")


def test_a_held_pod_shows_why_until_it_is_released(
    cluster: ControlPlane, kubelet: Hollow, namespace: str, apply: Callable[[dict[str, Any]], None]
) -> None:
    rule = kubelet.hold(namespace, LABELS, "ImagePullBackOff", "no such image")
    apply(deployment())

    def reasons() -> set[str]:
        statuses = [pod["status"].get("containerStatuses") or [{"state": {}}] for pod in pods(cluster, namespace)]
        return {status[0]["state"].get("waiting", {}).get("reason", "") for status in statuses}

    wait_for(lambda: reasons() == {"ImagePullBackOff"}, 20, "the pods say what is wrong")
    assert available(cluster, namespace) == 0
    kubelet.release(rule)
    wait_for(lambda: available(cluster, namespace) == 2, 20, "two pods are available")


def test_a_deleted_pod_goes_and_its_successor_comes(
    cluster: ControlPlane, kubelet: Hollow, namespace: str, apply: Callable[[dict[str, Any]], None]
) -> None:
    apply(deployment())
    wait_for(lambda: available(cluster, namespace) == 2, 20, "two pods are available")
    old = pods(cluster, namespace)[0]["metadata"]
    cluster.request("DELETE", f"/api/v1/namespaces/{namespace}/pods/{old['name']}").raise_for_status()
    wait_for(
        lambda: old["uid"] not in {pod["metadata"]["uid"] for pod in pods(cluster, namespace)}, 20, "the pod is gone"
    )
    wait_for(lambda: available(cluster, namespace) == 2, 20, "two pods are available again")


@pytest.mark.parametrize("trouble", [Overtaken, Lost])
def test_a_pod_whose_status_is_answered_late_or_not_at_all_still_becomes_ready(
    cluster: ControlPlane, namespace: str, trouble: type[Overtaken | Lost]
) -> None:
    late = trouble(cluster)
    with hollow(cluster, client=cluster.async_client(late)) as kubelet:
        kubelet.node(f"late-{namespace}")
        gates = [{"conditionType": gate} for gate in late.opens]
        containers = [{"name": "main", "image": "example.com/main"}]
        spec = {"nodeName": f"late-{namespace}", "containers": containers, "readinessGates": gates}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "one"}, "spec": spec}
        cluster.request("POST", f"/api/v1/namespaces/{namespace}/pods", pod).raise_for_status()
        wait_for(lambda: is_true(pods(cluster, namespace)[0], "Ready"), 10, "the pod is ready")
