"""The endpoints that ``--enable-scale-out`` opens: a rendered prompt, and its continuation after given token ids.

See docs/engine-facts/vllm.md#tokens-in. The answers of the simulator depend on the whole prompt, so an engine keeps
the prompts that it rendered: after the first tokens of such a prompt's answer it generates the rest of that answer.
"""

from array import array
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any
from uuid import uuid4
from weakref import WeakKeyDictionary

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from mmrouter_sim.core.requests import Media, Sampler
from mmrouter_sim.engine import SimulatedEngine
from mmrouter_sim.errors import RequestError, json_response
from mmrouter_sim.generation import render, request_of
from mmrouter_sim.vllm import requests
from mmrouter_sim.vllm.completions import COMPLETION_TOKENS, RANK_HEADER, SHUT_DOWN, VllmJob, check_model
from mmrouter_sim.vllm.requests import (
    ChatRequest,
    CompletionRequest,
    Generation,
    Prompt,
    StreamOptions,
    check,
    check_generation,
    parse,
)

REMEMBERED = 256  # rendered prompts


class Sampling(msgspec.Struct):
    max_tokens: int
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: list[int] = []


class GenerateRequest(msgspec.Struct, kw_only=True):
    token_ids: list[int]
    sampling_params: Sampling
    features: dict[str, Any] | None = None
    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    output_mode: str = "tokens"


class DetokenizeRequest(msgspec.Struct):
    tokens: list[int]
    model: str | None = None


@dataclass(frozen=True, slots=True)
class Rendered:
    ids: "array[int]"
    answer: Sampler


_rendered: WeakKeyDictionary[SimulatedEngine, deque[Rendered]] = WeakKeyDictionary()


async def render_chat(engine: SimulatedEngine, http: HttpRequest) -> Response:
    """Answer ``POST /v1/chat/completions/render`` of an engine."""
    _require_open(engine)
    body = parse(await http.body(), ChatRequest)
    wanted = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    return json_response(await _render(engine, body, wanted, partial(requests.from_messages, engine, body)))


async def render_completion(engine: SimulatedEngine, http: HttpRequest) -> Response:
    """Answer ``POST /v1/completions/render`` of an engine: a list of one, as one prompt is simulated."""
    _require_open(engine)
    body = parse(await http.body(), CompletionRequest)
    wanted = body.max_tokens if body.max_tokens is not None else COMPLETION_TOKENS
    make = partial(requests.from_text, engine, body.prompt, special=body.add_special_tokens)
    return json_response([await _render(engine, body, wanted, make)])


async def _render(
    engine: SimulatedEngine, body: Generation, wanted: int | None, make: Callable[[], Prompt]
) -> dict[str, Any]:
    check_model(engine, body.model)
    check(body)
    check_generation(body, wanted)
    prompt = await render(engine, make)
    room = engine.context - len(prompt.ids)
    answer = engine.answers.sampler(prompt.ids, prompt.media, min_tokens=body.min_tokens, ends=not body.ignore_eos)
    _rendered.setdefault(engine, deque(maxlen=REMEMBERED)).append(Rendered(prompt.ids, answer))
    sampling = Sampling(min(wanted or room, room), body.min_tokens, body.ignore_eos, body.stop_token_ids or [])
    return {
        "request_id": f"chatcmpl-{uuid4().hex[:16]}",
        "token_ids": prompt.ids.tolist(),
        "features": requests.features(prompt),
        "sampling_params": msgspec.to_builtins(sampling),
        "model": body.model,
        "stream": bool(body.stream),
        "stream_options": msgspec.to_builtins(body.stream_options),
        "cache_salt": body.cache_salt,
        "reasoning_parser_kwargs": None,
    }


@dataclass
class TokensJob(VllmJob):
    """A generation in the shape of the tokens-in endpoint."""

    def head(self, kind: str) -> dict[str, Any]:
        return {"request_id": self.id, "output_mode": "text", "usage": None}

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        async for piece in self.pieces():
            choice = {"index": 0, "logprobs": None, "finish_reason": piece.finished, "stop_reason": piece.stop_reason}
            yield self.head("") | {"choices": [choice | {"token_ids": [piece.token], "text": piece.text}]}


async def generate(engine: SimulatedEngine, http: HttpRequest) -> Response:
    """Answer ``POST /inference/v1/generate``, streamed and as text."""
    _require_open(engine)
    wanted = parse(await http.body(), GenerateRequest)
    check_model(engine, wanted.model)
    if not wanted.stream or wanted.output_mode != "text":
        raise RequestError("Only streams of text are simulated.")
    if engine.draining:
        raise SHUT_DOWN
    sampling, features = wanted.sampling_params, wanted.features or {}
    if len(wanted.token_ids) + sampling.max_tokens > engine.context:
        raise RequestError(f"The prompt and max_tokens are longer than the context of {engine.context} tokens.")
    names, places = features.get("mm_hashes", {}), features.get("mm_placeholders", {})
    media = zip(names.get("image", ()), places.get("image", ()), strict=True)
    prompt = Prompt(array("I", wanted.token_ids), tuple(Media(name, at["offset"], at["length"]) for name, at in media))
    body = Generation(
        stream=True,
        stream_options=wanted.stream_options,
        ignore_eos=sampling.ignore_eos,
        min_tokens=sampling.min_tokens,
        stop_token_ids=sampling.stop_token_ids,
        cache_salt=wanted.cache_salt,
    )
    try:
        runner = engine.pick(http.headers.get(RANK_HEADER))
    except ValueError as error:
        raise RequestError(str(error)) from error
    name, lora = f"generate-tokens-{uuid4().hex}", engine.adapters.get(wanted.model or "")
    request = request_of(engine, body, prompt, name, ids=prompt.ids, max_tokens=sampling.max_tokens, lora=lora)
    request.sample = _rest(engine, prompt.ids) or request.sample
    return await TokensJob(engine, runner, body, prompt, request, name).respond(http)


async def detokenize(engine: SimulatedEngine, http: HttpRequest) -> Response:
    """Answer ``POST /detokenize``."""
    wanted = parse(await http.body(), DetokenizeRequest)
    return json_response({"prompt": engine.model.tokenizer.decode(wanted.tokens, skip_special_tokens=False)})


def _rest(engine: SimulatedEngine, ids: "array[int]") -> Sampler | None:
    """Return the rest of a rendered prompt's answer, where these ids are that prompt and the answer's beginning."""
    for known in reversed(_rendered.get(engine, ())):
        size = len(known.ids)
        if ids[:size] == known.ids and all(known.answer(n) == token for n, token in enumerate(ids[size:])):
            return partial(_shifted, known.answer, len(ids) - size)
    return None


def _shifted(answer: Sampler, sent: int, position: int) -> int:
    return answer(sent + position)


def _require_open(engine: SimulatedEngine) -> None:
    if not engine.settings.scale_out:
        status = HTTPStatus.FORBIDDEN
        raise RequestError("Use --enable-scale-out to enable this endpoint.", status=status, kind=status.phrase)
