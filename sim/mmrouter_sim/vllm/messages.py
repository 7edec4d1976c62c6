"""Anthropic's ``/v1/messages`` and its count of tokens: texts and images in, one text out, whole or event by event.

vLLM makes a chat of the request; tools and thinking are not simulated.
"""

import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from mmrouter_sim.engine import SimulatedEngine
from mmrouter_sim.errors import RequestError, json_response, parameter_error, validation_error
from mmrouter_sim.generation import Piece, render
from mmrouter_sim.vllm import completions, requests
from mmrouter_sim.vllm.completions import VllmJob
from mmrouter_sim.vllm.requests import ChatRequest, Generation, Prompt, check, check_generation, parse

Object = dict[str, Any]
_STOPS = {"length": "max_tokens", "stop": "end_turn"}


class MessagesRequest(Generation, kw_only=True):
    messages: list[Object]
    system: str | list[Object] | None = None
    stop_sequences: list[str] | None = None
    thinking: Object | None = None


@dataclass
class MessageJob(VllmJob):
    message_id: str = field(default_factory=lambda: f"msg_{uuid.uuid4().hex}")

    def answer(self, pieces: list[Piece]) -> Object:
        text = "".join(piece.text for piece in pieces)
        return self._head([{"type": "text", "text": text}], **_stop(pieces[-1]), usage=_usage(self.usage()))

    def _head(self, content: list[Object], **fields: Any) -> Object:
        model = self.body.model or self.engine.settings.served_names[0]
        head = {"id": self.message_id, "type": "message", "role": "assistant", "content": content, "model": model}
        return {**head, "stop_reason": None, "stop_sequence": None, **fields}

    async def _frames(self) -> AsyncIterator[bytes]:
        pieces: list[Piece] = []
        async for piece in self.pieces():
            if not pieces:
                begun = self._head([], usage={**_usage(self.usage()), "output_tokens": 0})
                yield _event("message_start", message=begun)
                yield _event("content_block_start", index=0, content_block={"type": "text", "text": ""})
            pieces.append(piece)
            if piece.text:
                yield _event("content_block_delta", index=0, delta={"type": "text_delta", "text": piece.text})
        yield _event("content_block_stop", index=0)
        yield _event("message_delta", delta=_stop(pieces[-1]), usage=_usage(self.usage()))
        yield _event("message_stop")


async def create(engine: SimulatedEngine, http: HttpRequest) -> Response:
    """Answer ``POST /v1/messages``."""
    try:
        asked = _read(engine, await http.body())
        if asked.max_tokens is None:
            raise validation_error("Field required: max_tokens")
        chat, prompt = await _prompt(engine, asked)
        if engine.draining:
            raise completions.SHUT_DOWN
        made = completions.job(engine, http, chat, prompt, asked.max_tokens, "chatcmpl", 0)
        job = MessageJob(engine, made.runner, chat, prompt, made.request, made.id)
        return await job.respond(http)
    except RequestError as error:
        return _refusal(error)


async def count_tokens(engine: SimulatedEngine, http: HttpRequest) -> Response:
    """Answer ``POST /v1/messages/count_tokens``."""
    try:
        _, prompt = await _prompt(engine, _read(engine, await http.body()))
    except RequestError as error:
        return _refusal(error)
    return json_response({"input_tokens": len(prompt.ids)})


def _read(engine: SimulatedEngine, raw: bytes) -> MessagesRequest:
    asked = parse(raw, MessagesRequest)
    completions.check_model(engine, asked.model)
    for name in ("tools", "thinking"):
        if getattr(asked, name):
            raise parameter_error(f"{name} of messages are not simulated.", name)
    return asked


async def _prompt(engine: SimulatedEngine, asked: MessagesRequest) -> tuple[ChatRequest, Prompt]:
    """Return the chat of a request, and its prompt."""
    fields = {name: getattr(asked, name) for name in Generation.__struct_fields__} | {"stop": asked.stop_sequences}
    system = [{"role": "system", "content": _text(asked.system)}] if asked.system else []
    chat = ChatRequest(**fields, messages=[*system, *map(_message, asked.messages)])
    check(chat)
    check_generation(chat, asked.max_tokens)
    return chat, await render(engine, partial(requests.from_messages, engine, chat))


def _message(message: Object) -> Object:
    content = message.get("content")
    if not isinstance(content, list):
        return {"role": message.get("role"), "content": content}
    return {"role": message.get("role"), "content": [_part(block) for block in content]}


def _part(block: Object) -> Object:
    if block.get("type") == "image":
        source = block.get("source") or {}
        data = f"data:{source.get('media_type', 'image/jpeg')};base64,{source.get('data', '')}"
        return {
            "type": "image_url",
            "image_url": {"url": source.get("url", "") if source.get("type") == "url" else data},
        }
    if block.get("type") != "text":
        raise validation_error(f"blocks of type {block.get('type')} are not simulated")
    return {"type": "text", "text": block.get("text", "")}


def _text(system: str | list[Object]) -> str:
    return system if isinstance(system, str) else "".join(str(block.get("text", "")) for block in system)


def _stop(last: Piece) -> Object:
    if isinstance(last.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": last.stop_reason}
    return {"stop_reason": _STOPS.get(last.finished or "stop"), "stop_sequence": None}


def _usage(usage: Object) -> Object:
    """Return a chat's usage as a message's, whose input is what no cache had and no cache was given."""
    details = usage["prompt_tokens_details"]
    if details is None:
        return {"input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"]}
    cached, created = details["cached_tokens"], details["created_cache_tokens"]
    return {
        "input_tokens": max(0, usage["prompt_tokens"] - cached - created),
        "output_tokens": usage["completion_tokens"],
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": created,
    }


def _event(kind: str, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), msgspec.json.encode({"type": kind, **fields}))


def _refusal(error: RequestError) -> Response:
    body = {"type": "error", "error": {"type": error.kind, "message": str(error)}}
    return json_response(body, error.status)
