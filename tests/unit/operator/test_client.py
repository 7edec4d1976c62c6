"""The client at its socket: what it sends, the errors it makes of answers, and a fence that holds to the last byte."""

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import pytest
from aiohttp import web
from kubernetes.aio.client.configuration import Configuration

from mmrouter_operator.cluster import client
from mmrouter_operator.cluster.client import ApiError, KubernetesCluster, LeaseLost, Unavailable
from mmrouter_operator.model.kinds import Ref
from mmrouter_operator.model.snapshot import PodView

CONFIG_MAP = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"namespace": "n", "name": "c"}, "data": {"a": "1"}}
REF = Ref("v1", "ConfigMap", "n", "c")
POD = PodView(name="p", namespace="n", uid="u", pool="w", role="worker")


@dataclass
class Served:
    """A server that answers every request alike and keeps the requests."""

    status: int = 200
    body: Any = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    requests: list[tuple[web.Request, bytes]] = field(default_factory=list)
    before: Callable[[], Awaitable[object]] | None = None
    url: str = ""

    async def answer(self, request: web.Request) -> web.Response:
        self.requests.append((request, await request.read()))
        if self.before is not None:
            await self.before()
        return web.json_response(self.body, status=self.status, headers=self.headers)

    @property
    def last(self) -> tuple[web.Request, Any]:
        request, body = self.requests[-1]
        return request, json.loads(body) if body else None


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    one = Served()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", one.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    one.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield one
    await runner.cleanup()


@pytest.fixture
async def cluster(served: Served) -> AsyncIterator[KubernetesCluster]:
    configuration = Configuration(host=served.url, api_key={"BearerToken": "Bearer secret"})
    one = KubernetesCluster(configuration, user_agent="mmrouter-operator/1 (me)", identity="me")
    yield one
    await one.close()


async def test_apply_is_a_forced_server_side_apply_under_our_name(cluster: KubernetesCluster, served: Served) -> None:
    served.body = {"metadata": {"resourceVersion": "7"}}
    assert await cluster.apply(CONFIG_MAP) == served.body
    request, body = served.last
    assert (request.method, request.path) == ("PATCH", "/api/v1/namespaces/n/configmaps/c")
    assert request.headers["Content-Type"] == "application/apply-patch+yaml"
    assert dict(request.query) == {"fieldManager": "mmrouter-operator", "force": "true"}
    assert request.headers["Authorization"] == "Bearer secret"
    assert request.headers["User-Agent"] == "mmrouter-operator/1 (me)"
    assert body == CONFIG_MAP


async def test_gates_are_conditions_of_exactly_that_pod_under_a_name_of_their_own(
    cluster: KubernetesCluster, served: Served
) -> None:
    before = datetime.now(UTC).replace(microsecond=0)
    await cluster.apply_gates(POD, {"mmrouter.io/routable": (True, "Held", "by both")})
    request, body = served.last
    assert request.path == "/api/v1/namespaces/n/pods/p/status"
    assert request.query["fieldManager"] == "mmrouter-operator-gates"
    assert body["metadata"]["uid"] == "u"
    (condition,) = body["status"]["conditions"]
    assert before <= datetime.fromisoformat(condition.pop("lastTransitionTime")) <= datetime.now(UTC)
    assert condition == {"type": "mmrouter.io/routable", "status": "True", "reason": "Held", "message": "by both"}


async def test_a_gate_that_stays_as_it_is_keeps_the_time_of_its_last_change(
    cluster: KubernetesCluster, served: Served
) -> None:
    first = "2026-11-21T10:00:00Z"
    names = ("mmrouter.io/routable", "mmrouter.io/verified")
    gates = dict(zip(names, (True, False), strict=True))
    pod = dataclasses.replace(POD, gates=gates, gate_times=dict.fromkeys(names, first))
    await cluster.apply_gates(pod, dict.fromkeys(names, (True, "Held", "")))
    _, body = served.last
    times = {item["type"]: item["lastTransitionTime"] for item in body["status"]["conditions"]}
    assert times[names[0]] == first
    assert times[names[1]] > first


async def test_delete_names_the_uid_and_is_content_with_what_is_gone(
    cluster: KubernetesCluster, served: Served
) -> None:
    for status in (200, 404, 409):
        served.status = status
        await cluster.delete(REF, "u")
        request, body = served.last
        assert request.method == "DELETE"
        assert body == {"propagationPolicy": "Background", "preconditions": {"uid": "u"}}


async def test_existence_reads_metadata_only(cluster: KubernetesCluster, served: Served) -> None:
    assert await cluster.exists(REF)
    request, _ = served.last
    assert "as=PartialObjectMetadata;" in request.headers["Accept"]
    served.status = 404
    assert not await cluster.exists(REF)
    assert await cluster.get(REF) is None


async def test_a_long_list_is_read_page_by_page(cluster: KubernetesCluster, served: Served) -> None:
    served.body = {"metadata": {"continue": "next"}, "items": [{"metadata": {"name": "1"}}]}

    async def last_page() -> None:
        if len(served.requests) == 2:
            served.body = {"metadata": {}, "items": [{"metadata": {"name": "2"}}]}

    served.before = last_page
    found = await cluster.list("ConfigMap", "", "a=b")
    assert [item["metadata"]["name"] for item in found] == ["1", "2"]
    request, _ = served.last
    assert (request.path, request.query["labelSelector"]) == ("/api/v1/configmaps", "a=b")
    assert request.query["continue"] == "next"


async def test_an_event_fits_the_api_whatever_it_says(cluster: KubernetesCluster, served: Served) -> None:
    resource = {"apiVersion": "mmrouter.io/v1alpha1", "kind": "MMRouterDeployment"}
    resource["metadata"] = {"name": "d", "namespace": "n", "uid": "u"}  # type: ignore[assignment]
    await cluster.event(resource, "Warning", "SpecInvalid", "Reconcile", "x" * 5000)
    request, body = served.last
    assert request.path == "/apis/events.k8s.io/v1/namespaces/n/events"
    assert len(body["note"]) == 1024
    assert body["regarding"] == {**{k: resource[k] for k in ("apiVersion", "kind")}, **resource["metadata"]}  # type: ignore[dict-item]


ANSWERS: dict[type[ApiError], str] = {
    client.Refused: "400 BadRequest, 403 Forbidden, 422 Invalid",
    client.NotFound: "404 NotFound",
    client.AlreadyExists: "409 AlreadyExists",
    client.Conflict: "409 Conflict",
    client.TooManyRequests: "429 TooManyRequests",
    Unavailable: "401 Unauthorized, 500 InternalError, 503 ServiceUnavailable",
}


@pytest.mark.parametrize(
    ("answer", "error"), [(answer, error) for error, answers in ANSWERS.items() for answer in answers.split(", ")]
)
async def test_every_failure_has_its_error(
    cluster: KubernetesCluster, served: Served, answer: str, error: type[ApiError]
) -> None:
    status, reason = answer.split()
    served.status = int(status)
    served.body = {"kind": "Status", "reason": reason, "message": "the server's sentence"}
    served.headers = {"Retry-After": "3"} if status in {"429", "503"} else {}
    with pytest.raises(error, match="the server's sentence") as raised:
        await cluster.apply(CONFIG_MAP)
    assert type(raised.value) is error
    assert raised.value.status == served.status
    assert raised.value.retry_after == (3.0 if served.headers else None)
    assert len(served.requests) == 1, "the queue repeats, not the client"


async def test_no_server_and_a_silent_one_are_unavailable(
    cluster: KubernetesCluster, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "TIMEOUT", 0.1)
    served.before = asyncio.Event().wait
    with pytest.raises(Unavailable, match="no answer"):
        await cluster.get(REF)
    nowhere = KubernetesCluster(Configuration(host="http://127.0.0.1:1"), user_agent="", identity="")
    with pytest.raises(Unavailable):
        await nowhere.get(REF)
    await nowhere.close()


WRITES: list[Callable[[KubernetesCluster], Awaitable[object]]] = [
    lambda fenced: fenced.apply(CONFIG_MAP),
    lambda fenced: fenced.create(CONFIG_MAP),
    lambda fenced: fenced.replace(CONFIG_MAP),
    lambda fenced: fenced.apply_status(CONFIG_MAP),
    lambda fenced: fenced.apply_gates(POD, {}),
    lambda fenced: fenced.delete(REF, "u"),
    lambda fenced: fenced.event(CONFIG_MAP, "Normal", "R", "A", "n"),
]


@pytest.mark.parametrize("write", WRITES)
async def test_a_deposed_leader_writes_nothing(
    cluster: KubernetesCluster, served: Served, write: Callable[[KubernetesCluster], Awaitable[object]]
) -> None:
    with pytest.raises(LeaseLost):
        await write(cluster.fenced(lambda: 0.0))
    assert served.requests == []
    await write(cluster.fenced(lambda: 5.0))
    assert len(served.requests) == 1


async def test_an_api_that_is_served_without_our_kind_is_not_served(cluster: KubernetesCluster, served: Served) -> None:
    """Some clusters have the Prometheus operator's group for its other kinds only."""
    versions = [{"groupVersion": api} for api in ("apps/v1", "monitoring.coreos.com/v1", "keda.sh/v1alpha1")]
    served.body = {"groups": [{"versions": versions}], "resources": [{"name": "scaledobjects"}]}
    assert (await cluster.capabilities()).apis == {"v1", "apps/v1", "keda.sh/v1alpha1"}


async def test_a_deposed_leader_may_still_read(cluster: KubernetesCluster, served: Served) -> None:
    assert await cluster.fenced(lambda: 0.0).get(REF) == {}


@pytest.mark.parametrize("connected", [False, True])
async def test_a_lease_that_runs_out_while_a_write_waits_for_its_connection_stops_the_write(
    cluster: KubernetesCluster, served: Served, connected: bool
) -> None:
    """The first look finds a lease; the one with the connection in hand, a new or an old one, does not."""
    if connected:
        await cluster.get(REF)
    looks = iter([5.0, 0.0])
    with pytest.raises(LeaseLost):
        await cluster.fenced(lambda: next(looks)).apply(CONFIG_MAP)
    assert len(served.requests) == connected


async def test_a_lease_that_runs_out_after_the_connection_stands_stops_the_write_before_its_first_byte(
    cluster: KubernetesCluster, served: Served
) -> None:
    """What a process sees that was stopped between the two and woke too late."""
    await cluster.get(REF)
    for write in WRITES:
        looks = iter([5.0, 5.0, 0.0])
        with pytest.raises(LeaseLost):
            await write(cluster.fenced(lambda looks=looks: next(looks)))  # type: ignore[misc]
    assert len(served.requests) == 1
    await cluster.fenced(lambda: 5.0).apply(CONFIG_MAP)
    assert len(served.requests) == 2


async def test_a_write_is_given_up_when_the_lease_runs_out(cluster: KubernetesCluster, served: Served) -> None:
    served.before = asyncio.Event().wait
    async with asyncio.timeout(5):
        with pytest.raises(LeaseLost, match="ran out"):
            await cluster.fenced(lambda: 0.2).apply(CONFIG_MAP)
