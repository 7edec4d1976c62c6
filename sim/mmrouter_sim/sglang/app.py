"""The HTTP application of a simulated SGLang: routes, the API key, and errors in the engine's shape."""

import asyncio
import hmac
from collections.abc import Awaitable, Callable
from functools import partial
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from mmrouter_sim.core.sglang_pages import VERSION
from mmrouter_sim.engine import Engine
from mmrouter_sim.sglang import chat, encode, prompts
from mmrouter_sim.sglang.schema import DetokenizeRequest, TokenizeRequest
from mmrouter_sim.vllm.errors import RequestError, json_response, note_refusal
from mmrouter_sim.vllm.schema import parse

OPEN = ("/health", "/ready", "/metrics")
"""Paths that never want the API key; all others do (docs/engine-facts/sglang.md#http-endpoints)."""

Handler = Callable[[Engine, Request], Awaitable[Response]]


def build(engine: Engine) -> Starlette:
    """Return the application for an engine."""
    routes: list[tuple[str, list[str], Handler]] = [
        ("/health", ["GET"], _ready),
        ("/health_generate", ["GET"], _ready),
        ("/ready", ["GET"], _ready),
        ("/server_info", ["GET"], _server_info),
        ("/get_server_info", ["GET"], _server_info),
        ("/model_info", ["GET"], _model_info),
        ("/get_model_info", ["GET"], _model_info),
        ("/metrics", ["GET"], _metrics),
        ("/sim/cache", ["GET"], _cache),
        ("/v1/models", ["GET"], _models),
        ("/v1/loads", ["GET"], _loads),
        ("/v1/tokenize", ["POST"], _tokenize),
        ("/tokenize", ["POST"], _tokenize),
        ("/v1/detokenize", ["POST"], _detokenize),
        ("/detokenize", ["POST"], _detokenize),
        ("/flush_cache", ["GET", "POST"], _flush),
        ("/v1/chat/completions", ["POST"], chat.chat),
        ("/v1/completions", ["POST"], chat.complete),
    ]
    if engine.encoder is not None:
        # An application of its own, which asks for no key and says little of itself.
        routes = [row for row in routes if row[0] in ("/health", "/health_generate", "/metrics")]
        routes.append(("/encode", ["POST"], encode.encode))
    keys = engine.settings.api_keys if engine.encoder is None else ()
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
    """Asks for the key as a bearer token, except where probes and scrapers look."""

    def __init__(self, app: ASGIApp, keys: tuple[str, ...]) -> None:
        self._app = app
        self._expected = [f"Bearer {key}".encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] != "OPTIONS" and not scope["path"].startswith(OPEN):
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not any(hmac.compare_digest(given, expected) for expected in self._expected):
                note_refusal(scope)
                await json_response({"error": "Unauthorized"}, HTTPStatus.UNAUTHORIZED)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _error(error: RequestError) -> Response:
    body = error.body()["error"]
    return json_response({"object": "error", **body}, error.status)


async def _request_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return _error(error)


async def _http_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return json_response({"detail": error.detail}, error.status_code)


async def _failure(_request: Request, error: Exception) -> Response:
    """Ours to mend, whatever it was: the framework logs it after this answer."""
    return _error(RequestError(f"{type(error).__name__}: {error}", status=HTTPStatus.INTERNAL_SERVER_ERROR))


async def _ready(engine: Engine, _request: Request) -> Response:
    """503 from SIGTERM on, while requests still run (docs/engine-facts/sglang.md#http-endpoints)."""
    return Response(status_code=HTTPStatus.SERVICE_UNAVAILABLE if engine.draining else HTTPStatus.OK)


async def _server_info(engine: Engine, _request: Request) -> Response:
    states = [{"memory_usage": {}, "last_gen_throughput": 0.0} for _ in engine.runners]
    info = {"version": VERSION, "kv_events": _kv_events(engine), "internal_states": states, "frontend": "python"}
    return json_response(engine.settings.arguments | info)


def _kv_events(engine: Engine) -> dict[str, Any] | None:
    settings = engine.settings
    events = settings.events
    if not events.publishes:
        return None
    pub = urlsplit(events.endpoint)
    told = {
        "publisher": "zmq",
        "endpoint_host": pub.netloc.rpartition(":")[0],
        "endpoint_port_base": int(pub.netloc.rpartition(":")[2] or 0),
        "topic": events.topic,
        "block_size": settings.block_size,
        "dp_size": settings.ranks,
    }
    if events.replay_endpoint:
        told["replay_endpoint_port_base"] = int(events.replay_endpoint.rpartition(":")[2])
    return told


async def _model_info(engine: Engine, _request: Request) -> Response:
    model = engine.model
    return json_response(
        {
            "model_path": engine.settings.model,
            "served_model_name": engine.settings.served_names[0],
            "tokenizer_path": engine.settings.model,
            "is_generation": True,
            "weight_version": "default",
            "disaggregation_mode": engine.settings.pairs.mode if engine.settings.pairs else "null",
            "has_image_understanding": True,
            "has_audio_understanding": False,
            "model_type": model.model_type,
            "architectures": list(model.architectures) or None,
        }
    )


async def _cache(engine: Engine, _request: Request) -> Response:
    return json_response(engine.held())


async def _metrics(engine: Engine, _request: Request) -> Response:
    return Response(generate_latest(engine.metrics.registry), headers={"content-type": CONTENT_TYPE_LATEST})


async def _models(engine: Engine, _request: Request) -> Response:
    name = engine.settings.served_names[0]
    model = {
        "id": name,
        "object": "model",
        "created": engine.started,
        "owned_by": "sglang",
        "root": name,
        "parent": None,
        "max_model_len": engine.context,
    }
    return json_response({"object": "list", "data": [model]})


async def _loads(engine: Engine, _request: Request) -> Response:
    size = engine.settings.block_size
    loads = [
        {
            "dp_rank": rank,
            "num_running_reqs": len(runner.scheduler.running),
            "num_waiting_reqs": len(runner.scheduler.waiting),
            "num_used_tokens": runner.scheduler.pool.used * size,
            "max_total_num_tokens": (runner.scheduler.pool.size - 1) * size,
            "token_usage": runner.scheduler.pool.usage,
        }
        for rank, runner in enumerate(engine.runners)
    ]
    return json_response({"version": VERSION, "num_accelerators": len(loads), "loads": loads})


async def _tokenize(engine: Engine, request: Request) -> Response:
    body = parse(await request.body(), TokenizeRequest)
    loop, tokenizer = asyncio.get_running_loop(), engine.model.tokenizer
    if body.messages is not None:
        tokens = await loop.run_in_executor(engine.renderer, partial(prompts.plain, engine, body, body.messages))
    elif body.prompt is not None:
        tokens = tokenizer.encode(body.prompt, add_special_tokens=body.add_special_tokens).ids
    else:
        raise RequestError("Either prompt or messages is required.", param="prompt")
    return json_response({"tokens": tokens, "count": len(tokens), "max_model_len": engine.context})


async def _detokenize(engine: Engine, request: Request) -> Response:
    body = parse(await request.body(), DetokenizeRequest)
    if any(not 0 <= token < 1 << 32 for token in body.tokens):
        raise RequestError("tokens: a token id is not in the vocabulary", param="tokens")
    return json_response({"text": engine.model.tokenizer.decode(body.tokens, body.skip_special_tokens)})


async def _flush(engine: Engine, _request: Request) -> Response:
    done = engine.reset_prefix_cache()
    for runner in engine.runners:
        runner.tell()
    text = "Cache flushed." if done else "Cache not flushed: requests are running."
    return Response(text, HTTPStatus.OK if done else HTTPStatus.BAD_REQUEST, media_type="text/plain")
