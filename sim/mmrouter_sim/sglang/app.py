"""HTTP application of the simulated SGLang: its routes, open paths and error responses."""

import asyncio
from functools import partial
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from mmrouter_sim import http_app
from mmrouter_sim.engine import SimulatedEngine
from mmrouter_sim.errors import RequestError, json_response
from mmrouter_sim.sglang import chat, encode, prompts
from mmrouter_sim.sglang.pages import VERSION
from mmrouter_sim.sglang.schema import DetokenizeRequest, TokenizeRequest
from mmrouter_sim.vllm.schema import parse

OPEN = ("/health", "/ready", "/metrics")
"""Path prefixes that need no API key (docs/engine-facts/sglang.md#http-endpoints)."""


def build(engine: SimulatedEngine) -> Starlette:
    """Return the application for an engine."""
    routes: list[http_app.RouteRow] = [
        ("/health", ["GET"], _ready),
        ("/health_generate", ["GET"], _ready),
        ("/ready", ["GET"], _ready),
        ("/server_info", ["GET"], _server_info),
        ("/get_server_info", ["GET"], _server_info),
        ("/model_info", ["GET"], _model_info),
        ("/get_model_info", ["GET"], _model_info),
        ("/metrics", ["GET"], http_app.metrics),
        ("/sim/cache", ["GET"], http_app.cache),
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
        # An encoder has few routes and no API key.
        routes = [row for row in routes if row[0] in ("/health", "/health_generate", "/metrics")]
        routes.append(("/encode", ["POST"], encode.encode))
    return http_app.build_app(
        engine,
        routes,
        keys=engine.settings.api_keys if engine.encoder is None else (),
        is_guarded=lambda path: not path.startswith(OPEN),
        error_response=_error,
        http_error_response=lambda error: json_response({"detail": error.detail}, error.status_code),
    )


def _error(error: RequestError) -> Response:
    body = error.body()["error"]
    return json_response({"object": "error", **body}, error.status)


async def _ready(engine: SimulatedEngine, _request: Request) -> Response:
    """Answer 503 from SIGTERM on, while requests still run (docs/engine-facts/sglang.md#http-endpoints)."""
    return Response(status_code=HTTPStatus.SERVICE_UNAVAILABLE if engine.draining else HTTPStatus.OK)


async def _server_info(engine: SimulatedEngine, _request: Request) -> Response:
    states = [{"memory_usage": {}, "last_gen_throughput": 0.0} for _ in engine.runners]
    info = {"version": VERSION, "kv_events": _kv_events(engine), "internal_states": states, "frontend": "python"}
    return json_response(engine.settings.arguments | info)


def _kv_events(engine: SimulatedEngine) -> dict[str, Any] | None:
    settings = engine.settings
    events = settings.events
    if not events.publishes:
        return None
    pub = urlsplit(events.endpoint)
    info = {
        "publisher": "zmq",
        "endpoint_host": pub.netloc.rpartition(":")[0],
        "endpoint_port_base": int(pub.netloc.rpartition(":")[2] or 0),
        "topic": events.topic,
        "block_size": settings.block_size,
        "dp_size": settings.ranks,
    }
    if events.replay_endpoint:
        info["replay_endpoint_port_base"] = int(events.replay_endpoint.rpartition(":")[2])
    return info


async def _model_info(engine: SimulatedEngine, _request: Request) -> Response:
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


async def _models(engine: SimulatedEngine, _request: Request) -> Response:
    name = engine.settings.served_names[0]
    return http_app.models(engine, "sglang", [name], name)


async def _loads(engine: SimulatedEngine, _request: Request) -> Response:
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


async def _tokenize(engine: SimulatedEngine, request: Request) -> Response:
    body = parse(await request.body(), TokenizeRequest)
    loop, tokenizer = asyncio.get_running_loop(), engine.model.tokenizer
    if body.messages is not None:
        tokens = await loop.run_in_executor(engine.renderer, partial(prompts.plain, engine, body, body.messages))
    elif body.prompt is not None:
        tokens = tokenizer.encode(body.prompt, add_special_tokens=body.add_special_tokens).ids
    else:
        raise RequestError("Either prompt or messages is required.", param="prompt")
    return json_response({"tokens": tokens, "count": len(tokens), "max_model_len": engine.context})


async def _detokenize(engine: SimulatedEngine, request: Request) -> Response:
    body = parse(await request.body(), DetokenizeRequest)
    if any(not 0 <= token < 1 << 32 for token in body.tokens):
        raise RequestError("tokens: a token id is not in the vocabulary", param="tokens")
    return json_response({"text": engine.model.tokenizer.decode(body.tokens, body.skip_special_tokens)})


async def _flush(engine: SimulatedEngine, _request: Request) -> Response:
    done = engine.reset_prefix_cache()
    for runner in engine.runners:
        runner.publish_pending()
    text = "Cache flushed." if done else "Cache not flushed: requests are running."
    return Response(text, HTTPStatus.OK if done else HTTPStatus.BAD_REQUEST, media_type="text/plain")
