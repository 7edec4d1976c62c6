"""Stored responses: their ids, which engine continues, retrieves and cancels them, and for which tenant."""

import asyncio
import json
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import pytest
from unit.router.rig import KEYS, WORKERS, LoopbackEngine, deployment, heartbeat, resource, sync, value
from unit.router.router_rig import client_of, join, member, router

from mmrouter_router.core.response_ids import ResponseIds
from mmrouter_router.fleet.membership import Membership

RESPONSES = "/v1/responses"
KEY = bytes(range(32))
STORE = {"name": "engine", "env": [{"name": "VLLM_ENABLE_RESPONSES_API_STORE", "value": "1"}]}
POOL = {**WORKERS, "podTemplate": {"spec": {"containers": [STORE]}}}
STORING = resource(pools=[POOL])
LOST, UNKNOWN = "response_lost", "response_not_found"
PREVIOUS = "previous_response_id"


# -- ids


def test_an_id_says_to_every_router_where_its_response_is():
    made = ResponseIds(KEY).make("r1-01ABC", "uid-a", "tenant")
    ids = ResponseIds(KEY)
    assert ids.place_in(made, "tenant") == ids.place("uid-a") != ids.place("uid-b")
    assert made.startswith("resp_r1-01ABC_")
    assert "uid-a" not in made


def test_an_id_of_another_tenant_a_changed_one_and_one_of_another_deployment_are_none():
    ids = ResponseIds(KEY)
    made = ids.make("r1-01ABC", "uid-a", "tenant")
    assert (
        ids.place_in(made, "other") is ids.place_in(made, "") is ResponseIds(bytes(32)).place_in(made, "tenant") is None
    )
    for at, letter in enumerate(made):
        changed = made[:at] + ("0" if letter != "0" else "1") + made[at + 1 :]
        assert ids.place_in(changed, "tenant") is None, changed
    for other in ("", "resp_1", made[:-1], made + "0", f" {made}", f"{made}\n"):
        assert ids.place_in(other, "tenant") is None


# -- through routers


class Stores(LoopbackEngine):
    """An engine that stores responses as vLLM does. ``stored``: by id."""

    def __init__(self):
        super().__init__()
        self.stored: dict[str, dict] = {}
        self.silent = False  # a stream has a head and nothing more
        self.left = asyncio.Event()  # the reader of such a stream has closed its connection

    async def respond(self, reader, writer, headers):
        path, _, body = self.requests[-1]
        if self.silent and "stream=true" in path:
            writer.write(b"HTTP/1.1 200 X\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
            await reader.read(1)
            self.left.set()
            return False
        status, answer = self._answer(path.partition("?")[0], body)
        raw = json.dumps(answer).encode()
        head = b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        writer.write(head % (status, len(raw)) + raw)
        return True

    def _answer(self, path, body):
        error = {
            "error": {"message": "not found", "type": "invalid_request_error", "param": "response_id", "code": 404}
        }
        if path == "/v1/chat/completions":
            choice = {"index": 0, "message": {"role": "assistant", "content": "a"}, "finish_reason": "stop"}
            return 200, {"id": "chatcmpl-1", "model": "t", "created": 1, "choices": [choice]}
        if path == RESPONSES:
            if body.get(PREVIOUS) not in (None, *self.stored):
                return 404, error
            made = {"id": body["request_id"], "object": "response", PREVIOUS: body.get(PREVIOUS)}
            made["status"] = "queued" if body.get("background") else "completed"
            self.stored[made["id"]] = made
            return 200, made
        name, cancel = path.removeprefix(f"{RESPONSES}/").removesuffix("/cancel"), path.endswith("/cancel")
        found = self.stored.get(name)
        if found is None:
            return 404, error
        if cancel and found["status"] == "completed":
            return 400, {"error": {"message": "Cannot cancel a synchronous response.", "param": "response_id"}}
        if cancel:
            found["status"] = "cancelled"
        return 200, found


def join_all(r, engines):
    join(r, *(member(name, engine.ip) for name, engine in engines.items()))


@asynccontextmanager
async def routers(path, *names, own=STORING, tenants=()):
    """Yield two routers of one deployment, a client of each, and its engines by name."""
    for tenant in tenants:
        (path / "api-keys").mkdir(exist_ok=True)
        (path / "api-keys" / tenant).write_text(f"key-{tenant}")
    engines = {name: Stores() for name in names or ("a", "b", "c")}
    async with AsyncExitStack() as stack:
        for engine in engines.values():
            await engine.serve()
            stack.callback(engine.close)
        made = [await stack.enter_async_context(router(path, own)) for _ in range(2)]
        for each in made:
            join_all(each, engines)
        clients = [await stack.enter_async_context(client_of(each)) for each in made]
        yield made, clients, engines


def body(given="x", **fields):
    return {"model": "t", "input": given, **fields}


def fault(answer):
    error = answer.json()["error"]
    return answer.status_code, error["param"], error["code"]


async def test_a_client_that_leaves_a_stream_without_an_event_ends_it_at_the_engine(tmp_path):
    async with routers(tmp_path, "a") as ((_, router), (one, _), engines):
        given = (await one.post(RESPONSES, json=body(background=True))).json()["id"]
        engines["a"].silent, begun = True, asyncio.Event()
        inputs = iter([{"type": "http.request", "body": b"", "more_body": False}])

        async def receive():
            if (message := next(inputs, None)) is not None:
                return message
            await begun.wait()
            return {"type": "http.disconnect"}

        async def send(message):
            assert message.get("status", 200) == 200
            begun.set()  # the head does not wait for an event

        scope = {"type": "http", "method": "GET", "path": f"{RESPONSES}/{given}", "headers": [], "root_path": ""}
        query = b"stream=true&starting_after=9"
        async with asyncio.timeout(60):
            await router.client_app()({**scope, "query_string": query}, receive, send)
            await engines["a"].left.wait()


async def test_a_response_is_continued_and_retrieved_at_its_engine_through_another_router(tmp_path):
    async with routers(tmp_path) as (_, (one, other), engines):
        for number in range(6):
            first = (await one.post(RESPONSES, json=body(f"{number}"))).json()
            holder = next(engine for engine in engines.values() if first["id"] in engine.stored)
            answer = await other.post(RESPONSES, json=body("and?", previous_response_id=first["id"]))
            assert (answer.status_code, answer.json()[PREVIOUS]) == (200, first["id"])
            assert answer.json()["id"] in holder.stored
            assert (await other.get(f"{RESPONSES}/{first['id']}")).json() == first
        assert sum(bool(engine.stored) for engine in engines.values()) > 1, "the engines share the conversations"


async def test_the_decision_says_that_the_engine_stores_the_response_that_is_continued(tmp_path):
    async with routers(tmp_path) as ((made, _), (client, _), _):
        first = (await client.post(RESPONSES, json=body())).json()["id"]
        created = made.decisions.get(first).as_json()
        assert (created["exactness"], created["reasons"]) == ("exact", [])
        assert created["prompt_tokens"] > 0
        second = (await client.post(RESPONSES, json=body("and?", previous_response_id=first))).json()["id"]
        decision = made.decisions.get(second).as_json()
        assert (decision["exactness"], decision["reasons"]) == ("affinity", ["stored_messages:previous_response_id"])
        assert decision["why"] == "stores the response that is continued"
        assert [each["worker"] for each in decision["candidates"]] == [created["worker"]]
        assert value(made.metrics.decisions.labels("affinity", "stored_messages")) == 1


async def test_only_a_response_that_still_runs_is_cancelled(tmp_path):
    async with routers(tmp_path, "a") as (_, (one, other), _):
        done = (await one.post(RESPONSES, json=body())).json()["id"]
        answer = await other.post(f"{RESPONSES}/{done}/cancel")
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "response_id")
        queued = (await one.post(RESPONSES, json=body(background=True))).json()
        assert queued["status"] == "queued"
        assert (await other.post(f"{RESPONSES}/{queued['id']}/cancel")).json()["status"] == "cancelled"


async def test_the_prompt_of_a_response_in_the_background_is_not_compared_before_it_is_computed(tmp_path):
    async with routers(tmp_path, "a") as ((made, _), (client, _), _):
        compared = []
        made.sampler.offer = compared.append
        await client.post(RESPONSES, json=body(background=True))
        done = (await client.post(RESPONSES, json=body())).json()["id"]
        assert compared == [made.decisions.get(done)]


async def test_a_tenant_cannot_find_another_tenants_response(tmp_path):
    async with routers(tmp_path, tenants=("alice", "bob")) as (_, (one, other), engines):
        alice, bob = ({"authorization": f"Bearer key-{name}"} for name in ("alice", "bob"))
        mine = (await one.post(RESPONSES, json=body(), headers=alice)).json()["id"]
        assert (await other.get(f"{RESPONSES}/{mine}", headers=alice)).status_code == 200
        asked = [engine.requests.copy() for engine in engines.values()]
        continued = await other.post(RESPONSES, json=body(previous_response_id=mine), headers=bob)
        assert fault(continued) == (404, PREVIOUS, UNKNOWN)
        assert fault(await other.get(f"{RESPONSES}/{mine}", headers=bob)) == (404, "response_id", UNKNOWN)
        assert fault(await other.post(f"{RESPONSES}/{mine}/cancel", headers=bob)) == (404, "response_id", UNKNOWN)
        made_up = await other.get(f"{RESPONSES}/resp_1", headers=bob)
        assert made_up.json()["error"]["message"] == "There is no response 'resp_1'."
        assert (await other.get(f"{RESPONSES}/{mine}")).status_code == 401
        assert [engine.requests for engine in engines.values()] == asked, "no engine got a request"


async def test_a_response_whose_engine_is_gone_or_has_restarted_is_lost(tmp_path):
    async with routers(tmp_path, "a", "b") as ((_, made), (one, other), engines):
        mine = (await one.post(RESPONSES, json=body())).json()["id"]
        holder = next(name for name, engine in engines.items() if mine in engine.stored)
        engines[holder].stored.clear()
        for answer, param in (
            (await other.get(f"{RESPONSES}/{mine}"), "response_id"),
            (await other.post(f"{RESPONSES}/{mine}/cancel"), "response_id"),
            (await other.post(RESPONSES, json=body(previous_response_id=mine)), PREVIOUS),
        ):
            assert fault(answer) == (404, param, LOST)
            assert "the engine that stored it has restarted since" in answer.json()["error"]["message"]
        join_all(made, {name: engine for name, engine in engines.items() if name != holder})
        for answer, param in (
            (await other.get(f"{RESPONSES}/{mine}"), "response_id"),
            (await other.post(RESPONSES, json=body(previous_response_id=mine)), PREVIOUS),
        ):
            assert fault(answer) == (404, param, LOST)
            assert "the engine that stored it is gone" in answer.json()["error"]["message"]


async def test_an_engine_that_is_out_of_reach_leaves_its_responses_for_later(tmp_path):
    async with routers(tmp_path, "a", "b") as (_, (one, other), engines):
        mine = (await one.post(RESPONSES, json=body())).json()["id"]
        next(engine for engine in engines.values() if mine in engine.stored).close()
        for answer in (
            await other.get(f"{RESPONSES}/{mine}"),
            await other.post(RESPONSES, json=body(previous_response_id=mine)),
        ):
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")


async def test_a_response_is_placed_only_where_it_is_stored(tmp_path):
    own = resource(pools=[{**POOL, "name": "keeps"}, WORKERS])
    async with routers(tmp_path, "a", "b", own=own) as (made, (client, _), engines):
        for each in made:
            join_all(each, {})
            keeps = replace(member("a", engines["a"].ip), pool="keeps")
            each.apply_membership(Membership((keeps, member("b", engines["b"].ip))))
            for worker in each.fleet:
                each.fleet.feed_connected(worker)
                sync(each.fleet, worker, KEYS)
                heartbeat(each.fleet, worker)
        for number in range(6):
            await client.post(RESPONSES, json=body(f"{number}"))
            await client.post(RESPONSES, json=body(f"{number}", store=False))
        paths = [{path for path, _, _ in engine.requests} for engine in engines.values()]
        assert (RESPONSES in paths[0], RESPONSES in paths[1]) == (True, False)


async def test_a_response_that_is_not_to_be_stored_has_an_id_that_cannot_be_continued(tmp_path):
    async with routers(tmp_path, "a") as (_, (client, _), engines):
        made = (await client.post(RESPONSES, json=body(store=False))).json()["id"]
        assert [path for path, _, _ in engines["a"].requests] == ["/v1/chat/completions"]
        assert fault(await client.post(RESPONSES, json=body(previous_response_id=made))) == (404, PREVIOUS, UNKNOWN)


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ({"stream": "maybe"}, (400, "stream", "invalid_value")),
        ({"starting_after": "x"}, (400, "starting_after", "invalid_type")),
        ({"starting_after": "1" * 10}, (400, "starting_after", "invalid_type")),
        ({"other": "1"}, (400, "other", "unknown_parameter")),
    ],
)
async def test_an_unknown_query_is_refused_by_name(tmp_path, query, expected):
    async with routers(tmp_path, "a") as (_, (client, _), engines):
        mine = (await client.post(RESPONSES, json=body())).json()["id"]
        assert fault(await client.get(f"{RESPONSES}/{mine}", params=query)) == expected
        query = {"stream": "false", "starting_after": "3", "include[]": "x"}
        assert (await client.get(f"{RESPONSES}/{mine}", params=query)).status_code == 200
        assert engines["a"].requests[-1][0] == f"{RESPONSES}/{mine}?stream=false&starting_after=3"


async def test_a_retrieval_counts_against_the_tenants_limits(tmp_path):
    limits = {"apiKeys": {"secret": {"name": "s"}}, "tenants": {"default": {"requestsPerMinute": 2, "concurrency": 9}}}
    own = resource(pools=[POOL], frontend=limits)
    async with routers(tmp_path, "a", own=own, tenants=("alice",)) as (_, (client, _), _):
        headers = {"authorization": "Bearer key-alice"}
        mine = (await client.post(RESPONSES, json=body(), headers=headers)).json()["id"]
        answers = [await client.get(f"{RESPONSES}/{mine}", headers=headers) for _ in range(2)]
        assert [answer.status_code for answer in answers] == [200, 429]
        assert "x-ratelimit-remaining-requests" in answers[0].headers


async def test_a_tenant_with_a_limit_on_concurrent_requests_runs_none_in_the_background(tmp_path):
    limits = {"apiKeys": {"secret": {"name": "s"}}, "tenants": {"default": {"concurrency": 2}}}
    own = resource(pools=[POOL], frontend=limits)
    async with routers(tmp_path, "a", own=own, tenants=("alice",)) as (_, (client, _), engines):
        headers = {"authorization": "Bearer key-alice"}
        answer = await client.post(RESPONSES, json=body(background=True), headers=headers)
        assert fault(answer) == (400, "background", "unsupported_parameter")
        assert engines["a"].requests == []


async def test_without_a_store_nothing_is_retrieved_and_nothing_runs_in_the_background(tmp_path):
    async with routers(tmp_path, "a", own=deployment()) as (_, (client, _), _):
        assert fault(await client.get(f"{RESPONSES}/resp_1")) == (404, None, "unknown_url")
        assert fault(await client.post(RESPONSES, json=body(background=True)))[:2] == (400, "background")
