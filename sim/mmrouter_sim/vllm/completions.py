"""``/v1/chat/completions`` and ``/v1/completions``: prompt in, tokens out, whole or as server-sent events."""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse
from tokenizers.decoders import DecodeStream

from mmrouter_sim.core.request import Request
from mmrouter_sim.engine import SimulatedEngine
from mmrouter_sim.errors import RequestError, error_response, json_response, parameter_error
from mmrouter_sim.rank_loop import Aborted, Runner
from mmrouter_sim.settings import Settings
from mmrouter_sim.vllm import encode, prompts
from mmrouter_sim.vllm.connectors import TransferError
from mmrouter_sim.vllm.prompts import Prompt
from mmrouter_sim.vllm.schema import (
    ChatRequest,
    CompletionRequest,
    Generation,
    StreamOptions,
    check,
    check_generation,
    parse,
)

RANK_HEADER = "x-data-parallel-rank"
REQUEST_HEADER = "x-request-id"

SHUT_DOWN = RequestError("cannot schedule new futures after shutdown", status=500)
"""Error message for a request that arrives or runs when the engine goes down.

See docs/engine-facts/vllm.md#drain.
"""


@dataclass(slots=True)
class Piece:
    """One token of an answer: the text that it completes, and its finish reason if it is the last one."""

    token: int
    text: str
    finished: str | None
    stop_reason: int | str | None


@dataclass(slots=True)
class Job:
    """One generation, ready to run."""

    engine: SimulatedEngine
    rank: int
    runner: Runner
    body: Generation
    prompt: Prompt
    request: Request
    id: str
    created: int
    model: str
    received: int = 0  # prompt tokens received from another engine
    cached: int | None = None  # of these, tokens from that engine's cache, if reported

    def usage(self) -> dict[str, Any]:
        """Return the usage so far, in the engine's order of keys."""
        prompt, answer = self.request.prompt_length, self.request.answer_length
        return {
            "prompt_tokens": prompt,
            "total_tokens": prompt + answer,
            "completion_tokens": answer,
            "prompt_tokens_details": self._details(),
            "completion_tokens_details": None,
        }

    def _details(self) -> dict[str, Any] | None:
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

    def transfer_params(self) -> dict[str, Any] | None:
        """Return the parameters for the engine that continues this request."""
        return self.engine.handover.offer(self.runner.scheduler, self.request)

    def head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


def prompt_details(settings: Settings, request: Request, prompt: Prompt) -> dict[str, Any]:
    """Return ``usage.prompt_tokens_details`` of a request that was admitted."""
    cached, size, visual = request.cached_tokens or 0, settings.block_size, prompt.visual_tokens
    return {
        "cached_tokens": cached,
        "created_cache_tokens": request.prompt_length // size * size - cached if settings.prefix_caching else 0,
        "multimodal_tokens": None if visual is None else {"image": visual},
    }


async def chat(engine: SimulatedEngine, http: HttpRequest) -> Response:
    """Answer ``POST /v1/chat/completions``."""
    body = parse(await http.body(), ChatRequest)
    check_model(engine, body.model)
    check(body)
    wanted = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    check_generation(body, wanted)
    prompt = await _render(
        engine, lambda: prompts.from_messages(engine, body, body.messages, special=body.add_special_tokens)
    )
    if engine.encoder is not None:
        return await encode.answer(engine, engine.encoder, body, prompt)
    received = await _received(engine, body, prompt)
    job = _job(engine, http, body, prompt, wanted, "chatcmpl", received)
    if body.stream:
        return _stream(job, _chat_chunks(job))
    return await _whole(http, job, _chat_answer)


async def complete(engine: SimulatedEngine, http: HttpRequest) -> Response:
    """Answer ``POST /v1/completions``."""
    body = parse(await http.body(), CompletionRequest)
    check_model(engine, body.model)
    check(body)
    # The engine's default for this endpoint, unlike for chats.
    wanted = body.max_tokens if body.max_tokens is not None else 16
    check_generation(body, wanted)
    prompt = await _render(engine, lambda: prompts.from_text(engine, body.prompt, special=body.add_special_tokens))
    received = await _received(engine, body, prompt)
    job = _job(engine, http, body, prompt, wanted, "cmpl", received)
    if body.stream:
        return _stream(job, _text_chunks(job))
    return await _whole(http, job, _text_answer)


def check_model(engine: SimulatedEngine, model: str | None) -> None:
    """Refuse a model that is not served. Raises :class:`RequestError` (404)."""
    if model is not None and model not in engine.settings.served_names:
        raise RequestError(f"The model `{model}` does not exist.", status=404, param="model")


async def _render(engine: SimulatedEngine, make: Callable[[], Prompt]) -> Prompt:
    if engine.draining:
        raise SHUT_DOWN
    return await asyncio.get_running_loop().run_in_executor(engine.renderer, make)


async def _received(engine: SimulatedEngine, body: Generation, prompt: Prompt) -> int:
    """Fetch blocks and embeddings that other engines computed; return the number of received prompt tokens.

    Raises :class:`RequestError` (500) if a transfer fails and the flags do not allow to compute the blocks here.
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


def _job(
    engine: SimulatedEngine,
    http: HttpRequest,
    body: Generation,
    prompt: Prompt,
    wanted: int | None,
    prefix: str,
    received: int,
) -> Job:
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
        rank, runner = engine.pick(http.headers.get(RANK_HEADER))
    except ValueError as error:
        raise RequestError(str(error)) from error
    if engine.draining:
        raise SHUT_DOWN
    name = f"{prefix}-{http.headers.get(REQUEST_HEADER) or uuid.uuid4().hex}"
    stop_ids = frozenset(body.stop_token_ids or ()) | (frozenset() if body.ignore_eos else set(engine.model.stop_ids))
    request = Request(
        # Clients may reuse a request id; ids inside the engine are unique.
        id=f"{name}-{uuid.uuid4().hex[:8]}",
        ids=prompt.ids,
        sample=engine.answers.sampler(prompt.ids, prompt.media, min_tokens=body.min_tokens, ends=not body.ignore_eos),
        max_tokens=min(wanted or room, room - length),
        media=prompt.media,
        salt=body.cache_salt,
        stop_ids=stop_ids,
        report_hits=(body.vllm_xargs or {}).get("kv_cache_report_mode") == "full",
        external=received,
        hold=engine.settings.handover.kv is not None and bool((body.kv_transfer_params or {}).get("do_remote_decode")),
    )
    model = body.model or engine.settings.served_names[0]
    return Job(engine, rank, runner, body, prompt, request, name, int(time.time()), model, received)


async def pieces(job: Job) -> AsyncIterator[Piece]:
    """Run a job and yield its tokens with their text, cut at a stop string."""
    loop = asyncio.get_running_loop()
    decoder = DecodeStream(skip_special_tokens=True)
    hold = max((len(stop) - 1 for stop in job.body.stops), default=0)  # characters that may begin a stop string
    text_so_far, given, last = "", 0, None
    async with aclosing(job.runner.generate(job.request)) as outputs:
        async for output in outputs:
            now = loop.time()
            job.engine.metrics.token(job.rank, job.request, now, last)
            last, token, finished = now, output.token, output.finished
            reason: int | str | None = None
            if finished == "stop":
                reason = None if token in job.engine.model.stop_ids else token
            else:
                before = len(text_so_far)
                text_so_far += decoder.step(job.engine.model.tokenizer, token) or ""
                cut = _find_stop(text_so_far, before, job.body.stops)
                if cut is not None:
                    (at, reason), finished = cut, "stop"
                    text_so_far = text_so_far[:at]
                    job.runner.scheduler.abort(job.request, "stop")
            end = len(text_so_far) if finished is not None else max(given, len(text_so_far) - hold)
            yield Piece(token, text_so_far[given:end], finished, reason)
            given = end
            if finished is not None:
                break
    job.engine.metrics.ended(job.rank, job.request, loop.time())


def _find_stop(text: str, before: int, stops: tuple[str, ...]) -> tuple[int, str] | None:
    """Return the position of the first stop string that ends after ``before``, and that string."""
    positions = ((text.find(stop, max(0, before - len(stop) + 1)), stop) for stop in stops)
    return min(((at, stop) for at, stop in positions if at >= 0), default=None)


async def _whole(http: HttpRequest, job: Job, make: Callable[[Job, list[Piece]], dict[str, Any]]) -> Response:
    """Wait for the whole answer; a disconnect of the client aborts the request."""
    work = asyncio.create_task(collect(job))
    gone = asyncio.create_task(disconnected(http))
    try:
        await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            return Response(status_code=499)
        return json_response(make(job, await work))
    except Aborted:
        return error_response(SHUT_DOWN)
    finally:
        work.cancel()
        gone.cancel()
        await asyncio.gather(work, gone, return_exceptions=True)


async def collect(job: Job) -> list[Piece]:
    """Run a job to its end."""
    return [piece async for piece in pieces(job)]


async def disconnected(http: HttpRequest) -> None:
    """Return when the client has disconnected."""
    while (await http.receive())["type"] != "http.disconnect":
        pass


def _chat_answer(job: Job, pieces: list[Piece]) -> dict[str, Any]:
    message: dict[str, Any] = {
        "role": "assistant",
        "content": "".join(piece.text for piece in pieces),
        "refusal": None,
        "annotations": None,
        "audio": None,
        "function_call": None,
        "tool_calls": [],
        "reasoning": None,
    }
    return job.head("chat.completion") | {
        "choices": [{"index": 0, "message": message, "logprobs": None, **_ending(job, pieces)}],
        "service_tier": None,
        "system_fingerprint": None,
        "usage": job.usage(),
        "prompt_logprobs": None,
        "prompt_token_ids": _prompt_ids(job),
        "kv_transfer_params": job.transfer_params(),
    }


def _text_answer(job: Job, pieces: list[Piece]) -> dict[str, Any]:
    choice = {
        "index": 0,
        "text": "".join(piece.text for piece in pieces),
        "logprobs": None,
        **_ending(job, pieces),
        "prompt_logprobs": None,
        "prompt_token_ids": _prompt_ids(job),
    }
    return job.head("text_completion") | {
        "choices": [choice],
        "service_tier": None,
        "system_fingerprint": None,
        "usage": job.usage(),
        "kv_transfer_params": job.transfer_params(),
    }


def _ending(job: Job, pieces: list[Piece]) -> dict[str, Any]:
    return {
        "finish_reason": pieces[-1].finished,
        "stop_reason": pieces[-1].stop_reason,
        "token_ids": [piece.token for piece in pieces] if job.body.return_token_ids else None,
    }


def _prompt_ids(job: Job) -> list[int] | None:
    return job.request.ids[: job.request.prompt_length].tolist() if job.body.return_token_ids else None


def _stream(job: Job, chunks: AsyncIterator[dict[str, Any]]) -> Response:
    return StreamingResponse(_frames(job, chunks), media_type="text/event-stream")


async def _frames(job: Job, chunks: AsyncIterator[dict[str, Any]]) -> AsyncIterator[bytes]:
    options = job.body.stream_options or StreamOptions()
    try:
        async for chunk in chunks:
            if options.include_usage or options.continuous_usage_stats:
                chunk["usage"] = job.usage() if options.continuous_usage_stats else None
            yield _frame(chunk)
        if options.include_usage:
            kind = "chat.completion.chunk" if isinstance(job.body, ChatRequest) else "text_completion"
            yield _frame(job.head(kind) | {"choices": [], "usage": job.usage()})
        yield b"data: [DONE]\n\n"
    except Aborted:
        yield _frame(SHUT_DOWN.body())
        yield b"data: [DONE]\n\n"


def _frame(value: object) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


async def _chat_chunks(job: Job) -> AsyncIterator[dict[str, Any]]:
    head = job.head("chat.completion.chunk")
    first = True
    async for piece in pieces(job):
        if first:
            # The engine sends the role in a chunk of its own, with the first token.
            start = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
            yield head | {"choices": [start], "prompt_token_ids": _prompt_ids(job)}
            first = False
        choice = {
            "index": 0,
            "delta": {"content": piece.text},
            "logprobs": None,
            "finish_reason": piece.finished,
            "token_ids": [piece.token] if job.body.return_token_ids else None,
        }
        yield head | {"choices": [choice | ({"stop_reason": piece.stop_reason} if piece.finished else {})]}


async def _text_chunks(job: Job) -> AsyncIterator[dict[str, Any]]:
    head = job.head("text_completion")
    first = True
    async for piece in pieces(job):
        choice = {
            "index": 0,
            "text": piece.text,
            "logprobs": None,
            "finish_reason": piece.finished,
            "stop_reason": piece.stop_reason,
            "prompt_token_ids": _prompt_ids(job) if first else None,
            "token_ids": [piece.token] if job.body.return_token_ids else None,
        }
        first = False
        yield head | {"choices": [choice]}
