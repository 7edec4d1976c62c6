"""The encoder proxy over real connections: affinity, failover, and metrics."""

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from unit.sidecar.conftest import loopback
from waiting import until

from mmrouter_lib.engines.sglang.stage_requests import Encoder, image_key, ranked
from mmrouter_sidecar.engine import encoder_proxy as module
from mmrouter_sidecar.engine.encoder_proxy import EncoderProxy
from mmrouter_sidecar.metrics import Metrics

HANGS, DIES = "hangs", "dies"


class Site:
    """An encoder that keeps what it got, and answers as ``says`` tells."""

    def __init__(self, name: str) -> None:
        self.name, self.ip = name, loopback()
        self.says: int | str = 200
        self.got: list[bytes] = []
        self.came, self.left = asyncio.Event(), asyncio.Event()

    async def start(self) -> None:
        app = web.Application(client_max_size=1 << 30)
        app.add_routes([web.post("/encode", self._encode)])
        self.runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
        await self.runner.setup()
        await web.TCPSite(self.runner, self.ip, 8000).start()

    async def _encode(self, request: web.Request) -> web.Response:
        self.got.append(await request.read())
        self.came.set()
        if self.says == DIES:
            assert request.transport is not None
            request.transport.abort()
        if self.says in (HANGS, DIES):
            try:
                await asyncio.Event().wait()
            finally:
                self.left.set()
        assert isinstance(self.says, int)
        return web.Response(status=self.says, body=b"null", content_type="application/json")


class Rig:
    """A proxy with two encoders on a clock of its own, and an engine's connection to it."""

    def __init__(self) -> None:
        self.metrics, self.now = Metrics(), 100.0
        self.proxy = EncoderProxy(self.metrics, lambda: self.now)
        self.sites = {name: Site(name) for name in ("e1", "e2")}

    def tell(self, *names: str, router: str = "r1") -> None:
        self.proxy.update(router, [Encoder(name, self.sites[name].ip) for name in names])

    def body(self, text: str, **more: Any) -> bytes:
        return json.dumps({"req_id": "r_local_part_0", "mm_items": [text], "num_parts": 1, **more}).encode()

    def owned_by(self, name: str) -> Iterator[bytes]:
        """Requests for images that belong to an encoder."""
        encoders = [Encoder(one, site.ip) for one, site in self.sites.items()]
        bodies = (self.body(f"data:{number}") for number in itertools.count())
        return (body for body in bodies if ranked(image_key(body), encoders)[0].name == name)

    async def post(self, body: bytes, slot: int = 0) -> tuple[int, bytes]:
        async with self.client.post(f"{self.url}/encoders/{slot}/encode", data=body) as answer:
            return answer.status, await answer.read()

    def count(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(f"mmrouter_sidecar_{name}", labels) or 0.0

    def outcomes(self) -> dict[str, float]:
        words = ("own", "moved", "spilled", "refused", "failed", "unserved")
        return {word: found for word in words if (found := self.count("encodes_total", outcome=word))}


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    one = Rig()
    app = web.Application(client_max_size=module.MAX_REQUEST_BYTES)
    app.add_routes([web.post("/encoders/{slot}/encode", one.proxy.encode)])
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
    await runner.setup()
    host = loopback()
    await web.TCPSite(runner, host, 8002).start()
    one.url = f"http://{host}:8002"
    for site in one.sites.values():
        await site.start()
    async with one.proxy.open(), aiohttp.ClientSession() as one.client, asyncio.timeout(20):
        yield one
    for each in (runner, *(site.runner for site in one.sites.values())):
        await each.cleanup()


async def test_an_image_stays_with_its_encoder_and_requests_are_forwarded_unchanged(rig: Rig) -> None:
    rig.tell("e1", "e2")
    bodies = [next(rig.owned_by("e1")), next(rig.owned_by("e2"))]
    for slot in range(3):
        for body in bodies:
            assert await rig.post(body, slot) == (200, b"null")
    assert [site.got for site in rig.sites.values()] == [[bodies[0]] * 3, [bodies[1]] * 3]
    assert rig.outcomes() == {"own": 6}


@pytest.mark.parametrize(("says", "cause"), [(DIES, "lost"), (503, "busy"), (HANGS, "timeout")])
async def test_images_of_a_failed_encoder_move_until_it_is_back(
    rig: Rig, says: int | str, cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Time enough on a busy machine for an encoder that does not hang.
    monkeypatch.setattr(module, "ENCODE_SECONDS", 0.5 if says == HANGS else 30)
    async with rig.proxy.open():
        rig.tell("e1", "e2")
        first, second, body = rig.sites["e1"], rig.sites["e2"], next(rig.owned_by("e1"))
        first.says = says
        assert await rig.post(body) == (200, b"null")
        assert await rig.post(body) == (200, b"null")
        assert (len(first.got), len(second.got)) == (1, 2)  # it is not asked again at once
        assert rig.count("encode_failures_total", cause=cause) == 1
        assert (rig.count("encoders", state="up"), rig.count("encoders", state="down")) == (1, 1)
        first.says = 200
        rig.now += module.BACK_SECONDS[0]
        assert await rig.post(body) == (200, b"null")
        assert len(first.got) == 2
        assert rig.outcomes() == {"moved": 2, "own": 1}
        assert rig.count("encoders", state="down") == 0


async def test_the_pause_of_an_unreachable_encoder_grows(rig: Rig) -> None:
    rig.tell("e1", "e2")
    await rig.sites["e1"].runner.cleanup()
    body = next(rig.owned_by("e1"))
    for wait in module.BACK_SECONDS:
        assert (await rig.post(body))[0] == 200
        rig.now += wait * 0.9
        assert (await rig.post(body))[0] == 200
        rig.now += wait * 0.2
    assert rig.count("encode_failures_total", cause="connect") == len(module.BACK_SECONDS)
    assert len(rig.sites["e2"].got) == 2 * len(module.BACK_SECONDS)


async def test_an_image_that_killed_two_encoders_is_not_sent_to_a_third(rig: Rig) -> None:
    third = rig.sites["e3"] = Site("e3")
    await third.start()
    rig.tell("e1", "e2", "e3")
    for site in rig.sites.values():
        site.says = DIES
    status, answer = await rig.post(rig.body("data:deadly"))
    assert (status, json.loads(answer)["status"]) == (503, "error")
    assert sum(len(site.got) for site in rig.sites.values()) == 2
    assert rig.outcomes() == {"unserved": 1}
    await third.runner.cleanup()


@pytest.mark.parametrize(("says", "outcome"), [(400, "refused"), (500, "failed"), (504, "failed")])
async def test_an_encoders_error_answer_is_forwarded_without_a_retry(rig: Rig, says: int, outcome: str) -> None:
    """It has told the engine's socket that the image failed: another one's embedding would come too late."""
    rig.tell("e1", "e2")
    for site in rig.sites.values():
        site.says = says
    assert await rig.post(rig.body("data:bad")) == (says, b"null")
    assert sum(len(site.got) for site in rig.sites.values()) == 1
    assert rig.outcomes() == {outcome: 1}


async def test_after_an_encoders_error_the_next_images_go_to_another_one(rig: Rig) -> None:
    """One that has no free file descriptor, for example, fails with every image."""
    rig.tell("e1", "e2")
    rig.sites["e1"].says = 500
    images = rig.owned_by("e1")
    assert [(await rig.post(next(images)))[0] for _ in range(3)] == [500, 200, 200]
    assert rig.outcomes() == {"failed": 1, "moved": 2}
    assert rig.count("encode_failures_total", cause="error") == 1
    rig.sites["e1"].says = 200
    rig.now += module.BACK_SECONDS[0]
    assert (await rig.post(next(images)))[0] == 200
    assert rig.outcomes()["own"] == 1


async def test_without_encoders_the_answer_is_503(rig: Rig) -> None:
    rig.tell()
    status, answer = await rig.post(rig.body("data:x"))
    assert (status, json.loads(answer)["status"]) == (503, "error")
    assert (await rig.post(b"{}"))[0] == 400
    assert rig.outcomes() == {"unserved": 1, "refused": 1}


async def test_a_request_waits_for_the_first_list_of_encoders(rig: Rig) -> None:
    asked = asyncio.create_task(rig.post(rig.body("data:x")))
    await until(lambda: rig.proxy.held_bytes > 0)
    rig.tell("e1")
    assert (await asked)[0] == 200


async def test_an_encoder_above_its_share_spills_images(rig: Rig) -> None:
    rig.tell("e1", "e2")
    first, second = rig.sites.values()
    first.says = second.says = HANGS
    bodies = itertools.islice(rig.owned_by("e1"), 5)
    waiting = [asyncio.create_task(rig.post(body)) for body in bodies]
    await until(lambda: len(first.got) + len(second.got) == 5)
    assert (len(first.got), len(second.got)) == (4, 1)  # three of four is the most, and four of five
    repeated = asyncio.create_task(rig.post(first.got[0]))
    await until(lambda: len(first.got) == 5)
    for task in (*waiting, repeated):
        task.cancel()
    await asyncio.gather(*waiting, repeated, return_exceptions=True)


async def test_a_cancelled_request_frees_its_bytes(rig: Rig) -> None:
    rig.tell("e1")
    site = rig.sites["e1"]
    site.says = HANGS
    asked = asyncio.create_task(rig.post(rig.body("data:x")))
    await site.came.wait()
    asked.cancel()
    await site.left.wait()
    await until(lambda: rig.proxy.held_bytes == 0)
    assert rig.proxy.idle
    assert rig.count("encode_failures_total", cause="lost") == 0


async def test_requests_above_the_byte_budget_wait(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    body = rig.body("data:" + "x" * 1000)
    monkeypatch.setattr(module, "BUDGET_BYTES", 2 * len(body))
    rig.tell("e1")
    site = rig.sites["e1"]
    site.says = HANGS
    waiting = [asyncio.create_task(rig.post(body)) for _ in range(4)]
    await until(lambda: len(site.got) == 2 and rig.proxy.held_bytes == 2 * len(body))
    waiting[0].cancel()
    waiting[1].cancel()
    await until(lambda: len(site.got) == 4)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    await until(lambda: rig.proxy.held_bytes == 0)


async def test_lists_of_all_routers_are_merged_and_silent_routers_expire(rig: Rig) -> None:
    rig.tell("e1", router="r1")
    rig.tell("e2", router="r2")
    assert {encoder.name for encoder in rig.proxy.encoders} == {"e1", "e2"}
    rig.now += module.REPORT_SECONDS + 1
    assert {encoder.name for encoder in rig.proxy.encoders} == {"e1", "e2"}  # without new reports the last one is valid
    rig.tell("e2", router="r2")
    assert {encoder.name for encoder in rig.proxy.encoders} == {"e2"}
