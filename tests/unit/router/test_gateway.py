"""The gateway between clients and frontends, over real sockets: what is passed on, refused, counted and sent again."""

import asyncio
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import openai
import pytest
from unit.router import test_pods as pods
from unit.router.certificates import certificate
from unit.router.rig import (
    PORT,
    Engine,
    LoopbackEngine,
    LoopbackServer,
    counts,
    http_answer,
    loopback,
    no_free_descriptors,
)
from waiting import until

from mmrouter_lib.engines.base.launch import HTTP_PORT
from mmrouter_lib.tls_context import server_context
from mmrouter_router.gateway import forwarding
from mmrouter_router.gateway.app import Gateway, GatewaySettings
from mmrouter_router.gateway.config import Target
from mmrouter_router.gateway.discovery import DeploymentListener, parse_deployment, watch_deployments
from mmrouter_router.gateway.metrics import GatewayMetrics
from mmrouter_router.gateway.model_routes import Deployment

keys = pods.keys
CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Tell of the sea."}]


def deployment(name: str, host: str, **fields) -> Deployment:
    return Deployment(name, fields.pop("model", name), host, HTTP_PORT, **fields)


async def nothing(update, metrics) -> None:
    """Discover nothing: tests set the deployments."""


class Running:
    """A gateway that serves, and a client of it."""

    def __init__(self, gateway: Gateway, server: LoopbackServer, client: httpx.AsyncClient) -> None:
        self.gateway, self.server, self.client = gateway, server, client
        self.metrics = gateway.metrics

    @property
    def url(self) -> str:
        return f"http://{self.server.ip}:{PORT}"

    async def ask(self, model: str = "a", path: str = CHAT, **options) -> httpx.Response:
        body = {"model": model, "messages": MESSAGES}
        return await self.client.post(self.url + path, **{"json": body, **options})


@asynccontextmanager
async def running(*deployments: Deployment, **settings):
    gateway = Gateway(GatewaySettings(host="127.0.0.1", **settings), nothing)
    gateway.use_deployments(deployments)
    async with LoopbackServer(gateway.app()) as server, httpx.AsyncClient(timeout=30) as client:
        yield Running(gateway, server, client)


class Streaming(LoopbackEngine):
    """A frontend that sends each piece of an answer when the test allows it; empty: it breaks off."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.left = False

    async def respond(self, reader, writer, headers) -> bool:
        writer.write(b"HTTP/1.1 200 X\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        leaving = asyncio.create_task(reader.read(1))
        while True:
            piece = asyncio.create_task(self.pieces.get())
            await asyncio.wait((leaving, piece), return_when=asyncio.FIRST_COMPLETED)
            if leaving.done():
                self.left = True
                piece.cancel()
                return False
            data = piece.result()
            if data is None:
                leaving.cancel()
                writer.write(b"0\r\n\r\n")
                return False
            if not data:
                writer.transport.abort()
                return False
            writer.write(b"%x\r\n%s\r\n" % (len(data), data))


@asynccontextmanager
async def streaming():
    """Begin a stream through a gateway; yield the gateway, the frontend and the answer."""
    frontend = Streaming()
    await frontend.serve()
    async with running(deployment("a", frontend.ip)) as it:
        body = {"model": "a", "messages": MESSAGES, "stream": True}
        async with it.client.stream("POST", it.url + CHAT, json=body) as answer:
            yield it, frontend, answer
    frontend.close()


class Breaking(LoopbackEngine):
    """A frontend that closes the connection of the first ``faults`` requests without an answer."""

    def __init__(self, faults: int) -> None:
        super().__init__()
        self.faults = faults

    async def respond(self, reader, writer, headers) -> bool:
        if len(self.requests) <= self.faults:
            writer.transport.abort()
            return False
        writer.write(http_answer(200, b'{"answered": true}'))
        return True


class Encrypted(Breaking):
    """A frontend that serves TLS at an address that its certificate names."""

    def __init__(self, folder: Path) -> None:
        super().__init__(faults=0)
        self.ip = "127.1.251.1"
        for name, content in zip(("tls.crt", "tls.key"), certificate(0), strict=True):
            (folder / name).write_bytes(content)
        self._context = server_context(str(folder / "tls.crt"), str(folder / "tls.key"))

    async def serve(self) -> None:
        self.server = await asyncio.start_server(self._connection, self.ip, HTTP_PORT, ssl=self._context)


async def test_requests_go_to_the_deployment_of_their_model_with_the_clients_key_and_name():
    async with Engine() as a, Engine(429) as b, running(deployment("a", a.ip), deployment("b", b.ip)) as it:
        headers = {"authorization": "Bearer tenant-key", "x-request-id": "mine", "x-mmrouter-control": "token"}
        answer = await it.ask("a", headers=headers)
        assert (answer.status_code, answer.json(), answer.headers["x-mmrouter-deployment"]) == (200, {}, "a")
        assert (await it.ask("b")).status_code == 429  # a frontend's own refusal
        (path, sent, body), *_ = a.requests
        assert (path, body) == (CHAT, {"model": "a", "messages": MESSAGES})
        assert headers.items() <= sent.items()
        assert sent["host"] == f"{a.ip}:{HTTP_PORT}"
        assert b.requests[0][1].get("authorization") is None
        assert b.requests[0][1]["x-request-id"]
        assert counts(it.metrics.requests, "deployment", "code") == {("a", "200"): 1, ("b", "429"): 1}
        assert counts(it.metrics.refused, "reason") == {}


async def test_an_unknown_model_is_refused_in_the_shape_of_its_api_with_the_served_names():
    async with Engine() as a, running(deployment("a", a.ip), deployment("b", a.ip)) as it:
        client = openai.AsyncOpenAI(base_url=f"{it.url}/v1", api_key="any", max_retries=0)
        with pytest.raises(openai.NotFoundError) as refused:
            await client.chat.completions.create(model="c", messages=MESSAGES)
        assert (refused.value.code, refused.value.param) == ("model_not_found", "model")
        assert refused.value.body["message"].endswith("Served: a, b.")
        anthropic = await it.ask("c", "/v1/messages")
        assert (anthropic.status_code, anthropic.json()["error"]["type"]) == (404, "not_found_error")
        assert a.requests == []
        assert counts(it.metrics.refused, "reason") == {"model_not_found": 2}
        assert counts(it.metrics.requests, "deployment", "code") == {("", "404"): 2}


async def test_the_model_list_of_the_official_client_is_the_union():
    known = deployment("a", "127.0.0.1", exact="True", exact_ratio=0.5), deployment("b", "127.0.0.1", model="org/b")
    async with running(*known) as it:
        client = openai.AsyncOpenAI(base_url=f"{it.url}/v1", api_key="any", max_retries=0)
        assert [(model.id, model.exact) for model in (await client.models.list()).data] == [
            ("a", "True"),
            ("org/b", "Unknown"),
        ]
        assert (await client.models.retrieve("org/b")).deployments[0]["name"] == "b"


async def test_an_answer_is_passed_on_as_it_arrives_and_ends_as_the_frontends_does():
    async with streaming() as (it, frontend, answer):
        pieces = answer.aiter_raw()
        for number in range(3):
            frontend.pieces.put_nowait(b"data: %d\n\n" % number)
            assert await anext(pieces) == b"data: %d\n\n" % number
        assert it.gateway.forwarding.budget.used == 0  # the request's body is not held while its answer streams
        frontend.pieces.put_nowait(None)
        assert [piece async for piece in pieces] == []


async def test_a_client_that_leaves_ends_its_request_at_the_frontend():
    async with streaming() as (it, frontend, answer):
        frontend.pieces.put_nowait(b"data: 1\n\n")
        await anext(answer.aiter_raw())
        await answer.aclose()
        await until(lambda: frontend.left)
        await until(lambda: counts(it.metrics.requests, "deployment", "code") == {("a", "499"): 1})


async def test_large_bodies_pass_whole_and_those_above_the_limit_are_refused():
    image = "A" * 3_000_000
    content = [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image}"}}]
    body = {"messages": [{"role": "user", "content": content}], "model": "alias"}
    async with Engine() as a, running(deployment("a", a.ip), max_request_bytes=4_000_000) as it:
        it.gateway.use_aliases({"alias": [Target(deployment="a")]})
        assert (await it.ask(json=body)).status_code == 200
        assert a.requests[0][2] == {**body, "model": "a"}
        body["messages"][0]["content"] *= 2
        refused = await it.ask(json=body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (413, "request_too_large")
        assert len(a.requests) == 1


async def test_a_request_without_an_answer_is_sent_again_and_one_that_finds_no_frontend_is_refused(monkeypatch):
    monkeypatch.setattr(forwarding, "PAUSES", (0.0, 0.0))
    frontend = Breaking(faults=2)
    await frontend.serve()
    async with running(deployment("a", frontend.ip), deployment("down", loopback())) as it:
        assert (await it.ask("a")).json() == {"answered": True}
        assert [body for _, _, body in frontend.requests] == [{"model": "a", "messages": MESSAGES}] * 3
        refused = await it.ask("down")
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert refused.json()["error"] == {
            "message": "The deployment down does not answer. Try again.",
            "type": "server_error",
            "param": None,
            "code": "deployment_unreachable",
        }
        assert counts(it.metrics.repeated, "deployment") == {"a": 2, "down": 2}
    frontend.close()


async def test_a_gateway_without_free_descriptors_does_not_blame_the_deployment():
    async with Engine() as a, Engine() as b, running(deployment("a", a.ip), deployment("b", b.ip)) as it:
        assert (await it.ask("a")).status_code == 200  # the client's connection is kept
        with no_free_descriptors():
            refused = await it.ask("b")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "router_exhausted")
        assert counts(it.metrics.repeated, "deployment") == {}


@pytest.mark.parametrize(
    ("failure", "status", "code"), [(ZeroDivisionError, 500, "internal_error"), (MemoryError, 503, "router_exhausted")]
)
async def test_a_failure_of_the_gateway_has_openais_shape_and_is_counted(monkeypatch, failure, status, code):
    def fails(*args) -> None:
        raise failure

    monkeypatch.setattr(forwarding, "routed", fails)
    async with running(deployment("a", loopback())) as it:
        answer = await it.ask()
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
        assert counts(it.metrics.requests, "deployment", "code") == {("", str(status)): 1}


async def test_an_answer_that_breaks_off_is_not_sent_again_and_ends_the_clients_connection():
    async with streaming() as (it, frontend, answer):
        frontend.pieces.put_nowait(b"data: 1\n\n")
        pieces = answer.aiter_raw()
        await anext(pieces)
        frontend.pieces.put_nowait(b"")
        with pytest.raises(httpx.RemoteProtocolError):
            await anext(pieces)
        assert len(frontend.requests) == 1
        await until(lambda: ("a", "broken_off") in counts(it.metrics.requests, "deployment", "code"))


async def test_paths_that_no_frontend_serves_are_refused_without_one():
    async with Engine() as a, running(deployment("a", a.ip)) as it:
        assert (await it.ask("a", "/generate")).status_code == 404  # its body has no model
        assert (await it.ask("a", "/v1/images/generations")).json()["error"]["code"] == "unknown_url"
        assert (await it.client.get(it.url + CHAT)).json()["error"]["code"] == "method_not_allowed"
        assert (await it.ask("a", CHAT + "/")).status_code == 200
        assert len(a.requests) == 1


async def test_with_keys_of_its_own_the_gateway_refuses_strangers_before_it_reads_a_body(tmp_path):
    (tmp_path / "team").write_text("key-1\nkey-2\n")
    async with Engine() as a, running(deployment("a", a.ip), api_keys=tmp_path) as it:
        allowed = {"authorization": "Bearer key-2"}
        assert (await it.ask("a", headers=allowed)).status_code == 200
        assert a.requests[0][1]["authorization"] == "Bearer key-2"
        for path in (CHAT, "/v1/messages"):
            assert (await it.ask("c", path, headers={"authorization": "Bearer wrong"})).status_code == 401
        assert (await it.client.get(f"{it.url}/v1/models")).status_code == 401
        assert (await it.client.get(f"{it.url}/health")).status_code == 200


async def test_readiness_and_health_wait_for_the_deployments_and_end_with_the_drain():
    gateway = Gateway(GatewaySettings(host="127.0.0.1"), nothing)
    async with LoopbackServer(gateway.app()) as server, httpx.AsyncClient() as client:

        async def statuses() -> list[int]:
            paths = ("/health", "/ready")
            return [(await client.get(f"http://{server.ip}:{PORT}{path}")).status_code for path in paths]

        assert (await statuses(), gateway.ready) == ([503, 503], False)
        gateway.use_deployments(())
        assert (await statuses(), gateway.ready) == ([200, 503], True)
        gateway.use_deployments((deployment("a", "127.0.0.1"),))
        assert await statuses() == [200, 200]
        gateway.shutdown.drain("the test")
        assert (await statuses(), gateway.ready) == ([503, 503], False)


async def test_a_deployment_with_tls_is_reached_only_with_a_ca_that_verifies_it(tmp_path):
    frontend = Encrypted(tmp_path)
    await frontend.serve()
    known = deployment("a", frontend.ip, tls=True)
    async with running(known) as it:
        refused = await it.ask("a")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_ca")
    for number, status in ((0, 200), (1, 503)):
        (tmp_path / "ca.crt").write_bytes(certificate(number)[0])
        async with running(known, ca=tmp_path) as it:
            assert (await it.ask("a")).status_code == status
    assert len(frontend.requests) == 1
    frontend.close()


# -- discovery


def resource(name: str, **spec) -> dict:
    return {
        "metadata": {"name": name, "namespace": "team", "uid": name, "creationTimestamp": "1970-01-01T00:01:00Z"},
        "spec": {"model": {"id": "org/model"}, **spec},
        "status": {
            "conditions": [{"type": "Ready", "status": "True"}, {"type": "ExactRoutingVerified", "status": "False"}],
            "routing": {"exactRatio": "0.75"},
        },
    }


def test_a_resource_gives_name_model_address_and_exactness():
    assert parse_deployment(resource("a")) == Deployment(
        "a", "a", "a.team.svc", 80, False, "org/model", 60, "False", 0.75
    )
    own = resource("b", model={"servedName": "org/b"}, frontend={"service": {"port": 443}, "tls": {"secretName": "x"}})
    assert parse_deployment({**own, "status": None}) == Deployment("b", "org/b", "b.team.svc", 443, True, "", 60)
    own["metadata"]["deletionTimestamp"] = "1970-01-01T00:02:00Z"
    assert parse_deployment(own) is None


def test_the_watch_publishes_each_change_once_and_keeps_the_last_list_while_the_api_is_away():
    published, metrics = [], GatewayMetrics()
    listener = DeploymentListener(lambda found: published.append([one.name for one in found]), metrics)
    listener.list_started()
    listener.listed([resource("b"), resource("a")])
    listener.list_complete(frozenset("ab"))
    listener.event("MODIFIED", {**resource("a"), "metadata": {**resource("a")["metadata"], "labels": {"x": "y"}}})
    listener.failed("unreachable", OSError())
    listener.event("DELETED", resource("b"))
    listener.listed([resource("c")])
    listener.list_complete(frozenset("c"))
    assert published == [["a", "b"], ["a"], ["c"]]
    assert counts(metrics.discovery_errors, "reason") == {"unreachable": 1}


class DeploymentsApi(pods.Api):
    """An API server that a gateway asks."""

    def follow(self, where):
        self.metrics = GatewayMetrics()
        return watch_deployments(where, "team", "tier=prod", self.told.append, self.metrics)


async def test_the_deployments_of_the_namespace_with_the_labels_are_listed_and_watched(keys, tmp_path):
    def versioned(name: str) -> dict:
        return {**resource(name), "metadata": {**resource(name)["metadata"], "resourceVersion": "7"}}

    script = pods.listing("5", versioned("a")), (200, (), [pods.event("ADDED", versioned("b"))]), pods.QUIET
    async with DeploymentsApi(keys, tmp_path, *script).running() as server:
        await until(lambda: len(server.asked) == 3)
        assert server.path == "/apis/mmrouter.io/v1alpha1/namespaces/team/mmrouterdeployments"
        assert {query["labelSelector"] for query in server.asked} == {"tier=prod"}
        assert [[one.name for one in found] for found in server.told] == [["a"], ["a", "b"]]
        assert server.metrics.registry.get_sample_value("mmrouter_gateway_discovery_synced") == 1


def test_an_alias_is_used_as_soon_as_the_file_changes():
    gateway = Gateway(GatewaySettings(host="127.0.0.1"), nothing)
    gateway.use_deployments((deployment("a", "127.0.0.1"),))
    gateway.use_aliases({"m": [Target(deployment="a")]})
    assert gateway.routes.names == ["a", "m"]
    gateway.use_aliases({"n": [Target(deployment="b")]})
    assert gateway.routes.names == ["a"]
    assert gateway.routes.problems == ["alias 'n': there is no deployment b"]
