"""``/v1/responses``: texts and images in, one message out; stored, continued, retrieved and cancelled as vLLM does it.

Responses are stored with ``VLLM_ENABLE_RESPONSES_API_STORE`` only, in memory, under the ``request_id`` of the request.
"""

import asyncio
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse

from mmrouter_sim.constraints.constrained_text import response_format_of
from mmrouter_sim.engine import SimulatedEngine
from mmrouter_sim.errors import RequestError, json_response, parameter_error, validation_error
from mmrouter_sim.generation import Piece, render
from mmrouter_sim.response_events import numbered_events, response_usage
from mmrouter_sim.vllm import completions, requests
from mmrouter_sim.vllm.completions import VllmJob
from mmrouter_sim.vllm.requests import ChatRequest, Generation, check, check_generation, parse

Object = dict[str, Any]
_EVENTS = "text/event-stream"
_RUNNING = ("queued", "in_progress")


class ResponsesRequest(Generation, kw_only=True):
    input: str | list[Object]
    instructions: str | None = None
    max_output_tokens: int | None = None
    previous_response_id: str | None = None
    store: bool | None = True
    background: bool | None = False
    text: Object | None = None
    request_id: str = msgspec.field(default_factory=lambda: f"resp_{uuid.uuid4().hex}")


@dataclass
class StoredResponse:
    """A response and what a next one needs of it. ``events``: of a stream in the background, ``None`` of any other."""

    response: Object
    messages: list[Object]
    events: list[bytes] | None = None
    more: asyncio.Event = field(default_factory=asyncio.Event)
    task: "asyncio.Task[None] | None" = None


@dataclass
class ResponseJob(VllmJob):
    asked: ResponsesRequest = field(kw_only=True)
    messages: list[Object] = field(kw_only=True)  # of the prompt, stored with the response

    def answer(self, pieces: list[Piece]) -> Object:
        """Return the response, and store it."""
        cut = pieces[-1].finished == "length"
        status = "incomplete" if cut else "completed"
        details = {"reason": "max_output_tokens"} if cut else None
        text = "".join(piece.text for piece in pieces)
        response = {**self.begun(status), "incomplete_details": details, "output": [self._message(text)]}
        response["usage"] = response_usage(self.usage())
        responses = self.engine.responses
        if self.asked.store and (kept := responses.get(self.id)) is None:
            responses[self.id] = StoredResponse(response, self.messages)
        elif self.asked.store and kept is not None and kept.response["status"] != "cancelled":
            kept.response = response
        return response

    def begun(self, status: str) -> Object:
        """Return the response before its first token."""
        asked = self.asked
        head = {"id": self.id, "object": "response", "created_at": self.created, "status": status}
        repeated = {name: getattr(asked, name) for name in ("instructions", "previous_response_id", "background")}
        neutral: Object = dict.fromkeys(
            ("error", "incomplete_details", "metadata", "usage", "reasoning", "text", "user")
        )
        model = asked.model or self.engine.settings.served_names[0]
        return {**neutral, **head, **repeated, "model": model, "output": [], "tools": [], "tool_choice": "auto"}

    async def in_background(self) -> None:
        """Run a response that is stored as queued."""
        kept = self.engine.responses[self.id]
        if kept.events is None:
            self.answer(await self._collect())
            return
        try:
            async for event in self._frames():
                kept.events.append(event)
                kept.more.set()
        finally:
            kept.more.set()

    async def _frames(self) -> AsyncIterator[bytes]:
        event = numbered_events()

        begun = self.begun("in_progress")
        yield event("response.created", response=begun)
        yield event("response.in_progress", response=begun)
        message, pieces = self._message(""), list[Piece]()
        at: Object = {"item_id": message["id"], "output_index": 0, "content_index": 0}
        item = {**message, "status": "in_progress", "content": []}
        yield event("response.output_item.added", output_index=0, item=item)
        yield event("response.content_part.added", **at, part=message["content"][0])
        async for piece in self.pieces():
            pieces.append(piece)
            yield event("response.output_text.delta", **at, delta=piece.text, logprobs=[])
        response = self.answer(pieces)
        done = response["output"][0]
        yield event("response.output_text.done", **at, text=done["content"][0]["text"], logprobs=[])
        yield event("response.content_part.done", **at, part=done["content"][0])
        yield event("response.output_item.done", output_index=0, item=done)
        yield event("response.completed", response=response)

    def _message(self, text: str) -> Object:
        part: Object = {"type": "output_text", "text": text, "annotations": [], "logprobs": None}
        name = f"msg_{self.request.id}"
        return {"id": name, "type": "message", "role": "assistant", "status": "completed", "content": [part]}


async def create(engine: SimulatedEngine, http: HttpRequest) -> Response:
    """Answer ``POST /v1/responses``."""
    asked = parse(await http.body(), ResponsesRequest)
    completions.check_model(engine, asked.model)
    check(asked)
    check_generation(asked, asked.max_output_tokens)
    if asked.tools:
        raise parameter_error("tools of responses are not simulated.", "tools")
    _check_store(engine, asked)
    messages = _messages(engine, asked)
    fields = {name: getattr(asked, name) for name in Generation.__struct_fields__}
    fields["response_format"] = response_format_of(asked.text)
    body = ChatRequest(**fields, messages=messages, add_special_tokens=True)
    if engine.draining:
        raise completions.SHUT_DOWN
    prompt = await render(engine, partial(requests.from_messages, engine, body))
    made = completions.job(engine, http, body, prompt, asked.max_output_tokens, "resp", 0)
    shared = made.engine, made.runner, body, prompt, made.request, asked.request_id
    job = ResponseJob(*shared, asked=asked, messages=messages)
    if not asked.background:
        return await job.respond(http)
    kept = StoredResponse(job.begun("queued"), messages, [] if asked.stream else None)
    engine.responses[job.id] = kept
    kept.task = asyncio.create_task(job.in_background())
    return (
        StreamingResponse(_events(job.id, kept), media_type=_EVENTS) if asked.stream else json_response(kept.response)
    )


async def retrieve(engine: SimulatedEngine, http: HttpRequest) -> Response:
    """Answer ``GET /v1/responses/ID``."""
    name = http.path_params["response_id"]
    kept = _stored(engine, name)
    if http.query_params.get("stream", "false").lower() not in ("true", "1"):
        return json_response(kept.response)
    after = int(http.query_params.get("starting_after", "-1"))
    return StreamingResponse(_events(name, kept, after + 1), media_type=_EVENTS)


async def cancel(engine: SimulatedEngine, http: HttpRequest) -> Response:
    """Answer ``POST /v1/responses/ID/cancel``."""
    kept = _stored(engine, http.path_params["response_id"])
    if kept.response["status"] not in _RUNNING:
        why = "Cannot cancel a synchronous response."
        raise RequestError(why, kind="invalid_request_error", param="response_id")
    kept.response["status"] = "cancelled"
    if kept.task is not None:
        kept.task.cancel()
        await asyncio.gather(kept.task, return_exceptions=True)
    return json_response(kept.response)


async def _events(name: str, kept: StoredResponse, number: int = 0) -> AsyncIterator[bytes]:
    """Yield the events of a stream in the background. The engine's answer of any other response breaks off."""
    if kept.events is None:
        raise parameter_error(f"Unknown response_id: {name}", "response_id", name)
    while True:
        kept.more.clear()
        while number < len(kept.events):
            event = kept.events[number]
            yield event
            if event.startswith(b"event: response.completed\n"):
                return
            number += 1
        await kept.more.wait()


def _stored(engine: SimulatedEngine, name: str) -> StoredResponse:
    kept = engine.responses.get(name)
    if kept is None:
        why = f"Response with id '{name}' not found."
        raise RequestError(why, status=404, kind="invalid_request_error", param="response_id")
    return kept


def _check_store(engine: SimulatedEngine, asked: ResponsesRequest) -> None:
    if asked.background and not asked.store:
        raise validation_error("background can only be used when `store` is true")
    if asked.background and not engine.settings.stores_responses:
        why = "This vLLM engine does not support `store=True` and therefore does not support the background mode."
        raise RequestError(why, kind="invalid_request_error", param="background")
    if not engine.settings.stores_responses:
        asked.store = False


def _messages(engine: SimulatedEngine, asked: ResponsesRequest) -> list[Object]:
    """Return the chat whose prompt is computed: instructions, what is stored, the new input."""
    messages: list[Object] = [{"role": "system", "content": asked.instructions}] if asked.instructions else []
    if asked.previous_response_id is not None:
        kept = _stored(engine, asked.previous_response_id)
        messages += [message for message in kept.messages if message["role"] != "system"]
        texts = [part["text"] for item in kept.response["output"] for part in item["content"]]
        messages += [{"role": "assistant", "content": text} for text in texts]
    if isinstance(asked.input, str):
        return [*messages, {"role": "user", "content": asked.input}]
    return [*messages, *map(_message, asked.input)]


def _message(item: Object) -> Object:
    if item.get("type", "message") != "message" or "role" not in item:
        raise validation_error(f"Unsupported input item type: {item.get('type')}")
    content = item.get("content")
    if not isinstance(content, list):
        return {"role": item["role"], "content": content}
    if item["role"] == "assistant":
        return {"role": "assistant", "content": content[0]["text"] if content else ""}
    return {"role": item["role"], "content": [_part(part) for part in content]}


def _part(part: Object) -> Object:
    if part.get("type") == "input_image":
        return {"type": "image_url", "image_url": {"url": part.get("image_url")}}
    return {"type": "text", "text": part.get("text", "")}
