"""The HTTP application of a simulated vLLM: routes, the API key, and errors in the engine's shape.

Starlette, not FastAPI: bodies are parsed by msgspec, and FastAPI would double the time that each engine takes to start.
"""

import asyncio
import hmac
from collections.abc import Awaitable, Callable
from functools import partial
from http import HTTPStatus
from uuid import uuid4

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from mmrouter_sim.engine import Engine
from mmrouter_sim.vllm import generate, prompts
from mmrouter_sim.vllm.errors import RequestError, error_response, json_response, note_refusal, validation_error
from mmrouter_sim.vllm.flags import VERSION
from mmrouter_sim.vllm.schema import ChatRequest, DetokenizeRequest, TokenizeRequest, check, parse

GUARDED = ("/v1", "/v2", "/inference", "/sim")
"""Paths that want the API key; the others never do (docs/engine-facts/vllm.md#http-endpoints). The
last one is the simulator's own."""

Handler = Callable[[Engine, Request], Awaitable[Response]]


def build(engine: Engine) -> Starlette:
    """Return the application for an engine."""
    routes: list[tuple[str, list[str], Handler]] = [
        ("/health", ["GET"], _health),
        ("/ping", ["GET", "POST"], _health),
        ("/version", ["GET"], _version),
        ("/metrics", ["GET"], _metrics),
        ("/kv_event_sources", ["GET"], _sources),
        ("/sim/cache", ["GET"], _cache),
        ("/tokenize", ["POST"], _tokenize),
        ("/detokenize", ["POST"], _detokenize),
        ("/v1/models", ["GET"], _models),
    ]
    if engine.settings.renders:
        routes.append(("/v1/chat/completions/render", ["POST"], _rendered))
    else:
        routes += [("/v1/chat/completions", ["POST"], generate.chat), ("/v1/completions", ["POST"], generate.complete)]
    if engine.settings.dev_mode:
        routes += [
            ("/reset_prefix_cache", ["POST"], _reset_prefix_cache),
            ("/reset_mm_cache", ["POST"], _reset_mm_cache),
            ("/reset_encoder_cache", ["POST"], _reset_encoder_cache),
        ]
    if engine.plugin is not None:
        from mmrouter_sim.vllm.plugin_routes import ROUTES  # noqa: PLC0415 - only what this process serves is loaded

        routes += ROUTES
    keys = engine.settings.api_keys
    return Starlette(
        routes=[Route(path, _endpoint(engine, handler), methods=methods) for path, methods, handler in routes],
        middleware=[Middleware(_ApiKey, keys=keys)] if keys else [],
        exception_handlers={RequestError: _request_error, HTTPException: _http_error, Exception: _failure},
    )


def _endpoint(engine: Engine, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        return await handler(engine, request)

    return endpoint


class _ApiKey:
    """Asks for one of the keys as a bearer token on guarded paths."""

    def __init__(self, app: ASGIApp, keys: tuple[str, ...]) -> None:
        self._app = app
        self._expected = [f"Bearer {key}".encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] != "OPTIONS" and scope["path"].startswith(GUARDED):
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not any(hmac.compare_digest(given, expected) for expected in self._expected):
                note_refusal(scope)
                await json_response({"error": "Unauthorized"}, HTTPStatus.UNAUTHORIZED)(scope, receive, send)
                return
        await self._app(scope, receive, send)


async def _request_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return error_response(error)


async def _http_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    phrase = HTTPStatus(error.status_code).phrase
    return error_response(RequestError(str(error.detail), status=error.status_code, kind=phrase))


async def _failure(_request: Request, error: Exception) -> Response:
    """Ours to mend, whatever it was: the framework logs it after this answer."""
    return error_response(RequestError(f"{type(error).__name__}: {error}", status=HTTPStatus.INTERNAL_SERVER_ERROR))


async def _health(_engine: Engine, _request: Request) -> Response:
    """200 to the very end, while draining too, as the engine has it (docs/engine-facts/vllm.md#drain)."""
    return Response(status_code=HTTPStatus.OK)


async def _version(_engine: Engine, _request: Request) -> Response:
    return json_response({"version": VERSION})


async def _metrics(engine: Engine, _request: Request) -> Response:
    return Response(generate_latest(engine.metrics.registry), headers={"content-type": CONTENT_TYPE_LATEST})


async def _sources(engine: Engine, _request: Request) -> Response:
    return json_response(engine.sources())


async def _cache(engine: Engine, _request: Request) -> Response:
    return json_response(engine.held())


async def _models(engine: Engine, _request: Request) -> Response:
    models = [
        {
            "id": name,
            "object": "model",
            "created": engine.started,
            "owned_by": "vllm",
            "root": engine.model.name,
            "parent": None,
            "max_model_len": engine.context,
        }
        for name in engine.settings.served_names
    ]
    return json_response({"object": "list", "data": models})


async def _tokenize(engine: Engine, request: Request) -> Response:
    body = parse(await request.body(), TokenizeRequest)
    generate.check_model(engine, body.model)
    check(body)
    special = body.add_special_tokens
    if body.messages is not None:
        make = partial(prompts.from_messages, engine, body, body.messages, special=bool(special))
    elif body.prompt is not None:
        make = partial(prompts.from_text, engine, body.prompt, special=special is not False)
    else:
        raise validation_error("Field required: prompt or messages")
    prompt = await asyncio.get_running_loop().run_in_executor(engine.renderer, make)
    tokens = prompt.ids.tolist()
    strings = [engine.model.tokenizer.id_to_token(token) for token in tokens] if body.return_token_strs else None
    return json_response(
        {"count": len(tokens), "max_model_len": engine.context, "tokens": tokens, "token_strs": strings}
    )


async def _rendered(engine: Engine, request: Request) -> Response:
    """What the engine would be given for a chat: ids, and where which image stands.

    See docs/engine-facts/vllm.md#renderer.
    """
    body = parse(await request.body(), ChatRequest)
    generate.check_model(engine, body.model)
    check(body)
    make = partial(prompts.from_messages, engine, body, body.messages, special=body.add_special_tokens)
    prompt = await asyncio.get_running_loop().run_in_executor(engine.renderer, make)
    return json_response(
        {
            "request_id": f"chatcmpl-{uuid4().hex[:16]}",
            "token_ids": prompt.ids.tolist(),
            "features": prompts.features(prompt),
            "model": body.model,
        }
    )


async def _detokenize(engine: Engine, request: Request) -> Response:
    body = parse(await request.body(), DetokenizeRequest)
    generate.check_model(engine, body.model)
    if any(not 0 <= token < 1 << 32 for token in body.tokens):
        raise validation_error("tokens: a token id is not in the vocabulary")
    return json_response({"prompt": engine.model.tokenizer.decode(body.tokens, skip_special_tokens=False)})


async def _reset_prefix_cache(engine: Engine, _request: Request) -> Response:
    return json_response({"success": engine.reset_prefix_cache()})


async def _reset_mm_cache(engine: Engine, _request: Request) -> Response:
    engine.images.clear()
    return Response()


async def _reset_encoder_cache(engine: Engine, _request: Request) -> Response:
    for runner in engine.runners:
        runner.scheduler.encoder.clear()
    return Response()
