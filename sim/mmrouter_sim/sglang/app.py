"""HTTP application of the simulated SGLang: its routes, open paths and error responses."""

import hashlib
import struct
from functools import partial
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from mmrouter_sim import server
from mmrouter_sim.core.requests import Media
from mmrouter_sim.encoders import Embedding, EncodeRequest, Part
from mmrouter_sim.engine import SimulatedEngine
from mmrouter_sim.errors import RequestError, json_response
from mmrouter_sim.generation import render
from mmrouter_sim.sglang import chat, requests, responses
from mmrouter_sim.sglang.pages import VERSION

OPEN = ("/health", "/ready", "/metrics")
"""Path prefixes that need no API key (docs/engine-facts/sglang.md#http-endpoints)."""


def build(engine: SimulatedEngine) -> Starlette:
    routes: list[server.RouteRow] = [
        ("/health", ["GET"], _ready),
        ("/ready", ["GET"], _ready),
        ("/server_info", ["GET"], _server_info),
        ("/model_info", ["GET"], _model_info),
        ("/metrics", ["GET"], server.metrics),
        ("/sim/cache", ["GET"], server.cache),
        ("/v1/models", ["GET"], _models),
        ("/v1/chat/completions", ["POST"], chat.chat),
        ("/v1/completions", ["POST"], chat.complete),
        ("/v1/responses", ["POST"], responses.create),
        ("/v1/responses/{response_id}", ["GET"], responses.retrieve),
        ("/v1/responses/{response_id}/cancel", ["POST"], responses.cancel),
    ]
    if engine.encoder is not None:
        # An encoder has few routes and no API key.
        routes = [row for row in routes if row[0] in ("/health", "/metrics")]
        routes.append(("/encode", ["POST"], encode))
    return server.build_app(
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
    return server.models(engine, "sglang", [name], name)


async def encode(engine: SimulatedEngine, request: Request) -> Response:
    """``POST /encode``: encode the images, send the result to the engine, and answer."""
    encoder = engine.encoder
    assert encoder is not None
    try:
        part = msgspec.json.decode(await request.body(), type=EncodeRequest)
    except msgspec.DecodeError as error:
        return _encode_error(400, str(error), None)
    if not part.mm_items or part.num_parts < 1 or not 0 <= part.part_idx < part.num_parts:
        return _encode_error(400, "missing or empty mm_items" if not part.mm_items else "part_idx", part.req_id)
    sent = Part(part.req_id, part.part_idx, part.num_parts, [])
    status = 200
    try:
        items = [item if isinstance(item, dict) else {"url": item} for item in part.mm_items]
        made = [await render(engine, partial(_embedding, engine, item)) for item in items]
        await encoder.encode([Media(str(each.digest), 0, each.tokens) for each in made])
        sent.embeddings = made
    except RequestError as error:
        sent.error, status = str(error), error.status
    if part.embedding_port is not None:
        await engine.shares.send(part.prefill_host, part.embedding_port, sent)
    return _encode_error(status, sent.error, part.req_id) if sent.error else json_response(None)


def _embedding(engine: SimulatedEngine, item: dict[str, Any]) -> Embedding:
    pixels, tokens = requests.picture(engine, item)
    digest = hashlib.sha256(b"embedding" + struct.pack(">Q", pixels)).digest()
    return Embedding(int.from_bytes(digest[:8], "big"), tokens)


def _encode_error(status: int, message: str, request: str | None) -> Response:
    return json_response({"status": "error", "message": message, "req_id": request}, status)
