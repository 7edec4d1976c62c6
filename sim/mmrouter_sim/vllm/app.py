"""HTTP application of the simulated vLLM: its routes, guarded paths and error responses."""

import asyncio
from functools import partial
from http import HTTPStatus
from uuid import uuid4

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from mmrouter_sim import http_app
from mmrouter_sim.engine import SimulatedEngine
from mmrouter_sim.errors import RequestError, error_response, json_response, validation_error
from mmrouter_sim.vllm import completions, prompts
from mmrouter_sim.vllm.flags import VERSION
from mmrouter_sim.vllm.schema import ChatRequest, DetokenizeRequest, TokenizeRequest, check, parse

GUARDED = ("/v1", "/v2", "/inference", "/sim")
"""Path prefixes that need the API key (docs/engine-facts/vllm.md#http-endpoints); ``/sim`` is the simulator's own."""


def build(engine: SimulatedEngine) -> Starlette:
    """Return the application for an engine."""
    routes: list[http_app.RouteRow] = [
        ("/health", ["GET"], _health),
        ("/ping", ["GET", "POST"], _health),
        ("/version", ["GET"], _version),
        ("/metrics", ["GET"], http_app.metrics),
        ("/kv_event_sources", ["GET"], _sources),
        ("/sim/cache", ["GET"], http_app.cache),
        ("/tokenize", ["POST"], _tokenize),
        ("/detokenize", ["POST"], _detokenize),
        ("/v1/models", ["GET"], _models),
    ]
    if engine.settings.renders:
        routes.append(("/v1/chat/completions/render", ["POST"], _rendered))
    else:
        routes += [
            ("/v1/chat/completions", ["POST"], completions.chat),
            ("/v1/completions", ["POST"], completions.complete),
        ]
    if engine.settings.dev_mode:
        routes += [
            ("/reset_prefix_cache", ["POST"], _reset_prefix_cache),
            ("/reset_mm_cache", ["POST"], _reset_mm_cache),
            ("/reset_encoder_cache", ["POST"], _reset_encoder_cache),
        ]
    if engine.plugin is not None:
        from mmrouter_sim.vllm.plugin_routes import ROUTES  # noqa: PLC0415 - only what this process serves is loaded

        routes += ROUTES
    return http_app.build_app(
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


async def _sources(engine: SimulatedEngine, _request: Request) -> Response:
    return json_response(engine.sources())


async def _models(engine: SimulatedEngine, _request: Request) -> Response:
    return http_app.models(engine, "vllm", engine.settings.served_names, engine.model.name)


async def _tokenize(engine: SimulatedEngine, request: Request) -> Response:
    body = parse(await request.body(), TokenizeRequest)
    completions.check_model(engine, body.model)
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


async def _rendered(engine: SimulatedEngine, request: Request) -> Response:
    """Render a chat to token ids and image positions.

    See docs/engine-facts/vllm.md#renderer.
    """
    body = parse(await request.body(), ChatRequest)
    completions.check_model(engine, body.model)
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


async def _detokenize(engine: SimulatedEngine, request: Request) -> Response:
    body = parse(await request.body(), DetokenizeRequest)
    completions.check_model(engine, body.model)
    if any(not 0 <= token < 1 << 32 for token in body.tokens):
        raise validation_error("tokens: a token id is not in the vocabulary")
    return json_response({"prompt": engine.model.tokenizer.decode(body.tokens, skip_special_tokens=False)})


async def _reset_prefix_cache(engine: SimulatedEngine, _request: Request) -> Response:
    return json_response({"success": engine.reset_prefix_cache()})


async def _reset_mm_cache(engine: SimulatedEngine, _request: Request) -> Response:
    engine.images.clear()
    return Response()


async def _reset_encoder_cache(engine: SimulatedEngine, _request: Request) -> Response:
    for runner in engine.runners:
        runner.scheduler.encoder.clear()
    return Response()
