"""Real origins on loopback, and resolvers that may fetch from them."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

import pytest
from aiohttp import web

from mmrouter_lib.api import Media as MediaSettings
from mmrouter_router.media.fetch import FetchLimits
from mmrouter_router.media.resolve import MediaResolver
from mmrouter_router.telemetry.metrics import Metrics

PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(64))

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@dataclass
class Origin:
    """An HTTP server that answers by path and records its requests."""

    port: int = 0
    routes: dict[str, Handler] = field(default_factory=dict)
    seen: list[web.Request] = field(default_factory=list)

    def url(self, path: str = "/image", host: str = "127.0.0.1", scheme: str = "http") -> str:
        return f"{scheme}://{host}:{self.port}{path}"

    def serve(self, path: str, body: bytes = PNG, status: int = 200, **headers: str) -> str:
        named = {name.replace("_", "-"): value for name, value in headers.items()}

        async def answer(_: web.Request) -> web.Response:
            return web.Response(body=body, status=status, headers=named)

        self.routes[path] = answer
        return self.url(path)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.seen.append(request)
        return await self.routes[request.path](request)


@contextlib.asynccontextmanager
async def listening(origin: Origin, host: str = "127.0.0.1", **options) -> AsyncIterator[Origin]:
    runner = web.AppRunner(web.Application(), access_log=None, shutdown_timeout=0.1)
    runner.app.router.add_route("*", "/{path:.*}", origin.answer)
    await runner.setup()
    site = web.TCPSite(runner, host, origin.port, **options)
    await site.start()
    origin.port = runner.addresses[0][1]
    try:
        yield origin
    finally:
        await runner.cleanup()


@pytest.fixture
async def origin() -> AsyncIterator[Origin]:
    async with listening(Origin()) as running:
        running.serve("/image")
        yield running


@pytest.fixture
def serving():
    """``async with serving(host) as origin``: another origin, at another address or with TLS."""
    return lambda host="127.0.0.1", port=0, **options: listening(Origin(port), host, **options)


@pytest.fixture
async def raw_origin() -> AsyncIterator[Callable[[Talk], Awaitable[str]]]:
    """An origin scripted at the level of bytes: ``url = await raw_origin(talk)``."""
    servers: list[asyncio.Server] = []

    async def start(talk: Talk) -> str:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                await reader.readuntil(b"\r\n\r\n")
                await talk(reader, writer)
            writer.close()

        servers.append(await asyncio.start_server(serve, "127.0.0.1", 0))
        return f"http://127.0.0.1:{servers[-1].sockets[0].getsockname()[1]}/"

    yield start
    for server in servers:
        server.close()


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture
async def resolving(metrics):
    """Make resolvers; by default with access to loopback, and with 127.0.0.1 as the address of all hosts."""
    made: list[MediaResolver] = []

    def make(media: dict | None = None, limits: dict | None = None, **options) -> MediaResolver:
        settings = MediaSettings(**({"fetch": "public", "allowed_cidrs": ["127.0.0.0/8"]} | (media or {})))
        options.setdefault("lookup", everything_is("127.0.0.1"))
        kept = FetchLimits(**({"max_bytes": 1 << 20, "total_s": 5.0} | (limits or {})))
        made.append(MediaResolver(settings, limits=kept, metrics=metrics, **options))
        return made[-1]

    yield make
    for resolver in made:
        await resolver.close()


def everything_is(*addresses: str):
    async def lookup(host: str, port: int) -> list[str]:
        return list(addresses)

    return lookup
