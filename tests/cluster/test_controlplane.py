"""What the other tests of this level stand on: a real control plane, and a kubelet as far as the API can tell."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import httpx
import pytest
from cluster.controlplane import APPLY, ControlPlane
from cluster.hollow_kubelet import STRATEGIC, Hollow, hollow
from cluster.kubelet_status import running, status_patch
from waiting import wait_for


def test_the_server_has_the_requested_version(cluster: ControlPlane) -> None:
    wanted = cluster.bin.name.partition("-")[0]
    assert cluster.request("GET", "/version").json()["gitVersion"] == f"v{wanted}"


class Late(httpx.AsyncBaseTransport):
    """Passes everything on to the API server; what becomes of the answers to ``PATCH`` is up to :meth:`patched`."""

    opens: tuple[str, ...] = ()

    def __init__(self, plane: ControlPlane) -> None:
        self.server = httpx.AsyncHTTPTransport(verify=ssl.create_default_context(cafile=str(plane.ca)))
        self.seen: set[str] = set()
        """Versions of objects of which the watch has told, once its reader has taken them."""
        self.told = asyncio.Event()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.method == "PATCH":
            return await self.patched(request)
        answer = await self.server.handle_async_request(request)
        if "watch" in request.url.params:
            assert isinstance(answer.stream, httpx.AsyncByteStream)
            answer.stream = Watched(answer.stream, self)
        return answer

    async def patched(self, request: httpx.Request) -> httpx.Response:
        return await self.server.handle_async_request(request)

    async def aclose(self) -> None:
        await self.server.aclose()


class Overtaken(Late):
    """Another writer's change of the pod comes between the first write and its answer: it opens a readiness gate. The
    answer is held back until the watch has told of that change, so the older state comes after the newer one.
    """

    opens = ("example.com/open",)

    def __init__(self, plane: ControlPlane) -> None:
        super().__init__(plane)
        self._patch = {"status": {"conditions": [{"type": gate, "status": "True"} for gate in self.opens]}}
        self._first = True

    async def patched(self, request: httpx.Request) -> httpx.Response:
        first, self._first = self._first, False
        answer = await super().patched(request)
        if first:
            headers = {"authorization": request.headers["authorization"], "content-type": STRATEGIC}
            theirs = httpx.Request("PATCH", request.url, headers=headers, content=json.dumps(self._patch))
            changed = await self.server.handle_async_request(theirs)
            version = json.loads(await changed.aread())["metadata"]["resourceVersion"]
            while version not in self.seen:
                self.told.clear()
                await self.told.wait()
        return answer


class Lost(Late):
    """The first write never reaches the server."""

    def __init__(self, plane: ControlPlane) -> None:
        super().__init__(plane)
        self._first = True

    async def patched(self, request: httpx.Request) -> httpx.Response:
        first, self._first = self._first, False
        if first:
            raise httpx.ReadTimeout("injected", request=request)
        return await super().patched(request)


class Watched(httpx.AsyncByteStream):
    def __init__(self, inner: httpx.AsyncByteStream, late: Late) -> None:
        self._inner, self._late = inner, late
        self._rest = b""

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for piece in self._inner:
            yield piece
            # The next read means that all complete lines were processed.
            *lines, self._rest = (self._rest + piece).split(b"\n")
            self._late.seen |= {json.loads(line)["object"]["metadata"]["resourceVersion"] for line in lines}
            self._late.told.set()

    async def aclose(self) -> None:
        await self._inner.aclose()


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
