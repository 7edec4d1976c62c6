"""``/v1/chat/completions`` and ``/v1/completions`` in SGLang's shapes (captures of 0.5.23)."""

import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from mmrouter_sim.core.requests import Adapter
from mmrouter_sim.encoders import Embedding
from mmrouter_sim.engine import SimulatedEngine
from mmrouter_sim.errors import RequestError
from mmrouter_sim.generation import Job, Piece, render, request_of
from mmrouter_sim.sglang import requests
from mmrouter_sim.sglang.pages import padded
from mmrouter_sim.sglang.pairing import RANK_HEADER, RoomAddress, place
from mmrouter_sim.sglang.requests import ChatRequest, CompletionRequest, WithoutOverrides, check
from mmrouter_sim.vllm import requests as texts
from mmrouter_sim.vllm.requests import Generation, Prompt, parse
from mmrouter_sim.vllm.transfers import TransferError

RANK_HEADERS = (RANK_HEADER, "x-data-parallel-rank")
RID_HEADER = "x-override-rid"


@dataclass
class SglangJob(Job):
    """A generation of SGLang. ``at``: the room in which a prefill or decode engine meets its peer."""

    aborted = RequestError("The request was aborted.", status=503, kind="ServiceUnavailableError")
    shows_usage = True
    names_calls = True
    at: RoomAddress | None = None
    cached: int | None = None  # prompt tokens in the prefill engine's cache

    def details(self) -> dict[str, Any] | None:
        if not self.engine.settings.token_details:
            return None
        visual = self.prompt.visual_tokens
        cached = self.cached if self.cached is not None else self.request.cached_tokens
        return {"cached_tokens": cached or 0} | ({} if visual is None else {"image_tokens": visual})

    def all_details(self, prompts: Sequence[Job]) -> dict[str, Any] | None:
        details = [job.details() for job in prompts]
        return details[0] and {**details[0], "cached_tokens": sum(each["cached_tokens"] for each in details if each)}

    def usage(self) -> dict[str, Any]:
        return super().usage() | {"reasoning_tokens": 0}

    def answer(self, pieces: list[Piece]) -> dict[str, Any]:
        body, text = self.body, "".join(piece.text for piece in pieces)
        choice: dict[str, Any] = {"index": 0, "logprobs": self.logprobs(pieces), **_ending(pieces[-1])}
        choice["finish_reason"] = self.ended(choice["finish_reason"])
        if isinstance(body, ChatRequest):
            kind = "chat.completion"
            calls = self.call(text)
            content = text if calls is None else None
            choice["message"] = {
                "role": "assistant",
                "content": content,
                "reasoning_content": None,
                "tool_calls": calls,
            }
            if body.return_prompt_token_ids:
                choice["prompt_token_ids"] = self.prompt.ids.tolist()
        else:
            kind, choice["text"] = "text_completion", self.echoed() + text
        metadata = {"weight_version": "default"}
        return self.head(kind) | {"choices": [choice], "usage": self.usage(), "metadata": metadata}

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        if not self.chat:
            head = self.head("text_completion")
            begins, before = 0, self.echoed()
            async for piece in self.pieces():
                choice = {"index": 0, "text": before + piece.text, "logprobs": self.logprobs([piece], begins)}
                yield head | {"choices": [choice | _ending(piece)]}
                begins, before = begins + len(piece.text), ""
            return
        head, last = self.head("chat.completion.chunk"), None
        async for piece in self.pieces():
            calls = self.call(piece.text, begins=last is None)
            if last is None:
                yield head | _delta({"role": "assistant", "content": ""})
            last = piece
            if piece.text or self.body.logprobs:
                probabilities = {"logprobs": self.logprobs([piece])} if self.body.logprobs else {}
                content = {"content": piece.text} if calls is None else {"content": None, "tool_calls": calls}
                yield head | _delta({"role": None, **content}, **probabilities)
        assert last is not None, "an answer has at least one token"
        ending = _ending(last)
        yield head | _delta(
            {"role": None, "content": None}, **ending | {"finish_reason": self.ended(ending["finish_reason"])}
        )

    async def pieces(self) -> AsyncIterator[Piece]:
        """Run, or only this engine's half of it. Raises :class:`RequestError` where the other half fails."""
        pairing, at = self.engine.pairing, self.at
        if pairing is None:
            async for piece in super().pieces():
                yield piece
            return
        if at is None:
            raise RequestError(
                f"Invalid request: Disaggregated request received without bootstrap room id. req.rid={self.id!r}"
            )
        try:
            if pairing.config.mode == "decode":
                self.request.external, self.cached = await pairing.take(at)
                async for piece in super().pieces():
                    yield piece
                return
            rank, implied = self.engine.runners.index(self.runner), at.room % self.engine.settings.ranks
            if rank != implied:
                raise TransferError(
                    f"follow_bootstrap_room conflict: dispatched to dp_rank {rank} but bootstrap_room {at.room} "
                    f"implies dp_rank {implied}"
                )
            self.request.hold = True
            try:
                async with pairing.prefilling(at.room) as reader:
                    done = [piece async for piece in super().pieces()]
                    await reader.give(self.request.prompt_length, self.request.cached_tokens or 0)
            finally:
                if self.request.id in self.runner.scheduler.held:
                    self.runner.scheduler.give(self.request.id)
        except TransferError as error:
            raise RequestError(str(error), status=500) from error
        for piece in done:
            yield piece


def _ending(piece: Piece) -> dict[str, Any]:
    matched = piece.token if piece.finished == "stop" and piece.stop_reason is None else piece.stop_reason
    return {"finish_reason": piece.finished, "matched_stop": matched}


def _delta(delta: dict[str, Any], **ending: Any) -> dict[str, Any]:
    over = {"finish_reason": None, "matched_stop": None} | ending
    return {"choices": [{"index": 0, "delta": delta | {"reasoning_content": None}, "logprobs": None, **over}]}


async def chat(engine: SimulatedEngine, http: HttpRequest) -> Response:
    """Answer ``POST /v1/chat/completions``."""
    body = parse(await http.body(), ChatRequest)
    check(body)
    wanted = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    encoded = await encoded_images(engine, body)
    prompt = await render(engine, lambda: requests.from_messages(engine, body, encoded))
    return await _respond(engine, http, body, [prompt], wanted)


async def complete(engine: SimulatedEngine, http: HttpRequest) -> Response:
    """Answer ``POST /v1/completions``."""
    body = parse(await http.body(), CompletionRequest)
    check(body)
    make = [partial(texts.from_text, engine, text, special=True) for text in texts.texts_of(body.prompt)]
    prompts = [await render(engine, each) for each in make]
    wanted = body.max_tokens if body.max_tokens is not None else 16
    return await _respond(engine, http, body, prompts, wanted)


async def _respond(
    engine: SimulatedEngine,
    http: HttpRequest,
    body: ChatRequest | CompletionRequest,
    prompts: Sequence[Prompt],
    wanted: int | None,
) -> Response:
    n = body.n or 1
    if engine.settings.pairs is not None and n * len(prompts) > 1:
        raise RequestError("Several answers of a pair are not simulated.", param="n")
    lora = requests.adapter_of(engine, body)
    jobs = [job_of(engine, http, body, prompt, wanted, lora) for prompt in prompts for _ in range(n)]
    jobs[0].others, jobs[0].n = jobs[1:], n
    return await jobs[0].respond(http)


async def encoded_images(engine: SimulatedEngine, body: ChatRequest) -> list[Embedding] | None:
    """Return what encoders made of the images, ``None`` where the engine encodes them itself."""
    settings = engine.settings
    images = [requests.image_of(part) for part in requests.images_of(engine, body.messages)]
    if not settings.encoder_urls or not images:
        return None
    if body.return_prompt_token_ids:
        # An engine beside encoders has no ids to show where it answers; the real one fails so, too.
        raise RequestError("Internal server error: 'NoneType' object is not iterable", status=500)
    return await engine.shares.embeddings(settings.host, settings.encoder_urls, images)


def job_of(
    engine: SimulatedEngine,
    http: HttpRequest,
    body: Generation,
    prompt: Prompt,
    wanted: int | None,
    lora: Adapter | None = None,
) -> SglangJob:
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
    headers = dict(http.headers)
    if isinstance(body, WithoutOverrides):
        headers = {name: value for name, value in headers.items() if not name.startswith("x-override-")}
        headers |= body.overrides
    rank_text = next((headers[name] for name in RANK_HEADERS if name in headers), None)
    pairs = engine.settings.pairs
    try:
        at = place(headers) if pairs is not None else None
        if at is not None and pairs is not None and pairs.mode == "prefill" and rank_text is None:
            rank_text = str(at.room % engine.settings.ranks)
        runner = engine.pick(rank_text)
    except ValueError as error:
        raise RequestError(str(error)) from error
    name = headers.get(RID_HEADER) or uuid.uuid4().hex
    ids = prompt.padded[:] if prompt.padded is not None else padded(prompt.ids, [])
    prefills = pairs is not None and pairs.mode == "prefill"
    most = 1 if prefills else min(wanted or room, room - length)
    request = request_of(engine, body, prompt, name, ids=ids, max_tokens=most, lora=lora)
    # The engine serves any model name and repeats it.
    return SglangJob(engine, runner, body, prompt, request, name, at=at)
