"""Answers of chats as answers of Anthropic's ``/v1/messages``: whole ones, streams event by event, and errors. Pure."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

import orjson

from mmrouter_router.core.errors import RequestError
from mmrouter_router.core.request_ids import without_prefix
from mmrouter_router.streams.chat_events import ChatEventConverter, Object, reasoning_of

_ERRORS: Final[Mapping[int, str]] = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def error_body(error: RequestError, request_id: str) -> bytes:
    """Return an error in Anthropic's shape; the field stands before the message, because the shape has none for it."""
    return orjson.dumps({"type": "error", "error": _error(error), "request_id": request_id})


def _error(error: RequestError) -> Object:
    kind = _ERRORS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    message = (
        error.message if error.param is None or error.param in error.message else f"{error.param}: {error.message}"
    )
    return {"type": kind, "message": message.encode("utf-8", "replace").decode()}


def message_of(answer: Object) -> Object:
    """Return a whole chat answer as a message. Raises ``KeyError``, ``TypeError`` or ``IndexError`` for other forms."""
    choice = answer["choices"][0]
    message = choice["message"]
    content: list[Object] = []
    if thought := reasoning_of(message):
        content.append({"type": "thinking", "thinking": thought, "signature": ""})
    if text := message.get("content"):
        content.append({"type": "text", "text": text})
    calls = message.get("tool_calls") or []
    for call in calls:
        function = call["function"]
        content.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": _arguments(function)})
    stop = _stop_reason(choice.get("finish_reason"), _stopped_by(choice), tool=bool(calls), complete=bool(calls))
    return {
        **_head(answer["id"], answer["model"], _usage(answer.get("usage"))),
        "content": content or [{"type": "text", "text": ""}],
        **stop,
    }


class MessageStream(ChatEventConverter):
    """Converts the events of a chat's stream. ``prompt_tokens``: for the first event, before the engine's usage."""

    def __init__(self, prompt_tokens: int = 0) -> None:
        super().__init__()
        self._prompt_tokens = prompt_tokens
        self._block = -1  # number of the last block
        self._open = ""  # type of the open block
        self._call: Any = None  # index of the tool call of the open block
        self._arguments: list[str] = []  # of the last tool call
        self._tool_used = False
        self._late_text: list[str] = []  # text that came during a tool call
        self._stopped_by: Any = None

    def _begin(self, chunk: Object) -> Iterator[bytes]:
        head = _head(chunk["id"], chunk["model"], {"input_tokens": self._prompt_tokens, "output_tokens": 0})
        yield _line("message_start", message={**head, "content": [], "stop_reason": None, "stop_sequence": None})

    def _choice(self, choice: Object, delta: Object) -> Iterator[bytes]:
        self._stopped_by = _stopped_by(choice) or self._stopped_by
        if thought := reasoning_of(delta):
            yield from self._start("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            yield self._piece({"type": "thinking_delta", "thinking": thought})
        if text := delta.get("content"):
            if self._open == "tool_use":
                self._late_text.append(text)
            else:
                yield from self._text(text)
        for call in delta.get("tool_calls") or ():
            function = call.get("function") or {}
            if (name := function.get("name")) and call.get("index") != self._call:
                yield from self._stop()
                self._call, self._arguments, self._tool_used = call.get("index"), [], True
                yield from self._start("tool_use", {"type": "tool_use", "id": call["id"], "name": name, "input": {}})
            arguments = function.get("arguments")
            if arguments and self._open == "tool_use" and call.get("index") == self._call:
                self._arguments.append(arguments)
                yield self._piece({"type": "input_json_delta", "partial_json": arguments})

    def _text(self, text: str) -> Iterator[bytes]:
        yield from self._start("text", {"type": "text", "text": ""})
        yield self._piece({"type": "text_delta", "text": text})

    def _start(self, kind: str, block: Object) -> Iterator[bytes]:
        if self._open == kind:
            return
        yield from self._stop()
        self._block, self._open = self._block + 1, kind
        yield _line("content_block_start", index=self._block, content_block=block)

    def _piece(self, delta: Object) -> bytes:
        return _line("content_block_delta", index=self._block, delta=delta)

    def _stop(self) -> Iterator[bytes]:
        if not self._open:
            return
        self._open = ""
        yield _line("content_block_stop", index=self._block)
        if self._late_text:
            text, self._late_text = "".join(self._late_text), []
            yield from self._text(text)
            yield from self._stop()

    def _end(self) -> Iterator[bytes]:
        yield from self._stop()
        complete = self._tool_used and _is_json("".join(self._arguments))
        stop = _stop_reason(self._finish or "stop", self._stopped_by, tool=self._tool_used, complete=complete)
        yield _line("message_delta", delta=stop, usage=_usage(self._usage))
        yield _line("message_stop")

    def _failure(self, error: RequestError) -> bytes:
        return _line("error", error=_error(error))


def _line(kind: str, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps({"type": kind, **fields}))


def _head(answer_id: str, model: str, usage: Object) -> Object:
    return {
        "id": f"msg_{without_prefix(answer_id)}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "usage": usage,
    }


def _stopped_by(choice: Object) -> Any:
    """Return the stop string or token that ended an answer, in either engine's field."""
    return choice.get("stop_reason", choice.get("matched_stop"))


def _stop_reason(finish: str | None, stopped_by: Any, *, tool: bool, complete: bool) -> Object:
    """Return ``stop_reason`` and ``stop_sequence``; ``complete``: the last tool call is whole, so it may run."""
    reason, sequence = "end_turn", None
    if finish == "length":
        reason = "max_tokens"
    elif complete:
        reason = "tool_use"
    elif isinstance(stopped_by, str):
        reason, sequence = "stop_sequence", stopped_by
    elif finish == "tool_calls" or tool:
        reason = "tool_use"
    return {"stop_reason": reason, "stop_sequence": sequence}


def _usage(usage: Object | None) -> Object:
    """Return a chat's usage in Anthropic's terms, in which input tokens exclude those of the cache."""
    usage = usage or {}
    made: Object = {"output_tokens": usage.get("completion_tokens") or 0}
    left = usage.get("prompt_tokens") or 0
    details = usage.get("prompt_tokens_details") or {}
    for theirs, ours in (("cached_tokens", "cache_read"), ("created_cache_tokens", "cache_creation")):
        if (tokens := details.get(theirs)) is not None:
            made[f"{ours}_input_tokens"] = tokens
            left -= tokens
    return {"input_tokens": max(0, left), **made}


def _arguments(function: Object) -> Object:
    """Return a call's arguments as an object; text that is none stands under its name, so that nothing is lost."""
    try:
        value = orjson.loads(function.get("arguments") or "{}")
    except orjson.JSONDecodeError:
        value = None
    return value if isinstance(value, dict) else {"arguments": function.get("arguments")}


def _is_json(text: str) -> bool:
    try:
        orjson.loads(text)
    except orjson.JSONDecodeError:
        return False
    return True
