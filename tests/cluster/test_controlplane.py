"""What the other tests of this level stand on: a real control plane, and a kubelet as far as the API can tell."""

import ssl
from collections.abc import Mapping
from typing import Any

import httpx
from cluster.controlplane import ControlPlane
from cluster.hollow_kubelet import STRATEGIC, Hollow, Seen, hollow
from cluster.kubelet_status import running, status_patch
from cluster.resources import apply, get
from waiting import wait_for


def test_the_server_has_the_requested_version(cluster: ControlPlane) -> None:
    wanted = cluster.bin.name.partition("-")[0]
    assert cluster.request("GET", "/version").json()["gitVersion"] == f"v{wanted}"


class Lost(httpx.AsyncHTTPTransport):
    """The first write never reaches the server."""

    lost = False

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.method == "PATCH" and not self.lost:
            self.lost = True
            raise httpx.ReadTimeout("injected", request=request)
        return await super().handle_async_request(request)


GATE = "example.com/open"
LABELS = {"app": "one"}


def deployment(**spec: Any) -> dict[str, Any]:
    pod = {"containers": [{"name": "main", "image": "example.com/main"}], **spec}
    template = {"metadata": {"labels": LABELS}, "spec": pod}
    spec = {"replicas": 2, "selector": {"matchLabels": LABELS}, "template": template}
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "one"}, "spec": spec}


def is_true(pod: Mapping[str, Any], condition: str) -> bool:
    conditions = pod["status"].get("conditions") or []
    return any(c["type"] == condition and c["status"] == "True" for c in conditions)


def available(cluster: ControlPlane, namespace: str) -> int:
    return int(get(cluster, "Deployment", namespace, "one")["status"].get("availableReplicas", 0))


def test_pods_of_a_deployment_become_ready_with_an_address_each_and_are_not_written_again(
    cluster: ControlPlane, kubelet: Hollow, namespace: str
) -> None:
    sidecar = {"name": "side", "image": "example.com/side", "restartPolicy": "Always"}
    apply(cluster, namespace, deployment(initContainers=[sidecar]))
    wait_for(lambda: available(cluster, namespace) == 2, 20, "two pods are available")
    found = cluster.pods(namespace)
    assert len({pod["status"]["podIP"] for pod in found}) == 2
    assert all(pod["status"]["initContainerStatuses"][0]["started"] for pod in found)
    for pod in found:
        ip, host = pod["status"]["podIP"], pod["status"]["hostIP"]
        assert status_patch(pod, running(pod), ip, host, "2026-01-01T00:00:00Z") is None


def test_a_pod_is_ready_only_when_its_gate_is_open(cluster: ControlPlane, kubelet: Hollow, namespace: str) -> None:
    apply(cluster, namespace, deployment(readinessGates=[{"conditionType": GATE}]))
    wait_for(lambda: [is_true(p, "ContainersReady") for p in cluster.pods(namespace)] == [True] * 2, 20, "both run")
    assert not any(is_true(pod, "Ready") for pod in cluster.pods(namespace))
    one = cluster.pods(namespace)[0]["metadata"]["name"]
    patch = {"status": {"conditions": [{"type": GATE, "status": "True"}]}}
    cluster.request("PATCH", f"/api/v1/namespaces/{namespace}/pods/{one}/status", patch, STRATEGIC).raise_for_status()
    wait_for(lambda: available(cluster, namespace) == 1, 20, "the pod with the open gate is available")


def test_a_pod_whose_status_was_not_written_still_becomes_ready(cluster: ControlPlane, namespace: str) -> None:
    transport = Lost(verify=ssl.create_default_context(cafile=str(cluster.ca)))
    with hollow(cluster, client=cluster.async_client(transport)) as kubelet:
        kubelet.node(f"late-{namespace}")
        spec = {"nodeName": f"late-{namespace}", "containers": [{"name": "main", "image": "example.com/main"}]}
        pod = {"metadata": {"name": "one"}, "spec": spec}
        cluster.request("POST", f"/api/v1/namespaces/{namespace}/pods", pod).raise_for_status()
        wait_for(lambda: is_true(cluster.pods(namespace)[0], "Ready"), 10, "the pod is ready")
    assert transport.lost


def test_an_answer_that_the_watch_overtook_replaces_no_newer_pod() -> None:
    newer, older = ({"metadata": {"resourceVersion": version}} for version in ("10", "9"))
    seen = Seen(newer)
    seen.learn(older)
    assert seen.pod is newer
