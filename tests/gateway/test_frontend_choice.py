"""Real Envoy and the picker of frontends, by TLS with the picker's own certificate and without."""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from aiohttp import web
from unit.router.rig import loopback
from waiting import until

from mmrouter_cli.local.envoy import envoy_config
from mmrouter_router.http.certificate import self_signed
from mmrouter_router.http.server import Shutdown
from mmrouter_router.picker.frontend_choice import FrontendChoice
from mmrouter_router.picker.server import PICKER_PORT, Picker

PORT = 8000


@dataclass
class Frontends:
    """Two servers in the place of frontends. ``asked``: those that requests have reached, in order."""

    ips: tuple[str, str] = field(default_factory=lambda: (loopback(), loopback()))
    asked: list[str] = field(default_factory=list)
    go_on: asyncio.Event = field(default_factory=asyncio.Event)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Answer with what arrived, then once ``go_on`` is set with the end."""
        self.asked.append(request.transport.get_extra_info("sockname")[0])
        body = await request.read()
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        seen = {"digest": hashlib.sha256(body).hexdigest(), "key": request.headers.get("authorization")}
        await response.write(json.dumps(seen).encode() + b"\n")
        await self.go_on.wait()
        await response.write(b"end\n")
        return response


@dataclass
class Way:
    client: httpx.AsyncClient
    frontends: Frontends


@pytest.fixture(params=[True, False], ids=["TLS", "plain"])
async def way(request: pytest.FixtureRequest, envoy: str, tmp_path: Path) -> AsyncIterator[Way]:
    """The way from a client through Envoy to the frontends."""
    frontends, shutdown, ip = Frontends(), Shutdown(), loopback()
    app = web.Application(client_max_size=1 << 30)
    app.router.add_route("*", "/{any:.*}", frontends.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    for each in frontends.ips:
        await web.TCPSite(runner, each, PORT).start()
    made = self_signed("vl")
    choice = FrontendChoice(lambda: frontends.ips, PORT)
    picker = Picker(choice, shutdown, lambda: True, host=ip, certificate=(lambda: made) if request.param else None)
    serving = asyncio.create_task(picker.serve(1.0))
    config = envoy_config((ip, 8080), [(ip, PICKER_PORT)], admin=tmp_path / "a.sock", tls=request.param)
    (tmp_path / "envoy.json").write_text(json.dumps(config))
    options = ("--disable-hot-restart", "--log-level", "warn", "--concurrency", "1")
    process = await asyncio.create_subprocess_exec(envoy, "-c", str(tmp_path / "envoy.json"), *options)
    async with httpx.AsyncClient(base_url=f"http://{ip}:8080", timeout=120) as client:

        async def reached() -> bool:
            try:
                return (await client.get("/health")).status_code == 200
            except httpx.HTTPError:
                return False

        frontends.go_on.set()
        async with asyncio.timeout(180):
            while not await reached():
                await asyncio.sleep(0.2)
        frontends.asked.clear()
        yield Way(client, frontends)
    process.terminate()
    await process.wait()
    shutdown.stop("the test has ended")
    await serving
    await runner.cleanup()


async def test_bodies_headers_and_streams_pass_to_the_frontends_with_the_fewest_requests(way: Way) -> None:
    way.frontends.go_on.clear()
    body, key = b"x" * 1_400_000, "Bearer of-the-client"

    async def ask() -> None:
        async with way.client.stream("POST", "/v1/chat", content=body, headers={"authorization": key}) as answer:
            lines = answer.aiter_lines()
            # It arrives before the answer's end is sent.
            assert json.loads(await anext(lines)) == {"digest": hashlib.sha256(body).hexdigest(), "key": key}
            pieces.append(True)
            assert [line async for line in lines] == ["end"]

    pieces: list[bool] = []
    asking = asyncio.gather(ask(), ask())
    await until(lambda: len(pieces) == 2 or asking.done(), 180)
    assert sorted(way.frontends.asked) == sorted(way.frontends.ips)
    way.frontends.go_on.set()
    await asking
