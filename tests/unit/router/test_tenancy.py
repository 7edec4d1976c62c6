"""A thousand tenants with keys: each is recognised, limited and served independently of the others."""

import asyncio
import json
import sys
from array import array
from collections import Counter
from functools import partial
from unittest.mock import patch

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.router.preparing import settings
from unit.router.rig import BLOCK, Clock, Engine, LoopbackEngine, LoopbackServer, Rig, prepared, resource, running
from unit.router.router_rig import HELLO, client_of, join, member, router
from waiting import until

from mmrouter_cli.sample_images import data_uri, picture
from mmrouter_lib.block_keys import Span, block_keys, namespace_seed
from mmrouter_router import app
from mmrouter_router.admission.tenant_limits import TenantAdmission
from mmrouter_router.core.errors import RequestError
from mmrouter_router.dispatch.forwarder import Forwarder
from mmrouter_router.fleet.membership import Membership
from mmrouter_router.http.body_budget import BodyReservation
from mmrouter_router.intake.api_key_auth import CHECK_SECONDS, Tenants
from mmrouter_router.request.prepared import CHAT

KEY = bytes(range(32))
MANY = 1000
FIRST = b'data: {"choices":[{"index":0,"delta":{"content":"x"},"finish_reason":null}]}\n\n'
LAST = b"data: [DONE]\n\n"


@pytest.fixture(autouse=True)
def stopped_clock():
    """Rate limits of the routers see no time pass, however slow the machine is."""
    with patch.object(app, "TenantAdmission", partial(TenantAdmission, clock=Clock())):
        yield


def folder_of(tmp_path, count: int):
    """A folder of keys: tenant-7 has key-of-7."""
    folder = tmp_path / "api-keys"
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        (folder / f"tenant-{number}").write_text(f"key-of-{number}\n")
    return folder


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def limited(queued: int = 4096, **tenants: object):
    """A deployment with these fields of ``frontend.tenants``, and places for so many requests per engine."""
    frontend = {"replicas": 1, "apiKeys": {"secret": {"name": "keys"}}, "tenants": tenants}
    return resource(frontend=frontend, routing={"maxQueuedRequests": queued})


def waiting(r) -> float | None:
    return r.metrics.registry.get_sample_value("mmrouter_waiting_requests")


def calls_of(tenants: Tenants, key: str) -> int:
    """Return how many calls of functions an authentication takes."""
    seen = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal seen
        seen += 1

    sys.setprofile(count)
    try:
        tenants.authenticate([(b"authorization", f"Bearer {key}".encode())])
    except RequestError:
        pass
    finally:
        sys.setprofile(None)
    return seen


def test_each_of_a_thousand_tenants_is_recognised_and_has_a_salt_of_its_own(tmp_path):
    tenants = Tenants(folder_of(tmp_path, MANY), KEY)
    found = [tenants.authenticate([(b"authorization", b"Bearer key-of-%d" % number)]) for number in range(MANY)]
    assert [tenant.name for tenant in found] == [f"tenant-{number}" for number in range(MANY)]
    assert len({tenant.salt for tenant in found}) == MANY


def test_authentication_takes_as_many_steps_for_any_number_of_tenants_and_any_wrong_key(tmp_path):
    few = Tenants(folder_of(tmp_path / "few", 1), KEY)
    many = Tenants(folder_of(tmp_path, MANY), KEY)
    assert calls_of(few, "key-of-0") == calls_of(many, "key-of-0") == calls_of(many, "key-of-999")
    assert len({calls_of(many, wrong) for wrong in ("x", "key-of-99x", "key-of-9999", "k" * 60)}) == 1


@given(
    st.lists(st.integers(0, 3), min_size=2 * BLOCK, max_size=5 * BLOCK),
    st.integers(0, BLOCK),
    st.tuples(st.integers(0, MANY), st.integers(0, MANY)),
)
def test_no_block_of_one_tenant_is_a_block_of_another_in_the_index(ids, at, numbers):
    tenants = Tenants(settings().config_dir, KEY)
    one, other = (
        block_keys(array("I", ids), BLOCK, (Span(at, BLOCK, KEY),), seed)
        for seed in (
            namespace_seed(KEY, model="m", revision="", salt=tenants.salt(f"tenant-{number}")) for number in numbers
        )
    )
    assert (set(one) == set(other)) == (numbers[0] == numbers[1])
    rig = Rig()
    rig.worker("a", one)
    (slot,) = rig.fleet.workers["uid-a"].slots.values()
    assert sum(rig.fleet.index.holds(slot, key) for key in other) == (len(one) if numbers[0] == numbers[1] else 0)


async def test_a_request_quarantined_for_one_tenant_is_sent_for_another(tmp_path):
    folder_of(tmp_path, 2)
    fingerprints: list[bytes] = []

    async def send(forwarder, call, past):
        fingerprints.append(await call.fingerprint())
        raise RequestError.no_worker("none")

    with patch.object(Forwarder, "send", send):
        async with router(tmp_path) as r, client_of(r) as client:
            for number in (0, 0, 1):
                await client.post(CHAT, json=HELLO, headers=bearer(f"key-of-{number}"))
    first, again, other = fingerprints
    assert first == again != other


async def test_an_engine_sees_another_image_name_for_each_tenant_and_one_for_all_requests_of_a_tenant(tmp_path):
    """By these names vLLM caches processed and encoded images, and encoders hold embeddings."""
    folder_of(tmp_path, 2)
    image = {"type": "image_url", "image_url": {"url": data_uri(picture("shared", 56, 56))}}
    body = {"model": "t", "messages": [{"role": "user", "content": [image]}]}
    async with router(tmp_path) as r, client_of(r) as client, Engine() as engine:
        join(r, member("a", ip=engine.ip))
        for number in (0, 0, 1):
            assert (await client.post(CHAT, json=body, headers=bearer(f"key-of-{number}"))).status_code == 200
    first, again, other = (sent["messages"][0]["content"][0]["uuid"] for _, _, sent in engine.requests)
    assert first == again != other


async def test_a_router_tokenizes_a_text_for_each_tenant(tmp_path):
    """The time of a hit would tell which texts another tenant sent."""
    folder_of(tmp_path, 2)
    body = {"model": "t", "messages": [{"role": "user", "content": "What is it? " * 100}] * 3}
    async with router(tmp_path) as r, client_of(r) as client:
        r.apply_membership(Membership((member("a"), member("b"))))
        known = []
        for number in (0, 0, 1):
            await client.post(CHAT, json=body, headers=bearer(f"key-of-{number}"))
            known.append(len(r.preparer.prompter.codec.segments))
    assert known[0] == known[1] > 0
    assert known[2] == 2 * known[0]


async def test_metrics_have_no_series_per_tenant_and_name_none(tmp_path):
    folder_of(tmp_path, MANY)
    async with router(tmp_path, limited(default={"requestsPerMinute": 1})) as r, client_of(r) as client:
        series = []
        for numbers in (range(2), range(2, 60)):
            for number in numbers:
                for _ in range(2):
                    await client.post(CHAT, json=HELLO, headers=bearer(f"key-of-{number}"))
                await client.get("/v1/models", headers=bearer(f"wrong-{number}"))
            found = [
                (sample.name, *sorted(sample.labels.items()))
                for family in r.metrics.registry.collect()
                for sample in family.samples
            ]
            series.append(found)
        assert series[0] == series[1]
        assert not [one for one in series[1] if "tenant-" in str(one) or "key-of" in str(one) or "wrong-" in str(one)]


async def test_what_one_tenant_reads_does_not_depend_on_what_another_does(tmp_path):
    """All answers to tenant blue, headers and bodies, are equal with and without load from tenant red."""
    folder_of(tmp_path, 2)
    red, blue = bearer("key-of-0"), bearer("key-of-1")
    bodies = (HELLO, {**HELLO, "model": "other"}, {"model": "t"}, HELLO, HELLO)
    seen = []
    for busy in (False, True):
        own = limited(default={"requestsPerMinute": 4, "concurrency": 1})
        async with router(tmp_path, own) as r, client_of(r) as client:
            answers = []
            for body in bodies:
                for _ in range(5 * busy):
                    await client.post(CHAT, json=HELLO, headers=red)
                answer = await client.post(CHAT, json=body, headers=blue)
                headers = {n: v for n, v in answer.headers.items() if not n.endswith("request-id")}
                answers.append((answer.status_code, headers, answer.json()))
        seen.append(answers)
    assert seen[0] == seen[1]
    assert [status for status, *_ in seen[0]] == [503, 404, 400, 503, 429]


async def test_bytes_that_others_hold_are_not_disclosed(tmp_path):
    folder_of(tmp_path, 1)
    texts = set()
    async with router(tmp_path) as r, client_of(r) as client:
        for more in (0, 12345):
            other = BodyReservation(r.chat.body_budget, lambda error: None)
            other.grow(r.chat.body_budget.limit + more)
            other.complete()
            answer = await client.post(CHAT, json=HELLO, headers=bearer("key-of-0"))
            assert answer.json()["error"]["code"] == "router_full"
            texts.add(answer.text)
            other.release()
    assert len(texts) == 1


async def test_a_tenants_key_is_no_control_token(tmp_path):
    folder_of(tmp_path, 1)
    headers = {**bearer("key-of-0"), "x-mmrouter-control": "key-of-0"}
    async with router(tmp_path) as r, client_of(r) as client:
        await client.post(CHAT, json=HELLO, headers=headers)
        assert r.metrics.registry.get_sample_value("mmrouter_control_refusals_total", {"reason": "header"}) == 1


# -- limits ---------------------------------------------------------------------------------------------------------


async def test_rate_limit_is_a_counted_429_with_openais_headers(tmp_path):
    folder_of(tmp_path, 2)
    async with router(tmp_path, limited(default={"requestsPerMinute": 2})) as r, client_of(r) as client:
        left = []
        for _ in range(2):
            answer = await client.post(CHAT, json=HELLO, headers=bearer("key-of-0"))
            assert answer.status_code == 503, "there is no engine"
            left.append(answer.headers["x-ratelimit-remaining-requests"])
        refused = await client.post(CHAT, json=HELLO, headers=bearer("key-of-0"))
        other = await client.post(CHAT, json=HELLO, headers=bearer("key-of-1"))
        models = await client.get("/v1/models", headers=bearer("key-of-0"))
        counted = r.metrics.registry.get_sample_value("mmrouter_overload_refusals_total", {"reason": "rate_limited"})
    assert (left, refused.status_code, refused.headers["retry-after"]) == (["1", "0"], 429, "30")
    error = refused.json()["error"]
    assert (error["type"], error["code"], error["param"]) == ("rate_limit_error", "rate_limited", None)
    shown = {name: refused.headers[f"x-ratelimit-{name}-requests"] for name in ("limit", "remaining", "reset")}
    assert shown == {"limit": "2", "remaining": "0", "reset": "60s"}
    assert (other.status_code, models.status_code, counted) == (503, 200, 1)


async def test_without_limits_there_are_no_headers_about_them(tmp_path):
    folder_of(tmp_path, 1)
    async with router(tmp_path) as r, client_of(r) as client:
        answer = await client.post(CHAT, json=HELLO, headers=bearer("key-of-0"))
    assert not [name for name in answer.headers if name.startswith("x-ratelimit")]


# -- keys -----------------------------------------------------------------------------------------------------------


class Paused(LoopbackEngine):
    """Sends the first half of an answer, and the second when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.go = asyncio.Event()

    async def respond(self, reader, writer, headers) -> bool:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        writer.write(head + b"%x\r\n%s\r\n" % (len(FIRST), FIRST))
        await self.go.wait()
        writer.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(LAST), LAST))
        return True


@pytest.fixture
async def served(tmp_path):
    """A router on a socket, with tenants 0 and 1, whose only engine is :class:`Paused`; and the folder of keys."""
    folder, engine = folder_of(tmp_path, 2), Paused()
    await engine.serve()
    async with router(tmp_path, limited(default={"concurrency": 1})) as r:
        join(r, member("a", ip=engine.ip))
        server = LoopbackServer(r.client_app())
        following = running(r.chat.tenants.follow())
        async with server, following, httpx.AsyncClient(base_url=f"http://{server.ip}:8000", timeout=60) as client:
            yield client, engine, folder
    engine.close()


async def test_an_answer_whose_key_is_removed_meanwhile_is_finished_and_the_next_request_is_a_401(served):
    client, engine, folder = served
    body = {**HELLO, "stream": True}
    async with client.stream("POST", CHAT, json=body, headers=bearer("key-of-0")) as answer:
        pieces = answer.aiter_bytes()
        assert await anext(pieces) == FIRST
        (folder / "tenant-0").write_text("new-key")
        async with asyncio.timeout(60):
            while (await client.get("/v1/models", headers=bearer("key-of-0"))).status_code != 401:
                await asyncio.sleep(CHECK_SECONDS / 10)
        assert (await client.post(CHAT, json=HELLO, headers=bearer("key-of-0"))).status_code == 401
        again = await client.post(CHAT, json=HELLO, headers=bearer("new-key"))
        assert again.json()["error"]["code"] == "concurrency_limited", "the new key is the same tenant's"
        engine.go.set()
        assert b"".join([piece async for piece in pieces]) == LAST
    assert (await client.post(CHAT, json=HELLO, headers=bearer("new-key"))).status_code == 200


async def test_tenants_take_turns_at_a_full_engine_and_the_next_of_them_is_chosen_by_priority(tmp_path):
    folder_of(tmp_path, 2)
    engine = Paused()
    await engine.serve()
    named = [{"name": "tenant-1", "priority": "high"}]
    own = limited(named=named, maxWaitSeconds=600, queued=8)
    async with router(tmp_path, own) as r, client_of(r) as client:
        join(r, member("a", ip=engine.ip))

        async def ask(number: int) -> int:
            answer = await client.post(CHAT, json=HELLO, headers=bearer(f"key-of-{number}"))
            return answer.status_code

        busy = [r.placer.begin(r.placer.place(prepared())) for _ in range(8)]
        tasks = [asyncio.create_task(ask(number)) for number in (0, 0, 0, 1, 1)]
        await until(lambda: waiting(r) == 5, 60)
        engine.go.set()
        busy[0].end()
        assert await asyncio.gather(*tasks) == [200] * 5
        assert waiting(r) == 0
        order = [body["cache_salt"] for _, _, body in engine.requests]
        assert order == [r.chat.tenants.salt(f"tenant-{number}") for number in (1, 1, 0, 0, 0)]
    engine.close()


async def test_a_request_waits_for_the_full_engine_no_longer_than_the_resource_says(tmp_path):
    folder_of(tmp_path, 1)
    own = limited(maxWaitSeconds=1, queued=1)
    async with router(tmp_path, own) as r, client_of(r) as client:
        join(r, member("a"))
        booking = r.placer.begin(r.placer.place(prepared()))
        answer = await client.post(CHAT, json=HELLO, headers=bearer("key-of-0"))
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "queue_full")
        assert answer.headers["retry-after"] == "1"
        booking.end()


async def test_a_tenant_above_its_concurrency_is_refused_until_an_answer_ends_and_others_are_not(served):
    client, engine, _ = served

    async def ask(number: int) -> tuple[int, str | None]:
        answer = await client.post(CHAT, json={**HELLO, "stream": True}, headers=bearer(f"key-of-{number}"))
        return answer.status_code, answer.headers.get("retry-after")

    first = [asyncio.create_task(ask(number)) for number in (0, 1)]
    async with asyncio.timeout(60):
        while len(engine.requests) < 2:
            await asyncio.sleep(0.01)
    assert Counter([await ask(0), await ask(1), await ask(0)]) == {(429, "1"): 3}
    engine.go.set()
    assert await asyncio.gather(*first) == [(200, None)] * 2
    assert await ask(0) == (200, None)
    assert json.dumps(engine.requests[0][2]["cache_salt"]) != json.dumps(engine.requests[1][2]["cache_salt"])
