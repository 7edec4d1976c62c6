"""``/v1/chat/completions`` and ``/v1/completions``: prompt in, tokens out, whole or as server-sent events."""

import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from mmrouter_sim.core.requests import Request
from mmrouter_sim.encoders import ImageEncoder
from mmrouter_sim.engine import SimulatedEngine
from mmrouter_sim.errors import RequestError, json_response, parameter_error
from mmrouter_sim.generation import Job, Piece, render, request_of
from mmrouter_sim.settings import Settings
from mmrouter_sim.vllm import requests
from mmrouter_sim.vllm.requests import (
    ChatRequest,
    CompletionRequest,
    Generation,
    Prompt,
    check,
    check_generation,
    parse,
)
from mmrouter_sim.vllm.transfers import EMBEDDING_BYTES, TransferError

RANK_HEADER = "x-data-parallel-rank"
REQUEST_HEADER = "x-request-id"
COMPLETION_TOKENS = 16  # the engine's default for completions; a chat's is what the context leaves

SHUT_DOWN = RequestError("cannot schedule new futures after shutdown", status=500)
"""Error message for a request that arrives or runs when the engine goes down.

See docs/engine-facts/vllm.md#drain.
"""


@dataclass
class VllmJob(Job):
    aborted = SHUT_DOWN
    shows_usage = False
    received: int = 0  # prompt tokens received from another engine

    def details(self) -> dict[str, Any] | None:
        settings = self.engine.settings
        if not settings.token_details:
            return None
        details = prompt_details(settings, self.request, self.prompt)
        if self.received:
            # Received tokens count as neither; the prefill's cached tokens are passed on
            # (docs/engine-facts/vllm.md#prefill-decode).
            reported = (self.body.kv_transfer_params or {}).get("remote_prefill_cached_tokens", 0)
            details |= {"cached_tokens": reported, "created_cache_tokens": 0}
        return details

    def answer(self, pieces: list[Piece]) -> dict[str, Any]:
        text, last = "".join(piece.text for piece in pieces), pieces[-1]
        ending = {
            "finish_reason": self.ended(last.finished),
            "stop_reason": last.stop_reason,
            "token_ids": [piece.token for piece in pieces] if self.body.return_token_ids else None,
        }
        if self.chat:
            kind = "chat.completion"
            empty = dict.fromkeys(("refusal", "annotations", "audio", "function_call", "reasoning"))
            calls = self.call(text)
            content = text if calls is None else ""
            message: dict[str, Any] = {"role": "assistant", "content": content, "tool_calls": calls or [], **empty}
            choice = {"index": 0, "message": message, "logprobs": self.logprobs(pieces), **ending}
        else:
            kind = "text_completion"
            choice = {
                "index": 0,
                "text": self.echoed() + text,
                "logprobs": self.logprobs(pieces),
                **ending,
                **self._prompt_ids(),
                "prompt_logprobs": None,
            }
        return self.head(kind) | {
            "choices": [choice],
            "service_tier": None,
            "system_fingerprint": None,
            "usage": self.usage(),
            **({"prompt_logprobs": None, **self._prompt_ids()} if self.chat else {}),
            # For the engine that continues this request.
            "kv_transfer_params": self.engine.handover.offer(self.runner.scheduler, self.request),
        }

    def _prompt_ids(self) -> dict[str, list[int] | None]:
        ids = self.request.ids[: self.request.prompt_length].tolist() if self.body.return_token_ids else None
        return {"prompt_token_ids": ids}

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        head, first = self.head("chat.completion.chunk" if self.chat else "text_completion"), True
        begins = 0
        async for piece in self.pieces():
            if first and self.chat:
                # The engine sends the role in a chunk of its own, with the first token.
                opening = {"role": "assistant", "content": ""}
                start = {"index": 0, "delta": opening, "logprobs": None, "finish_reason": None}
                yield head | {"choices": [start], **self._prompt_ids()}
            choice: dict[str, Any] = {"index": 0, "logprobs": self.logprobs([piece], begins)}
            choice["finish_reason"] = self.ended(piece.finished)
            text = self.echoed() + piece.text if first else piece.text
            calls = self.call(piece.text, begins=first)
            delta = {"content": piece.text} if calls is None else {"tool_calls": calls}
            choice |= {"delta": delta} if self.chat else {"text": text}
            begins += len(piece.text)
            if piece.finished or not self.chat:
                choice["stop_reason"] = piece.stop_reason
            if not self.chat:
                choice |= self._prompt_ids() if first else {"prompt_token_ids": None}
            choice["token_ids"] = [piece.token] if self.body.return_token_ids else None
            first = False
            yield head | {"choices": [choice]}


def prompt_details(settings: Settings, request: Request, prompt: Prompt) -> dict[str, Any]:
    cached, size = request.cached_tokens or 0, settings.block_size
    return _details(cached, request.prompt_length // size * size - cached if settings.prefix_caching else 0, prompt)


def _details(cached: int, created: int, prompt: Prompt) -> dict[str, Any]:
    images = None if prompt.visual_tokens is None else {"image": prompt.visual_tokens}
    return {"cached_tokens": cached, "created_cache_tokens": created, "multimodal_tokens": images}


async def chat(engine: SimulatedEngine, http: HttpRequest) -> Response:
    """Answer ``POST /v1/chat/completions``."""
    body = parse(await http.body(), ChatRequest)
    wanted = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    return await _answer(engine, http, body, [partial(requests.from_messages, engine, body)], wanted, "chatcmpl")


async def complete(engine: SimulatedEngine, http: HttpRequest) -> Response:
    """Answer ``POST /v1/completions``."""
    body = parse(await http.body(), CompletionRequest)
    wanted = body.max_tokens if body.max_tokens is not None else COMPLETION_TOKENS
    special, texts = body.add_special_tokens, requests.texts_of(body.prompt)
    make = [partial(requests.from_text, engine, text, special=special) for text in texts]
    return await _answer(engine, http, body, make, wanted, "cmpl")


async def _answer(
    engine: SimulatedEngine,
    http: HttpRequest,
    body: Generation,
    make: Sequence[Callable[[], Prompt]],
    wanted: int | None,
    prefix: str,
) -> Response:
    check_model(engine, body.model)
    check(body)
    check_generation(body, wanted)
    if engine.draining:
        raise SHUT_DOWN
    prompts = [await render(engine, each) for each in make]
    if engine.encoder is not None and prefix == "chatcmpl":
        return await _encode(engine, engine.encoder, body, prompts[0])
    received, n = await _received(engine, body, prompts[0]), body.n or 1
    jobs = [job(engine, http, body, prompt, wanted, prefix, received) for prompt in prompts for _ in range(n)]
    jobs[0].others, jobs[0].n = jobs[1:], n
    return await jobs[0].respond(http)


def check_model(engine: SimulatedEngine, model: str | None) -> None:
    """Refuse a model that is not served. Raises :class:`RequestError` (404)."""
    if model is not None and model not in (*engine.settings.served_names, *engine.adapters):
        raise RequestError(f"The model `{model}` does not exist.", status=404, param="model")


async def _received(engine: SimulatedEngine, body: Generation, prompt: Prompt) -> int:
    """Fetch blocks and embeddings that other engines computed; return the number of received prompt tokens. Raises
    :class:`RequestError` (500) if a transfer fails and the flags do not allow to compute the blocks here.
    """
    config = engine.settings.handover
    if body.ec_transfer_params and config.ec is not None:
        await engine.handover.receive(body.ec_transfer_params, prompt.media)
    params = body.kv_transfer_params
    if config.kv is None or not params or not params.get("do_remote_prefill"):
        return 0
    try:
        return await engine.handover.take(params)
    except TransferError as error:
        if config.kv.kv_load_failure_policy == "recompute":
            return 0
        raise RequestError("Internal server error", status=500) from error


def job(
    engine: SimulatedEngine,
    http: HttpRequest,
    body: Generation,
    prompt: Prompt,
    wanted: int | None,
    prefix: str,
    received: int,
) -> VllmJob:
    """Return a generation that is ready to run. Raises :class:`RequestError` for a prompt beyond the context."""
    length, room = len(prompt.ids), engine.context
    if length == 0:
        raise RequestError("The decoder prompt cannot be empty", param="prompt")
    if length + (wanted or 1) > room:
        raise parameter_error(
            f"This model's maximum context length is {room} tokens. However, you requested {wanted or 1} output tokens "
            f"and your prompt contains at least {length} input tokens, for a total of at least "
            f"{length + (wanted or 1)} tokens. Please reduce the length of the input prompt or the number of "
            "requested output tokens.",
            "input_tokens",
            length,
        )
    try:
        runner = engine.pick(http.headers.get(RANK_HEADER))
    except ValueError as error:
        raise RequestError(str(error)) from error
    if engine.draining:
        raise SHUT_DOWN
    name = f"{prefix}-{http.headers.get(REQUEST_HEADER) or uuid.uuid4().hex}"
    request = request_of(
        engine,
        body,
        prompt,
        name,
        ids=prompt.ids[:],  # each generation's own, which grows
        max_tokens=min(wanted or room, room - length),
        report_hits=(body.vllm_xargs or {}).get("kv_cache_report_mode") == "full",
        external=received,
        lora=engine.adapters.get(body.model or ""),
        hold=engine.settings.handover.kv is not None and bool((body.kv_transfer_params or {}).get("do_remote_decode")),
    )
    return VllmJob(engine, runner, body, prompt, request, name, received=received)


async def _encode(engine: SimulatedEngine, encoder: ImageEncoder, body: Generation, prompt: Prompt) -> Response:
    """Answer a chat on an encode-only engine: no tokens, but the locations of the embeddings
    (docs/engine-facts/vllm.md#encoder-disaggregation).
    """
    await encoder.encode(prompt.media)
    length = len(prompt.ids)
    usage: dict[str, Any] = {"prompt_tokens": length, "total_tokens": length, "completion_tokens": 0}
    if engine.settings.token_details:
        usage["prompt_tokens_details"] = _details(0, 0, prompt)
    empty: dict[str, Any] = {"role": "assistant", "content": "", "refusal": None, "tool_calls": [], "reasoning": None}
    choice = {"index": 0, "message": empty, "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    return json_response(
        {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": body.model or engine.settings.served_names[0],
            "choices": [choice],
            "usage": usage,
            "kv_transfer_params": None,
            "ec_transfer_params": _places(engine, prompt) or None,
        }
    )


def _places(engine: SimulatedEngine, prompt: Prompt) -> dict[str, Any]:
    """Return each identifier's items and, without a shared folder, the address of its owner. The engine's ``metadata``
    (the grid of patches) is for readers without pixels, which are not simulated.
    """
    config = engine.settings.handover
    places: dict[str, dict[str, Any]] = {}
    for number, item in enumerate(prompt.media):
        place = places.setdefault(item.identifier, {"item_indices": [], "metadata": {}})
        place["item_indices"].append(number)
        if config.ec is not None and config.ec.folder is None:
            host, port = config.ec_address
            shape = [item.length, EMBEDDING_BYTES // 2]
            size = item.length * EMBEDDING_BYTES
            place |= {"peer_host": host, "peer_port": port, "size_bytes": size, "shape": shape}
    return places
