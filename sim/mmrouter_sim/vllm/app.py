"""HTTP application of the simulated vLLM: its routes, those of the plugin, guarded paths and error responses."""

import asyncio
from functools import partial
from http import HTTPStatus
from typing import TypeVar
from uuid import uuid4

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from mmrouter_handover.plugin import wire
from mmrouter_sim import server
from mmrouter_sim.engine import SimulatedEngine
from mmrouter_sim.errors import RequestError, error_response, json_response
from mmrouter_sim.generation import render
from mmrouter_sim.vllm import completions, messages, requests, responses, tokens_in
from mmrouter_sim.vllm.flags import VERSION
from mmrouter_sim.vllm.plugin import Plugin
from mmrouter_sim.vllm.requests import ChatRequest, CompletionRequest, check, parse

GUARDED = ("/v1", "/v2", "/inference", "/sim")
"""Path prefixes that need the API key (docs/engine-facts/vllm.md#http-endpoints); ``/sim`` is the simulator's own."""


def build(engine: SimulatedEngine) -> Starlette:
    routes: list[server.RouteRow] = [
        ("/health", ["GET"], _health),
        ("/version", ["GET"], _version),
        ("/metrics", ["GET"], server.metrics),
        ("/sim/cache", ["GET"], server.cache),
        ("/v1/models", ["GET"], _models),
    ]
    if engine.settings.renders:
        routes.append(("/v1/chat/completions/render", ["POST"], _rendered))
    else:
        routes += [
            ("/v1/chat/completions", ["POST"], completions.chat),
            ("/v1/completions", ["POST"], completions.complete),
            ("/v1/messages", ["POST"], messages.create),
            ("/v1/messages/count_tokens", ["POST"], messages.count_tokens),
            ("/v1/responses", ["POST"], responses.create),
            ("/v1/responses/{response_id}", ["GET"], responses.retrieve),
            ("/v1/responses/{response_id}/cancel", ["POST"], responses.cancel),
            ("/v1/chat/completions/render", ["POST"], tokens_in.render_chat),
            ("/v1/completions/render", ["POST"], tokens_in.render_completion),
            ("/inference/v1/generate", ["POST"], tokens_in.generate),
            ("/tokenize", ["POST"], _tokenize),
            ("/detokenize", ["POST"], tokens_in.detokenize),
        ]
    if engine.plugin is not None:
        routes += PLUGIN_ROUTES
    return server.build_app(
        engine,
        routes,
        keys=engine.settings.api_keys,
        is_guarded=lambda path: path.startswith(GUARDED),
        error_response=error_response,
        http_error_response=_http_error,
    )


def _http_error(error: HTTPException) -> Response:
    phrase = HTTPStatus(error.status_code).phrase
    return error_response(RequestError(str(error.detail), status=error.status_code, kind=phrase))


async def _health(_engine: SimulatedEngine, _request: Request) -> Response:
    """Answer 200 until the end, also while draining (docs/engine-facts/vllm.md#drain)."""
    return Response(status_code=HTTPStatus.OK)


async def _version(_engine: SimulatedEngine, _request: Request) -> Response:
    return json_response({"version": VERSION})


async def _models(engine: SimulatedEngine, _request: Request) -> Response:
    return server.models(engine, "vllm", engine.settings.served_names, engine.model.name)


async def _chat_prompt(engine: SimulatedEngine, body: ChatRequest) -> requests.Prompt:
    completions.check_model(engine, body.model)
    check(body)
    return await render(engine, partial(requests.from_messages, engine, body))


async def _rendered(engine: SimulatedEngine, request: Request) -> Response:
    """Render a chat to token ids and image positions. See docs/engine-facts/vllm.md#renderer."""
    body = parse(await request.body(), ChatRequest)
    prompt = await _chat_prompt(engine, body)
    return json_response(
        {
            "request_id": f"chatcmpl-{uuid4().hex[:16]}",
            "token_ids": prompt.ids.tolist(),
            "features": requests.features(prompt),
            "model": body.model,
        }
    )


async def _tokenize(engine: SimulatedEngine, request: Request) -> Response:
    """Answer the token ids of a text, or of a chat's prompt."""
    raw = await request.body()
    if b'"messages"' in raw:
        ids = (await _chat_prompt(engine, parse(raw, ChatRequest))).ids.tolist()
    else:
        body = parse(raw, CompletionRequest)
        completions.check_model(engine, body.model)
        special = body.add_special_tokens
        ids = (await render(engine, partial(requests.from_text, engine, body.prompt, special=special))).ids.tolist()
    return json_response({"count": len(ids), "max_model_len": engine.context, "tokens": ids, "token_strs": None})


T = TypeVar("T")


async def _status(engine: SimulatedEngine, _request: Request) -> Response:
    return json_response(_plugin(engine).status())


async def _render(engine: SimulatedEngine, request: Request) -> Response:
    plugin = _plugin(engine, "renderer")
    asked = await _read(request, wire.RenderRequest)
    prompt = await _chat_prompt(engine, parse(bytes(asked.chat), ChatRequest))
    names = list(dict.fromkeys(item.identifier for item in prompt.media))
    wanted = names if asked.images is None else [name for name in names if name in asked.images]
    lease, offers, withheld, fell = await asyncio.to_thread(
        plugin.offer, wanted, asked.ways, asked.seconds, asked.inline_bytes
    )
    asyncio.get_running_loop().call_later(asked.seconds, plugin.release, lease)
    withheld |= dict.fromkeys(set(asked.images or ()) - set(names), "unnamed")
    features = requests.features(prompt)
    return json_response(wire.Rendered(prompt.ids.tolist(), features, lease, offers, withheld, fell))


async def _items(engine: SimulatedEngine, request: Request) -> Response:
    plugin = _plugin(engine, "engine")
    asked = await _read(request, wire.ItemsRequest)
    held, refused = await asyncio.to_thread(plugin.take, asked.items, asked.seconds)
    return json_response(wire.Taken(held, refused))


async def _release(engine: SimulatedEngine, request: Request) -> Response:
    plugin = _plugin(engine, "renderer")
    asked = await _read(request, wire.ReleaseRequest)
    return json_response(wire.Released(plugin.release(asked.lease)))


PLUGIN_ROUTES: list[server.RouteRow] = [
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
    except ValueError as error:
        raise RequestError(str(error)) from error
