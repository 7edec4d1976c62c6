"""Folders of captures and models, and engines served here."""

import asyncio
import base64
import io
import json
import random
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import uvicorn
import zmq.asyncio
from PIL import Image
from prometheus_client.parser import text_string_to_metric_families
from unit.conftest import shared_folder

from mmrouter_sim import model
from mmrouter_sim.engine import SimulatedEngine, simulated
from mmrouter_sim.settings import Settings
from mmrouter_sim.sglang import app as sglang_app
from mmrouter_sim.sglang import flags as sglang_flags
from mmrouter_sim.vllm.app import build
from mmrouter_sim.vllm.flags import parse

ROOT = Path(__file__).parents[3]
CHAT = "/v1/chat/completions"
LONG = "describe the picture and say what is in the front and how many there are " * 4


@pytest.fixture(scope="session")
def captures() -> Path:
    return shared_folder("MMROUTER_CAPTURES", "captures/vllm")


@pytest.fixture(scope="session")
def models() -> Path:
    return shared_folder("MMROUTER_MODELS", "models")


@pytest.fixture(scope="session")
def tiny() -> Path:
    """The model folder that the project made for itself."""
    return ROOT / "examples" / "models" / "tiny-qwen2-vl"


@pytest.fixture
def context() -> Iterator[zmq.asyncio.Context]:
    with zmq.asyncio.Context() as context:
        yield context
        context.destroy(linger=0)


@dataclass
class Client:
    """One simulated engine, served in this process on loopback, and a session to talk to it."""

    engine: SimulatedEngine
    session: aiohttp.ClientSession
    url: str

    async def get(self, path: str, **kwargs: Any) -> tuple[int, Any]:
        async with self.session.get(self.url + path, **kwargs) as answer:
            return answer.status, await _body(answer)

    async def post(self, path: str, body: Any = None, **kwargs: Any) -> tuple[int, Any]:
        data = body if isinstance(body, bytes) else json.dumps(body or {}).encode()
        async with self.session.post(self.url + path, data=data, **kwargs) as answer:
            return answer.status, await _body(answer)

    async def chat(self, content: Any, **fields: Any) -> tuple[int, Any]:
        return await self.post(CHAT, chat_body(content, **fields))

    async def stream(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the chunks of a stream, which has to end with the end mark."""
        async with self.session.post(self.url + path, json=body | {"stream": True}) as answer:
            assert answer.content_type == "text/event-stream"
            frames = (await answer.text()).split("\n\n")
        assert frames[-2:] == ["data: [DONE]", ""]
        return [json.loads(frame.removeprefix("data: ")) for frame in frames[:-2]]


def chat_body(content: Any, **fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": content}], "max_tokens": 4} | fields


def cached_tokens(reply: dict[str, Any]) -> int:
    return int(reply["usage"]["prompt_tokens_details"]["cached_tokens"])


def png(color: Any = "red", size: tuple[int, int] = (112, 84), mode: str = "RGB", kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    Image.new(mode, size, color).save(buffer, kind)
    return buffer.getvalue()


def image(data: bytes, uuid: str | None = None, **options: Any) -> dict[str, Any]:
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    return {"type": "image_url", "image_url": {"url": url, **options}} | ({"uuid": uuid} if uuid else {})


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


async def samples(client: Client) -> dict[tuple[str, str | None], float]:
    _, page = await client.get("/metrics")
    return {
        (sample.name, sample.labels.get("engine")): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }


async def _body(answer: aiohttp.ClientResponse) -> Any:
    return await (answer.json() if answer.content_type == "application/json" else answer.text())


async def start_engine(stack: AsyncExitStack, folder: Path, settings: Settings, build: Callable[..., Any]) -> Client:
    """Start one engine in this process; it is stopped with the stack."""
    options = {"chat_template": settings.chat_template, "processor": settings.processor}
    loaded = model.load("m", folder, **options, engine=settings.engine)
    engine = simulated(settings, loaded)
    # Not by the server's own loop, which takes tenths of a second to stop: too slow for so many tests.
    config = uvicorn.Config(build(engine), port=0, log_level="error", lifespan="off")
    config.load()
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    stepping = asyncio.create_task(engine.run())
    await server.startup()

    async def stop() -> None:
        while server.server_state.connections:
            await asyncio.sleep(0.001)
        for listening in server.servers:
            listening.close()
        stepping.cancel()
        await asyncio.gather(stepping, return_exceptions=True)

    stack.push_async_callback(stop)
    port = server.servers[0].sockets[0].getsockname()[1]
    session = await stack.enter_async_context(aiohttp.ClientSession())
    return Client(engine, session, f"http://127.0.0.1:{port}")


def _servers(parse: Callable[..., Settings], build: Callable[..., Any], *base: str) -> Any:
    """Return a fixture that starts engines with the given flags; all are stopped at the end of the test."""

    @pytest.fixture
    async def serve(tiny: Path) -> AsyncIterator[Callable[..., Awaitable[Client]]]:
        async with AsyncExitStack() as stack:

            async def start(*flags: str) -> Client:
                common = ["serve", "--served-model-name", "tiny", "--sim-speed", "50", "--model", str(tiny)]
                return await start_engine(stack, tiny, parse([*common, *base, *flags]), build)

            yield start

    return serve


serve = _servers(parse, build, "--prefix-caching-hash-algo", "sha256_cbor", "--enable-prompt-tokens-details")
serve_sglang = _servers(sglang_flags.parse, sglang_app.build, "--page-size", "16", "--enable-cache-report")


@pytest.fixture
def unused_port() -> Callable[[int], int]:
    """Return the first of ``count`` free neighbouring loopback ports.

    They are below the kernel's ephemeral range, so no outgoing connection can take one before it is bound.
    """

    def find(count: int) -> int:
        while True:
            port = random.SystemRandom().randrange(20_000, 32_000)
            with ExitStack() as stack:
                try:
                    for following in range(count):
                        stack.enter_context(socket.socket()).bind(("127.0.0.1", port + following))
                except OSError:
                    continue
                return port

    return find
