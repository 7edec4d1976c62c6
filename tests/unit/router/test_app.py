"""Readiness of a router, its reaction to membership changes, and its cold routes; feeds are driven by the tests."""

import json
from dataclasses import replace

import httpx
import pytest
from unit.router.rig import BLOCK, IDS, KEYS, LoopbackServer, Rig, counts, prepared, resource
from unit.router.router_rig import HELLO, OWN_IP, client_of, heard, join, member, router, value

from mmrouter_router import app
from mmrouter_router.explain.decisions import DecisionLog, DecisionTrace
from mmrouter_router.fleet.membership import Membership, Peer
from mmrouter_router.http.body_budget import BodyReservation
from mmrouter_router.request.prepared import CHAT
from mmrouter_router.scheduling.placer import Booking, Placer, QueueFullError


async def test_ready_once_all_known_sidecars_sent_their_snapshot(r):
    assert not r.ready
    r.apply_membership(Membership((member("a"), member("b"))))
    heard(r, "uid-a")
    assert not r.ready
    heard(r, "uid-b")
    assert r.ready


@pytest.mark.parametrize("state", [{"ready": False}, {"draining": True}])
async def test_starting_or_draining_pod_does_not_delay_readiness(r, state):
    r.apply_membership(Membership((member("a"), member("other", **state))))
    heard(r, "uid-a")
    assert r.ready


async def test_ready_at_the_deadline_without_all_snapshots(monkeypatch):
    monkeypatch.setattr(app, "READY_SECONDS", 0.0)
    async with router() as r:
        r.apply_membership(Membership((member("a"),)))
        assert r.ready


async def test_readiness_survives_new_and_lost_workers_until_the_own_pod_is_deleted(r):
    for members in ((), (member("a"), member("b")), ()):
        r.apply_membership(Membership(members))
        assert r.ready
    r.apply_membership(Membership((), leaving=True))
    assert not r.ready
    assert not r.shutdown.stopping.is_set()


async def test_pod_with_new_address_gets_a_new_feed_and_an_empty_cache(r):
    join(r, member("a"))
    before, feed = r.fleet.workers["uid-a"], r.feed("uid-a")
    assert len(r.fleet.index) == len(KEYS)
    r.apply_membership(Membership((member("a", ip="127.84.0.9"),)))
    after = r.fleet.workers["uid-a"]
    assert (after is before, r.feed("uid-a") is feed) == (False, False)
    assert (after.slots, after.sync.synced) == ({}, False)


async def test_pod_that_changes_state_keeps_feed_and_cache(r):
    join(r, member("a", ready=False))
    before, feed = r.fleet.workers["uid-a"], r.feed("uid-a")
    r.apply_membership(Membership((member("a", draining=True),)))
    assert r.fleet.workers["uid-a"] is before
    assert r.feed("uid-a") is feed
    assert before.slots
    assert not before.serving


async def test_router_is_not_its_own_peer(r):
    r.apply_membership(Membership((), (Peer("x", "x", OWN_IP), Peer("y", "y", "127.84.0.3"))))
    assert [peer.uid for peer in r.peers] == ["y"]


@pytest.mark.parametrize("role", ["encoder", "decode", "prefill", "renderer"])
async def test_pods_of_all_roles_are_accepted(r, role):
    r.apply_membership(Membership((member("other", role=role), member("w"))))
    heard(r, "uid-w")
    assert {row["role"] for row in r.reporter.report()["workers"].values()} == {role, "worker"}
    r.apply_membership(Membership((replace(member("other", role=role), draining=True),)))
    rows = r.reporter.report()["workers"]
    assert [(row["role"], row["routable"]) for row in rows.values()] == [(role, False)]


async def test_requests_to_cold_routes_are_counted_without_client_paths_as_labels(r, client):
    for path in ("/v1/models", "/health", "/v1/unknown", "/admin", "/v1/models/../secrets"):
        await client.get(path)
    await client.post("/v1/models")
    counted = counts(r.metrics.requests, "path", "code")
    assert counted == {("/v1/models", "200"): 1, ("/v1/models", "405"): 1, ("other", "404"): 3}


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions", " Did you mean /v1/chat/completions?"),
        ("/v1/v1/chat/completions", " Did you mean /v1/chat/completions?"),
        ("/models", " Did you mean /v1/models?"),
        ("/images/generations", ""),
        ("/v1/images/generations", ""),
    ],
)
async def test_a_path_without_its_version_or_with_two_names_the_right_one(client, path, meant):
    answer = await client.post(path)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_url")
    assert answer.json()["error"]["message"] == f"Unknown request URL: POST {path}.{meant}"


async def test_every_refused_method_names_the_allowed_ones(client):
    read = "GET, HEAD"
    for path, method, allowed in (("/v1/models", "POST", read), (CHAT, "GET", "POST"), ("/health", "PUT", read)):
        answer = await client.request(method, path)
        assert (answer.status_code, answer.headers["allow"]) == (405, allowed)
        assert f"use {allowed.replace(', ', ' or ')}." in answer.json()["error"]["message"]


async def test_head_is_answered_like_get_without_a_body(r):
    async with LoopbackServer(r.client_app()) as server, httpx.AsyncClient() as client:
        for path in ("/v1/models", "/health", "/ready"):
            url = f"http://{server.ip}:8000{path}"
            read, head = await client.get(url), await client.head(url)
            assert (head.status_code, head.content) == (read.status_code, b"")
            assert head.headers.get("content-length") == read.headers.get("content-length")


async def test_slash_at_the_end_of_a_path_changes_nothing(r):
    async with LoopbackServer(r.client_app()) as server, httpx.AsyncClient() as client:
        base = f"http://{server.ip}:8000"
        assert (await client.get(f"{base}/v1/models/")).json() == (await client.get(f"{base}/v1/models")).json()
        answer = await client.post(f"{base}{CHAT}/", json=HELLO)
        assert answer.json()["error"]["code"] == "no_worker", "there is no engine, and the body has arrived"
        answer = await client.post(f"{base}{CHAT}/?query", json=HELLO)
        assert answer.json()["error"]["code"] == "no_worker"
    assert counts(r.metrics.requests, "path", "code") == {("/v1/models", "200"): 2, (CHAT, "503"): 2}


async def test_without_an_engine_a_frontend_is_healthy_but_not_ready(r, client):
    r.apply_membership(Membership(()))
    statuses = [(await client.get(path)).status_code for path in ("/health", "/ready")]
    assert statuses == [200, 503]
    r.apply_membership(Membership((member("demo-worker-1"),)))
    answer = await client.post(CHAT, json=HELLO)
    message = "No engine can take the request now: 1 unsynced. Try again."
    assert (answer.status_code, answer.json()["error"]["message"]) == (503, message)
    heard(r, "uid-demo-worker-1")
    assert (await client.get("/ready")).status_code == 200
    r.shutdown.drain("test")
    assert (await client.get("/ready")).status_code == 503


@pytest.mark.parametrize(
    ("given", "kept"),
    [("my/request-1", True), ("a" * 128, True), ("a" * 129, False), ("two words", False), ("", False)],
)
async def test_every_answer_has_the_clients_request_id_or_a_new_one(r, given, kept):
    headers = {"x-request-id": given}
    async with LoopbackServer(r.client_app()) as server, httpx.AsyncClient(headers=headers) as client:
        base = f"http://{server.ip}:8000"
        hot = [await client.post(base + CHAT, json=body) for body in (HELLO, {}, HELLO)]
        cold = [await client.get(base + path) for path in ("/v1/models", "/health", "/unknown", CHAT)]
        refused = await client.get(f"{base}/v1/models", headers={"x-long": "x" * 70_000})
        assert refused.status_code == 431
        names = [answer.headers["x-request-id"] for answer in (*hot, *cold, refused)]
    assert (set(names) == {given}) == kept
    assert kept or len(set(names)) == len(names)
    assert kept or hot[0].headers["x-mmrouter-request-id"] == names[0]


@pytest.mark.parametrize(
    ("failure", "status", "code"), [(ZeroDivisionError, 500, "internal_error"), (MemoryError, 503, "router_exhausted")]
)
async def test_a_failure_of_the_router_has_openais_shape_and_the_request_id(r, caplog, failure, status, code):
    async def fails(*args, **options) -> None:
        raise failure

    r.chat.prepare = fails
    async with LoopbackServer(r.client_app()) as server, httpx.AsyncClient() as client:
        answer = await client.post(f"http://{server.ip}:8000{CHAT}", json=HELLO, headers={"x-request-id": "mine"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert answer.headers["x-request-id"] == "mine"
    assert any(answer.headers["x-mmrouter-request-id"] in record.getMessage() for record in caplog.records)


def test_a_decision_is_found_by_the_routers_id_the_engines_and_the_clients():
    log = DecisionLog(size=2)
    traces = {name: DecisionTrace(name, None, 0, None, []) for name in ("r-1", "r-2", "r-3")}
    for name, trace in traces.items():
        log.add(name, trace, "mine" if name != "r-3" else "")
    assert log.get("r-2") is log.get("chatcmpl-r-2") is log.get("cmpl-r-2") is log.get("mine") is traces["r-2"]
    assert log.get("r-1") is None, "only two are kept"
    log.add("r-4", traces["r-1"])
    assert log.get("mine") is None


def test_a_name_that_a_client_reuses_stays_with_its_newest_request():
    log = DecisionLog(size=2)
    for number, name in enumerate(("mine", "other", "mine", "another")):
        log.add(f"r-{number}", DecisionTrace(f"r-{number}", None, 0, None, []), name)
    assert log.get("mine") is log.get("r-2") is not None


async def test_a_stored_response_of_another_tenant_is_out_of_reach(tmp_path):
    body = {"model": "t", "input": "go on", "previous_response_id": "resp_1"}
    async with router(tmp_path, key="key") as r, client_of(r) as client:
        answer = await client.post("/v1/responses", json=body, headers={"authorization": "Bearer key"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "previous_response_id")
    async with router() as r, client_of(r) as client:
        assert (await client.post("/v1/responses", json=body)).status_code == 503, "there is no engine"


@pytest.mark.parametrize(("key", "sent"), [("", {"priority": -9}), ("key", {})])
async def test_a_tenant_does_not_choose_its_priority_at_an_engine(tmp_path, key, sent):
    async with router(tmp_path, key=key) as r:
        tenant = r.chat.tenants.authenticate([(b"authorization", f"Bearer {key}".encode())])
        prepared = await r.chat.prepare(CHAT, json.dumps({**HELLO, "priority": -9}).encode(), tenant)
    assert {name: value for name, value in prepared.request.body.items() if name == "priority"} == sent
    assert prepared.request.removed == (() if sent else ("priority",))


async def test_model_list_without_valid_key_is_a_counted_401(tmp_path):
    async with router(tmp_path, key="key") as r, client_of(r) as client:
        answer = await client.get("/v1/models", headers={"authorization": "Bearer other"})
        assert answer.status_code == 401
        assert answer.json()["error"]["code"] == "invalid_api_key"
        assert value(r, "requests_total", path="/v1/models", code="401") == 1


@pytest.mark.parametrize(("given", "counted"), [("wrong", 1), ("t", 0), (None, 0)])
async def test_request_with_wrong_control_token_is_counted(r, client, given, counted):
    headers = {} if given is None else {"x-mmrouter-control": given}
    answer = await client.post(CHAT, json=HELLO, headers=headers)
    assert answer.status_code == 503, "there is no engine, whatever the header says"
    assert (value(r, "control_refusals_total", reason="header") or 0) == counted


async def test_internal_error_is_not_counted_as_client_disconnect(r):
    async def fails(*args, **options) -> None:
        raise ZeroDivisionError

    r.chat.prepare = fails
    async with client_of(r, raise_app_exceptions=False) as client:
        assert (await client.post(CHAT, json={})).status_code == 500
    assert set(counts(r.metrics.requests, "code")) == {"500"}


class Queued(Rig):
    """A rig with queues of two requests per engine."""

    def __init__(self) -> None:
        super().__init__()
        self.placer = Placer(resource(routing={"maxQueuedRequests": 2}), self.fleet)

    def send(self) -> Booking:
        return self.placer.begin(self.placer.place(prepared()))


def test_full_queue_is_skipped_and_all_full_queues_refuse():
    rig = Queued()
    holder, other = rig.worker("holder", KEYS), rig.worker("other")
    first = [rig.send() for _ in range(4)]
    assert (holder.usage[0].requests, other.usage[0].requests) == (2, 2)
    with pytest.raises(QueueFullError, match="2 requests wait"):
        rig.send()
    first[0].answered()
    first[0].answered()
    rig.send()
    with pytest.raises(QueueFullError):
        rig.send()
    for booking in first:
        booking.end()
    assert holder.usage[0].unanswered + other.usage[0].unanswered == 1


def test_queues_are_per_rank():
    rig = Queued()
    worker = rig.worker("a", ranks=2)
    for _ in range(4):
        rig.send()
    assert {rank: usage.unanswered for rank, usage in worker.usage.items()} == {0: 2, 1: 2}
    with pytest.raises(QueueFullError):
        rig.send()


def test_unverified_engines_do_not_take_overflow():
    rig = Queued()
    rig.worker("a")
    rig.worker("pending", canary="")
    rig.send(), rig.send()
    with pytest.raises(QueueFullError):
        rig.send()


def test_dry_run_ignores_full_queues():
    rig = Queued()
    rig.worker("a", KEYS)
    rig.send(), rig.send()
    assert rig.placer.place(prepared(), dry_run=True).choice.winner.overlap == len(IDS) // BLOCK


@pytest.mark.parametrize("declared", [True, False])
async def test_body_beyond_the_budget_is_a_counted_429_with_retry_after(r, client, declared):
    other = BodyReservation(r.chat.body_budget, lambda error: None)
    other.grow(r.chat.body_budget.limit)

    async def pieces():
        yield b'{"model": "t", '
        if declared:
            pytest.fail("what is refused is not read")
        yield b'"messages": []}'

    headers = {"content-length": "30"} if declared else {}
    answer = await client.post(CHAT, content=pieces(), headers=headers)
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
    assert answer.json()["error"]["code"] == "router_full"
    assert value(r, "overload_refusals_total", reason="router_full") == 1
    assert r.chat.body_budget.used == r.chat.body_budget.limit, "what it had taken is given back"
    other.release()
    answer = await client.post(CHAT, json=HELLO)
    assert answer.status_code == 503, "there is no engine"
    assert r.chat.body_budget.used == 0


async def test_full_queues_are_a_counted_429_with_retry_after():
    async with router(own=resource(routing={"maxQueuedRequests": 1})) as r, client_of(r) as client:
        join(r, member("a"))
        booking = r.placer.begin(r.placer.place(prepared()))
        answer = await client.post(CHAT, json=HELLO)
        booking.end()
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
    assert answer.json()["error"]["code"] == "queue_full"
    assert value(r, "overload_refusals_total", reason="queue_full") == 1
