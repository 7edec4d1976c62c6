"""HTTP routes of the mmrouter plugin in a simulated vLLM."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from mmrouter_handover.plugin import wire
from mmrouter_sim.engine import SimulatedEngine
from mmrouter_sim.errors import RequestError
from mmrouter_sim.vllm import completions, prompts
from mmrouter_sim.vllm.plugin import Plugin
from mmrouter_sim.vllm.schema import ChatRequest, check, parse

T = TypeVar("T")
Handler = Callable[[SimulatedEngine, Request], Awaitable[Response]]


async def _status(engine: SimulatedEngine, _request: Request) -> Response:
    return _json(_plugin(engine).status())


async def _render(engine: SimulatedEngine, request: Request) -> Response:
    plugin = _plugin(engine, "renderer")
    asked = await _read(request, wire.RenderRequest)
    body = parse(bytes(asked.chat), ChatRequest)
    completions.check_model(engine, body.model)
    check(body)
    make = partial(prompts.from_messages, engine, body, body.messages, special=body.add_special_tokens)
    loop = asyncio.get_running_loop()
    prompt = await loop.run_in_executor(engine.renderer, make)
    names = list(dict.fromkeys(item.identifier for item in prompt.media))
    wanted = names if asked.images is None else [name for name in names if name in asked.images]
    lease, offers, withheld, fell = await asyncio.to_thread(
        plugin.offer, wanted, asked.ways, asked.seconds, asked.inline_bytes
    )
    loop.call_later(asked.seconds, plugin.release, lease)
    withheld |= dict.fromkeys(set(asked.images or ()) - set(names), "unnamed")
    features = prompts.features(prompt)
    return _json(wire.Rendered(prompt.ids.tolist(), features, lease, offers, withheld, fell))


async def _items(engine: SimulatedEngine, request: Request) -> Response:
    plugin = _plugin(engine, "engine")
    asked = await _read(request, wire.ItemsRequest)
    held, refused = await asyncio.to_thread(plugin.take, asked.items, asked.seconds)
    return _json(wire.Taken(held, refused))


async def _release(engine: SimulatedEngine, request: Request) -> Response:
    plugin = _plugin(engine, "renderer")
    asked = await _read(request, wire.ReleaseRequest)
    return _json(wire.Released(plugin.release(asked.lease)))


ROUTES: list[tuple[str, list[str], Handler]] = [
    (wire.STATUS_PATH, ["GET"], _status),
    (wire.RENDER_PATH, ["POST"], _render),
    (wire.ITEMS_PATH, ["POST"], _items),
    (wire.RELEASE_PATH, ["POST"], _release),
]


def _plugin(engine: SimulatedEngine, role: str = "") -> Plugin:
    plugin = engine.plugin
    if plugin is None or (role and plugin.role != role):
        raise RequestError("Not Found", status=404, kind="Not Found")
    return plugin


async def _read(request: Request, kind: type[T]) -> T:
    try:
        return wire.read(await request.body(), kind)
    except wire.BadRequest as error:
        raise RequestError(str(error)) from error


def _json(value: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
