"""``/v1/chat/completions`` and ``/v1/completions`` in SGLang's shapes (captures of 0.5.23)."""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse

from mmrouter_sim.core.request import Request
from mmrouter_sim.engine import SimulatedEngine
from mmrouter_sim.errors import RequestError, json_response
from mmrouter_sim.rank_loop import Aborted
from mmrouter_sim.sglang import prompts
from mmrouter_sim.sglang.encoder_shares import Embedding
from mmrouter_sim.sglang.pages import padded
from mmrouter_sim.sglang.pairing import RoomAddress, place
from mmrouter_sim.sglang.schema import ChatRequest, CompletionRequest, check
from mmrouter_sim.vllm import completions
from mmrouter_sim.vllm import prompts as texts
from mmrouter_sim.vllm.completions import Job, Piece
from mmrouter_sim.vllm.connectors import TransferError
from mmrouter_sim.vllm.prompts import Prompt
from mmrouter_sim.vllm.schema import StreamOptions, parse

RANK_HEADERS = ("x-override-routed-dp-rank", "x-data-parallel-rank")
RID_HEADER = "x-override-rid"

ABORTED = RequestError("The request was aborted.", status=503, kind="ServiceUnavailableError")


async def chat(engine: SimulatedEngine, http: HttpRequest) -> Response:
    """Answer ``POST /v1/chat/completions``."""
    body = parse(await http.body(), ChatRequest)
    check(body)
    wanted = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    encoded = await _encoded(engine, body)
    prompt = await _render(engine, lambda: prompts.from_messages(engine, body, body.messages, encoded))
    job, at = _job(engine, http, body, prompt, wanted)
    return _stream(job, _chat_chunks(job, at)) if body.stream else await _whole(http, job, at, _chat_answer)


async def complete(engine: SimulatedEngine, http: HttpRequest) -> Response:
    """Answer ``POST /v1/completions``."""
    body = parse(await http.body(), CompletionRequest)
    check(body)
    prompt = await _render(engine, lambda: texts.from_text(engine, body.prompt, special=True))
    job, at = _job(engine, http, body, prompt, body.max_tokens if body.max_tokens is not None else 16)
    return _stream(job, _text_chunks(job, at)) if body.stream else await _whole(http, job, at, _text_answer)


async def _encoded(engine: SimulatedEngine, body: ChatRequest) -> list[Embedding] | None:
    """Return what encoders made of the images, ``None`` where the engine encodes them itself."""
    settings = engine.settings
    images = [prompts.image_of(part) for part in prompts.images_of(engine, body.messages)]
    if not settings.encoder_urls or not images:
        return None
    if body.return_prompt_token_ids or body.return_input_ids_in_sglext:
        # An engine beside encoders has no ids to show where it answers; the real one fails so, too.
        raise RequestError("Internal server error: 'NoneType' object is not iterable", status=500)
    return await engine.shares.embeddings(settings.host, settings.encoder_urls, images)


async def _render(engine: SimulatedEngine, make: Callable[[], Prompt]) -> Prompt:
    """Make a prompt beside the steps. The engine takes requests while it drains.

    See docs/engine-facts/sglang.md#http-endpoints.
    """
    return await asyncio.get_running_loop().run_in_executor(engine.renderer, make)


def _job(
    engine: SimulatedEngine,
    http: HttpRequest,
    body: ChatRequest | CompletionRequest,
    prompt: Prompt,
    wanted: int | None,
) -> tuple[Job, RoomAddress | None]:
    length, room = len(prompt.ids), engine.context
    if length == 0:
        raise RequestError("The prompt is empty.", param="messages")
    if length >= room:
        raise RequestError(f"The input ({length} tokens) is longer than the model's context length ({room} tokens).")
    if wanted is not None and wanted < 1:
        raise RequestError(f"max_new_tokens must be at least 1, got {wanted}.", param="max_tokens")
    if wanted is not None and length + wanted > room:
        raise RequestError(
            f"Requested token count exceeds the model's maximum context length of {room} tokens. You requested a total "
            f"of {length + wanted} tokens: {length} tokens from the input messages and {wanted} tokens for the "
            "completion."
        )
    asked = body.routed_dp_rank if body.routed_dp_rank is not None else body.data_parallel_rank
    rank_text = next((http.headers[name] for name in RANK_HEADERS if name in http.headers), None)
    pairs = engine.settings.pairs
    try:
        at = place(http.headers) if pairs is not None else None
        if at is not None and pairs is not None and pairs.mode == "prefill" and rank_text is None and asked is None:
            rank_text = str(at.room % engine.settings.ranks)
        rank, runner = engine.pick(rank_text if rank_text is not None else None if asked is None else str(asked))
    except ValueError as error:
        raise RequestError(str(error)) from error
    name = http.headers.get(RID_HEADER) or body.rid or uuid.uuid4().hex
    stop_ids = frozenset(body.stop_token_ids or ()) | (frozenset() if body.ignore_eos else set(engine.model.stop_ids))
    ids = prompt.padded if prompt.padded is not None else padded(prompt.ids, [])
    request = Request(
        id=f"{name}-{uuid.uuid4().hex[:8]}",
        ids=ids,
        sample=engine.answers.sampler(prompt.ids, prompt.media, min_tokens=body.min_tokens, ends=not body.ignore_eos),
        max_tokens=1 if pairs is not None and pairs.mode == "prefill" else min(wanted or room, room - length),
        media=prompt.media,
        salt=body.cache_salt,
        stop_ids=stop_ids,
    )
    # The engine serves any model name and repeats it.
    model = body.model or engine.settings.served_names[0]
    return Job(engine, rank, runner, body, prompt, request, name, int(time.time()), model), at


async def _pieces(job: Job, at: RoomAddress | None) -> AsyncIterator[Piece]:
    """Run a job, or this engine's half of it. Raises :class:`RequestError` where the other half fails."""
    pairing = job.engine.pairing
    if pairing is None:
        async for piece in completions.pieces(job):
            yield piece
        return
    if at is None:
        raise RequestError(
            f"Invalid request: Disaggregated request received without bootstrap room id. req.rid={job.id!r}"
        )
    try:
        if pairing.config.mode == "decode":
            job.request.external, job.cached = await pairing.take(at)
            async for piece in completions.pieces(job):
                yield piece
            return
        ranks = job.engine.settings.ranks
        if at.room % ranks != job.rank:
            raise TransferError(
                f"follow_bootstrap_room conflict: dispatched to dp_rank {job.rank} but bootstrap_room {at.room} "
                f"implies dp_rank {at.room % ranks}"
            )
        job.request.hold = True
        try:
            async with pairing.prefilling(at.room) as reader:
                done = await completions.collect(job)
                await reader.give(job.request.prompt_length, job.request.cached_tokens or 0)
        finally:
            if job.request.id in job.runner.scheduler.held:
                job.runner.scheduler.give(job.request.id)
    except TransferError as error:
        raise RequestError(str(error), status=500) from error
    for piece in done:
        yield piece


def _usage(job: Job) -> dict[str, Any]:
    prompt, answer = job.request.prompt_length, job.request.answer_length
    details: dict[str, Any] | None = None
    if job.engine.settings.token_details:
        visual = job.prompt.visual_tokens
        cached = job.cached if job.cached is not None else job.request.cached_tokens
        details = {"cached_tokens": cached or 0} | ({} if visual is None else {"image_tokens": visual})
    return {
        "prompt_tokens": prompt,
        "total_tokens": prompt + answer,
        "completion_tokens": answer,
        "prompt_tokens_details": details,
        "reasoning_tokens": 0,
        "completion_tokens_details": None,
    }


async def _whole(
    http: HttpRequest, job: Job, at: RoomAddress | None, make: Callable[[Job, list[Piece]], dict[str, Any]]
) -> Response:
    work = asyncio.create_task(_collect(job, at))
    gone = asyncio.create_task(completions.disconnected(http))
    try:
        await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        return json_response(make(job, await work)) if work.done() else Response(status_code=499)
    except Aborted as error:
        raise ABORTED from error
    finally:
        work.cancel()
        gone.cancel()
        await asyncio.gather(work, gone, return_exceptions=True)


async def _collect(job: Job, at: RoomAddress | None) -> list[Piece]:
    return [piece async for piece in _pieces(job, at)]


def _chat_answer(job: Job, pieces: list[Piece]) -> dict[str, Any]:
    body = job.body
    assert isinstance(body, ChatRequest)
    message = {"role": "assistant", "content": _text(pieces), "reasoning_content": None}
    choice = {"index": 0, "message": message, "logprobs": None, **_ending(pieces[-1])}
    if body.return_prompt_token_ids:
        choice["prompt_token_ids"] = job.prompt.ids.tolist()
    answer = job.head("chat.completion") | {"choices": [choice], "usage": _usage(job), "metadata": _METADATA}
    return answer | ({"sglext": {"input_ids": job.prompt.ids.tolist()}} if body.return_input_ids_in_sglext else {})


def _text_answer(job: Job, pieces: list[Piece]) -> dict[str, Any]:
    choice = {"index": 0, "text": _text(pieces), "logprobs": None, **_ending(pieces[-1])}
    return job.head("text_completion") | {"choices": [choice], "usage": _usage(job), "metadata": _METADATA}


_METADATA = {"weight_version": "default"}


def _text(pieces: list[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


def _ending(piece: Piece) -> dict[str, Any]:
    matched = piece.stop_reason
    if piece.finished == "stop" and matched is None:
        matched = piece.token
    return {"finish_reason": piece.finished, "matched_stop": matched}


def _stream(job: Job, chunks: AsyncIterator[dict[str, Any]]) -> Response:
    return StreamingResponse(_frames(job, chunks), media_type="text/event-stream")


async def _frames(job: Job, chunks: AsyncIterator[dict[str, Any]]) -> AsyncIterator[bytes]:
    options = job.body.stream_options or StreamOptions()
    kind = "chat.completion.chunk" if isinstance(job.body, ChatRequest) else "text_completion"
    try:
        async for chunk in chunks:
            yield _frame(chunk | {"usage": _usage(job) if options.continuous_usage_stats else None})
        if options.include_usage:
            yield _frame(job.head(kind) | {"choices": [], "usage": _usage(job)})
    except Aborted:
        yield _frame({"error": ABORTED.body()["error"]})
    except RequestError as error:  # the answer has begun, so its status stays 200
        yield _frame({"error": {"object": "error"} | error.body()["error"]})
    yield b"data: [DONE]\n\n"


def _frame(value: object) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


async def _chat_chunks(job: Job, at: RoomAddress | None) -> AsyncIterator[dict[str, Any]]:
    body, head = job.body, job.head("chat.completion.chunk")
    assert isinstance(body, ChatRequest)
    last: Piece | None = None
    async for piece in _pieces(job, at):
        if last is None:
            yield head | _delta({"role": "assistant", "content": ""})
        last = piece
        if piece.text:
            yield head | _delta({"role": None, "content": piece.text})
    assert last is not None, "an answer has at least one token"
    end = head | _delta({"role": None, "content": None}, **_ending(last))
    yield end | ({"sglext": {"input_ids": job.prompt.ids.tolist()}} if body.return_input_ids_in_sglext else {})


def _delta(delta: dict[str, Any], **ending: Any) -> dict[str, Any]:
    over = {"finish_reason": None, "matched_stop": None} | ending
    return {"choices": [{"index": 0, "delta": delta | {"reasoning_content": None}, "logprobs": None, **over}]}


async def _text_chunks(job: Job, at: RoomAddress | None) -> AsyncIterator[dict[str, Any]]:
    head = job.head("text_completion")
    async for piece in _pieces(job, at):
        yield head | {"choices": [{"index": 0, "text": piece.text, "logprobs": None, **_ending(piece)}]}
