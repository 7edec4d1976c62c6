"""Answers of chats as answers of ``/v1/responses``, as vLLM 0.32 forms them: whole ones, and streams event by event.

Pure. ``request``: the fields of the request that its answer repeats.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

import orjson

from mmrouter_router.core.errors import RequestError
from mmrouter_router.core.request_ids import without_prefix
from mmrouter_router.streams.chat_events import ChatEventConverter, Object, reasoning_of

_PREFIXES: Final = {"reasoning": "rs", "message": "msg", "function_call": "fc"}
"""Type of an output item -> prefix of its id."""
_TEXTS: Final = {"reasoning": "reasoning_text", "message": "output_text"}
"""Type of an output item -> type of its content, which also names its events."""
_DEFAULTS: Final[Mapping[str, Any]] = {
    "object": "response",
    "error": None,
    "instructions": None,
    "metadata": None,
    "parallel_tool_calls": True,
    "temperature": None,
    "top_p": None,
    "tools": [],
    "background": False,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "previous_response_id": None,
    "prompt": None,
    "reasoning": None,
    "service_tier": "auto",
    "text": None,
    "top_logprobs": None,
    "truncation": "disabled",
    "user": None,
    "presence_penalty": None,
    "frequency_penalty": None,
}


def response_of(answer: Object, request: Object) -> Object:
    """Return a whole chat answer as a response. Raises ``KeyError``, ``TypeError``, ``IndexError`` for other forms."""
    name, choice = without_prefix(answer["id"]), answer["choices"][0]
    message, output = choice["message"], list[Object]()
    if thought := reasoning_of(message):
        output.append(_item("reasoning", name, len(output), thought))
    if text := message.get("content"):
        output.append(_item("message", name, len(output), text, _logprobs(choice)))
    for call in message.get("tool_calls") or ():
        function = call["function"]
        arguments = function.get("arguments") or ""
        output.append(_item("function_call", name, len(output), arguments, call=(call["id"], function["name"])))
    head = _head(answer, request)
    return _complete(head, output, choice.get("finish_reason"), answer.get("usage"))


class ResponseStream(ChatEventConverter):
    """Converts the events of a chat's stream."""

    def __init__(self, request: Object) -> None:
        super().__init__()
        self._request = request
        self._head: Object = {}  # of the response, empty before the first event
        self._sequence = 0
        self._output: list[Object] = []  # complete items
        self._open = ""  # type of the open item
        self._text: list[str] = []  # of the open item
        self._logprobs: list[Object] = []
        self._call: tuple[str, str] | None = None  # id and name of the open tool call
        self._index: Any = None  # of the last tool call
        self._late_text: list[str] = []  # text that came during a tool call

    def _begin(self, chunk: Object) -> Iterator[bytes]:
        self._head = _head(chunk, self._request)
        begun = {**self._head, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
        yield self._line("response.created", response=begun)
        yield self._line("response.in_progress", response=begun)

    def _choice(self, choice: Object, delta: Object) -> Iterator[bytes]:
        logprobs = _logprobs(choice)
        if thought := reasoning_of(delta):
            yield from self._start("reasoning")
            yield self._piece("reasoning_text.delta", thought)
        if text := delta.get("content"):
            if self._open == "function_call":
                self._late_text.append(text)
            else:
                yield from self._message(text, logprobs)
        for call in delta.get("tool_calls") or ():
            function = call.get("function") or {}
            if (name := function.get("name")) and call.get("index") != self._index:
                yield from self._close()
                self._index = call.get("index")
                yield from self._start("function_call", (call["id"], name))
            arguments = function.get("arguments")
            if arguments and self._open == "function_call" and call.get("index") == self._index:
                yield self._piece("function_call_arguments.delta", arguments)

    def _message(self, text: str, logprobs: list[Object]) -> Iterator[bytes]:
        yield from self._start("message")
        self._logprobs += logprobs
        yield self._piece("output_text.delta", text, content_index=0, logprobs=[_streamed(each) for each in logprobs])

    def _start(self, kind: str, call: tuple[str, str] | None = None) -> Iterator[bytes]:
        if self._open == kind:
            return
        yield from self._close()
        self._open, self._call, self._text, self._logprobs = kind, call, [], []
        yield self._line("response.output_item.added", **self._place(), item=self._item("in_progress"))
        if kind in _TEXTS:
            yield self._line("response.content_part.added", **self._part_place(), part=_part(kind, "", []))

    def _piece(self, event: str, delta: str, **fields: Any) -> bytes:
        self._text.append(delta)
        if self._open == "reasoning":
            fields["content_index"] = 0
        return self._line(f"response.{event}", item_id=self._id(), **self._place(), delta=delta, **fields)

    def _close(self) -> Iterator[bytes]:
        if not self._open:
            return
        kind, text, item = self._open, "".join(self._text), self._item("completed")
        if kind in _TEXTS:
            logprobs: Object = {"logprobs": []} if kind == "message" else {}
            yield self._line(f"response.{_TEXTS[kind]}.done", **self._part_place(), text=text, **logprobs)
            part = _part(kind, text, self._logprobs or None)
            yield self._line("response.content_part.done", **self._part_place(), part=part)
        else:
            place = {"item_id": self._id(), **self._place()}
            yield self._line("response.function_call_arguments.done", **place, arguments=text, name=item["name"])
        yield self._line("response.output_item.done", **self._place(), item=item)
        self._output.append(item)
        self._open = ""
        if self._late_text:
            text, self._late_text = "".join(self._late_text), []
            yield from self._message(text, [])
            yield from self._close()

    def _end(self) -> Iterator[bytes]:
        yield from self._close()
        whole = _complete(self._head, self._output, self._finish, self._usage)
        yield self._line("response.completed", response=whole)

    def _failure(self, error: RequestError) -> bytes:
        return self._line("error", code=error.code, message=error.message, param=error.param)

    def _item(self, status: str) -> Object:
        name, number = without_prefix(self._head["id"]), len(self._output)
        return _item(self._open, name, number, "".join(self._text), self._logprobs, call=self._call, status=status)

    def _id(self) -> str:
        return _item_id(self._open, without_prefix(self._head["id"]), len(self._output))

    def _place(self) -> Object:
        return {"output_index": len(self._output)}

    def _part_place(self) -> Object:
        return {"item_id": self._id(), **self._place(), "content_index": 0}

    def _line(self, kind: str, **fields: Any) -> bytes:
        data = orjson.dumps({"type": kind, **fields, "sequence_number": self._sequence})
        self._sequence += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)


def _head(answer: Object, request: Object) -> Object:
    """Return the fields of a response that are known before its output."""
    repeated = {name: value for name, value in request.items() if value is not None}
    head = {"id": f"resp_{without_prefix(answer['id'])}", "created_at": answer.get("created"), "model": answer["model"]}
    choice = "auto" if request.get("tools") else "none"
    return {**head, **_DEFAULTS, "tool_choice": choice, **repeated}


def _complete(head: Object, output: list[Object], finish: str | None, usage: Object | None) -> Object:
    cut = finish == "length"
    details = {"reason": "max_output_tokens"} if cut else None
    status = "incomplete" if cut else "completed"
    return {**head, "status": status, "incomplete_details": details, "output": output, "usage": _usage(usage)}


def _item(
    kind: str,
    name: str,
    number: int,
    text: str,
    logprobs: list[Object] | None = None,
    *,
    call: tuple[str, str] | None = None,
    status: str = "completed",
) -> Object:
    """Return an output item. ``name``: of the request; ``call``: id and name of a tool call, whose ``text`` are its
    arguments.
    """
    item: Object = {"id": _item_id(kind, name, number), "type": kind, "status": status}
    content = [_part(kind, text, logprobs or None)] if text and kind in _TEXTS else []
    if kind == "reasoning":
        return {**item, "summary": [], "content": content, "encrypted_content": None}
    if kind == "message":
        return {**item, "role": "assistant", "content": content}
    assert call is not None
    return {**item, "call_id": call[0], "name": call[1], "arguments": text}


def _item_id(kind: str, name: str, number: int) -> str:
    return f"{_PREFIXES[kind]}_{name}_{number}"


def _part(kind: str, text: str, logprobs: list[Object] | None) -> Object:
    part: Object = {"type": _TEXTS[kind], "text": text}
    return {**part, "annotations": [], "logprobs": logprobs} if kind == "message" else part


def _logprobs(choice: Object) -> list[Object]:
    return (choice.get("logprobs") or {}).get("content") or []


def _streamed(token: Object) -> Object:
    """Return the log probability of a token as an event has it."""
    top = [{"token": each["token"], "logprob": each["logprob"]} for each in token.get("top_logprobs") or ()]
    return {"token": token["token"], "logprob": token["logprob"], "top_logprobs": top}


def _usage(usage: Object | None) -> Object | None:
    if usage is None:
        return None
    read, written = usage.get("prompt_tokens") or 0, usage.get("completion_tokens") or 0
    prompt, answer = usage.get("prompt_tokens_details") or {}, usage.get("completion_tokens_details") or {}
    cached = {"cached_tokens": prompt.get("cached_tokens") or 0}
    return {
        "input_tokens": read,
        "input_tokens_details": {**cached, "cache_write_tokens": prompt.get("created_cache_tokens") or 0},
        "output_tokens": written,
        "output_tokens_details": {"reasoning_tokens": answer.get("reasoning_tokens") or 0},
        "total_tokens": read + written,
    }
