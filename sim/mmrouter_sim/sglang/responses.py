"""``/v1/responses`` of SGLang 0.5.23: the chat that the engine makes of a request, answered.

With ``--enable-response-store`` responses are stored, continued, retrieved and cancelled.
"""

import asyncio
import dataclasses
import uuid
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from mmrouter_lib.engines.base.response_chat import UnmodelledFieldError
from mmrouter_lib.engines.prompters import response_chat
from mmrouter_sim.constraints.constrained_text import response_format_of
from mmrouter_sim.engine import SimulatedEngine
from mmrouter_sim.errors import RequestError, json_response
from mmrouter_sim.generation import Piece, render
from mmrouter_sim.rank_runner import Aborted
from mmrouter_sim.response_events import numbered_events, response_usage
from mmrouter_sim.sglang import requests
from mmrouter_sim.sglang.chat import SglangJob, encoded_images, job_of
from mmrouter_sim.sglang.requests import ChatRequest, WithoutOverrides, check
from mmrouter_sim.vllm.requests import parse
from mmrouter_sim.vllm.responses import StoredResponse

Object = dict[str, Any]
HEADROOM = 2
"""Tokens of ``max_output_tokens`` that an answer does not get."""
_NO_STORE = (
    "Response store is disabled. Stateful Responses require --enable-response-store on a standalone server; response "
    "storage is unavailable in PD mode."
)


class ResponsesRequest(WithoutOverrides, kw_only=True):
    input: str | list[Object]
    instructions: str | None = None
    max_output_tokens: int | None = None
    previous_response_id: str | None = None
    reasoning: Object | None = None
    tool_choice: str | Object = "auto"
    store: bool | None = True
    background: bool | None = False
    text: Object | None = None
    request_id: str = msgspec.field(default_factory=lambda: f"resp_{uuid.uuid4().hex}")


@dataclass
class ResponseJob(SglangJob):
    """``history``: the items of the prompt, which are stored with the response."""

    asked: ResponsesRequest = dataclasses.field(kw_only=True)
    history: list[Object] = dataclasses.field(kw_only=True)

    def answer(self, pieces: list[Piece]) -> Object:
        text = "".join(piece.text for piece in pieces)
        output = [_message(f"msg_{self.request.id}", text)] if text else []
        status = "incomplete" if pieces[-1].finished == "length" else "completed"
        usage = response_usage(self.usage(), cache_write_tokens=0)
        response = self.response(status, output=output, usage=usage)
        if self.asked.store and self.engine.settings.stores_responses:
            kept = self.engine.responses.setdefault(self.id, StoredResponse(response, self.history))
            if kept.response["status"] != "cancelled":
                kept.response = response
        return response

    async def in_background(self) -> None:
        """Run a response that is stored as queued."""
        self.answer(await self._collect())

    def response(self, status: str, **fields: Any) -> Object:
        asked = self.asked
        empty = ("error", "incomplete_details", "reasoning", "temperature", "text", "top_p", "truncation", "user")
        head = {"id": self.id, "object": "response", "created_at": self.created, "status": status}
        repeated = {name: getattr(asked, name) for name in ("instructions", "max_output_tokens", "store")}
        tools: Object = {"tools": asked.tools or [], "tool_choice": asked.tool_choice, "parallel_tool_calls": True}
        model = asked.model or self.engine.settings.served_names[0]
        more: Object = {"model": model, "output": [], "usage": None, "metadata": None}
        more["previous_response_id"] = asked.previous_response_id
        return {**dict.fromkeys(empty), **head, **repeated, **tools, **more, **fields}

    async def _frames(self) -> AsyncIterator[bytes]:
        event = numbered_events()

        for kind in ("response.created", "response.in_progress"):
            yield event(kind, response=self.response("in_progress"))
        pieces, name = list[Piece](), f"msg_{self.request.id}"
        at: Object = {"item_id": name, "output_index": 0, "content_index": 0}
        begun = False
        try:
            async for piece in self.pieces():
                pieces.append(piece)
                if piece.text and not begun:
                    begun = True
                    item = {**_message(name, ""), "status": "in_progress", "content": []}
                    yield event("response.output_item.added", output_index=0, item=item)
                    yield event("response.content_part.added", **at, part=_part(""))
                if piece.text:
                    yield event("response.output_text.delta", **at, delta=piece.text, logprobs=[])
        except (Aborted, RequestError) as error:
            failed = {"code": "server_error", "message": str(error)}
            yield event("response.failed", response=self.response("failed", error=failed))
            return
        response = self.answer(pieces)
        for item in response["output"]:
            (part,) = item["content"]
            yield event("response.output_text.done", **at, text=part["text"], logprobs=[])
            yield event("response.content_part.done", **at, part=part)
            yield event("response.output_item.done", output_index=0, item=item)
        yield event(f"response.{response['status']}", response=response)


async def create(engine: SimulatedEngine, http: HttpRequest) -> Response:
    """Answer ``POST /v1/responses``, with errors in the form of this route."""
    return await _in_form(_create(engine, http))


async def retrieve(engine: SimulatedEngine, http: HttpRequest) -> Response:
    """Answer ``GET /v1/responses/ID``."""

    async def answer() -> Response:
        return json_response(_stored(engine, http.path_params["response_id"]).response)

    return await _in_form(answer())


async def cancel(engine: SimulatedEngine, http: HttpRequest) -> Response:
    """Answer ``POST /v1/responses/ID/cancel``; a response that has ended stays as it is."""

    async def answer() -> Response:
        kept = _stored(engine, http.path_params["response_id"])
        if kept.response["status"] in ("queued", "in_progress"):
            kept.response["status"] = "cancelled"
            if kept.task is not None:
                kept.task.cancel()
                await asyncio.gather(kept.task, return_exceptions=True)
        return json_response(kept.response)

    return await _in_form(answer())


async def _in_form(answer: Awaitable[Response]) -> Response:
    try:
        return await answer
    except RequestError as error:
        return json_response(error.body(), error.status)


def _stored(engine: SimulatedEngine, name: str) -> StoredResponse:
    if not engine.settings.stores_responses:
        raise RequestError(_NO_STORE, kind="invalid_request_error", param="response_id")
    if not name.startswith("resp_"):
        why = f"Invalid 'response_id': '{name}'. Expected an ID that begins with 'resp'."
        raise RequestError(why, kind="invalid_request_error", param="response_id")
    if name not in engine.responses:
        why = f"Response with id '{name}' not found."
        raise RequestError(why, status=404, kind="invalid_request_error", param="response_id")
    return engine.responses[name]


def _history(engine: SimulatedEngine, asked: ResponsesRequest) -> list[Object]:
    """Return the items of the prompt: what is stored, then the new input."""
    items: list[Object] = []
    if asked.previous_response_id:
        kept = _stored(engine, asked.previous_response_id)
        texts = [part["text"] for item in kept.response["output"] for part in item["content"]]
        items += [*kept.messages, *({"role": "assistant", "content": text} for text in texts)]
    new = [{"role": "user", "content": asked.input}] if isinstance(asked.input, str) else asked.input
    return [*items, *new]


async def _create(engine: SimulatedEngine, http: HttpRequest) -> Response:
    raw = await http.body()
    asked = parse(raw, ResponsesRequest)
    asked.response_format = response_format_of(asked.text)
    check(asked)
    for name in ("previous_response_id", "background"):
        if getattr(asked, name) and not engine.settings.stores_responses:
            raise RequestError(_NO_STORE, kind="invalid_request_error", param=name)
    if asked.background and not asked.store:
        raise RequestError("background=true requires store=true.", kind="invalid_request_error", param="store")
    history = _history(engine, asked)
    chat_of = response_chat("sglang", engine.model.prompter)
    assert chat_of is not None
    try:
        body = {**msgspec.json.decode(raw), "previous_response_id": None, "input": history}
        made = chat_of(body)
    except UnmodelledFieldError as error:
        raise RequestError(f"{error.field} is not simulated.", param=error.field) from error
    for message, number, part in made.images:
        given = part["image_url"]
        image = given if isinstance(given, dict) else {"url": given, "detail": part.get("detail")}
        made.body["messages"][message]["content"][number]["image_url"] = image
    chat = ChatRequest(model=asked.model, **made.body)
    encoded = await encoded_images(engine, chat)
    prompt = await render(engine, lambda: requests.from_messages(engine, chat, encoded))
    wanted = asked.max_output_tokens
    begun = job_of(engine, http, asked, prompt, None if wanted is None else max(1, wanted - HEADROOM))
    shared = {each.name: getattr(begun, each.name) for each in dataclasses.fields(SglangJob)}
    job = ResponseJob(**shared | {"id": asked.request_id, "asked": asked, "history": history})
    if not asked.background or asked.stream:
        return await job.respond(http)
    kept = engine.responses[job.id] = StoredResponse(job.response("queued"), history)
    kept.task = asyncio.create_task(job.in_background())
    return json_response(kept.response)


def _message(name: str, text: str) -> Object:
    head = {"id": name, "type": "message", "role": "assistant", "status": "completed", "phase": "final_answer"}
    return {**head, "content": [_part(text)]}


def _part(text: str) -> Object:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": None}
