"""One streamed chat request: sent, timed, and read to its end. The text of an answer is not kept."""

import asyncio
from array import array
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from mmrouter_cli.bench.http_client import Client, ConnectError, Receiver, clock
from mmrouter_cli.bench.types import Answer

END_SECONDS = 1.0
"""How long the end of a body may come after the stream's last event, until its connection is given up."""
MOST_EVENT_BYTES = 2**18
MOST_ERROR_BYTES = 64 * 1024
ERROR_LENGTH = 300
"""Characters of an error message that are kept."""
IDENTITY = {"content-type": "application/json", "accept-encoding": "identity"}


class Details(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: Details | None = None


class Delta(msgspec.Struct):
    """Text that an event adds; engines name reasoning in two ways."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class Choice(msgspec.Struct):
    delta: Delta | None = None
    finish_reason: str | None = None


class Chunk(msgspec.Struct):
    choices: list[Choice] = []
    usage: Usage | None = None
    error: Any = None


_decoder = msgspec.json.Decoder(Chunk)


class AnswerError(Exception):
    """The answer failed; arguments are the kind of failure and a message."""


class StreamReader(Receiver):
    """Reads a stream of events into an :class:`Answer`; ``gaps`` holds the seconds between its tokens."""

    def __init__(self, answer: Answer, began: float) -> None:
        self.gaps = array("d")
        self.error: Exception | None = None
        self.complete = False
        self._answer, self._began = answer, began
        self._status = 200
        self._buffer = b""
        self._finished = False
        self._last = 0.0
        self._end_timer: asyncio.TimerHandle | None = None

    def on_head(self, status: int, headers: Mapping[str, str]) -> None:
        note_routing(self._answer, headers)
        self._status = status
        content_type = headers.get("content-type", "").partition(";")[0].strip()
        if status == 200 and content_type != "text/event-stream":
            raise AnswerError("no stream", f"content-type is {content_type or 'missing'}")

    def on_data(self, data: bytes) -> None:
        if self._status != 200:
            self._buffer = (self._buffer + data)[:MOST_ERROR_BYTES]
            return
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        if len(self._buffer) > MOST_EVENT_BYTES:
            raise AnswerError("unreadable", f"an event of more than {MOST_EVENT_BYTES} bytes")
        for line in lines:
            if line.startswith(b"data:") and not self.complete:  # other lines: comments, names of events
                self._read_event(line[5:].strip())

    def on_end(self, error: Exception | None) -> None:
        if self._end_timer is not None:
            self._end_timer.cancel()
        if self._status != 200:
            self.error = AnswerError(f"status {self._status}", error_message(self._buffer))
        elif self.complete:
            return  # bytes after the last event do not count
        elif error is not None:
            self.error = error
        elif not self._finished:
            self.error = AnswerError("broken off", "the stream ended before the answer did")
        elif not self._answer.first:
            self._answer.first = self._answer.last = clock() - self._began  # an answer without text

    def _read_event(self, data: bytes) -> None:
        answer, now = self._answer, clock()
        if data == b"[DONE]":
            answer.total = now - self._began
            self.complete = True
            # A connection can be reused only after the last byte of a body, which some endpoints never send.
            self._end_timer = asyncio.get_running_loop().call_later(END_SECONDS, self.connection.close)
            if not answer.first:
                answer.first = answer.last = answer.total  # an answer without text
            return
        chunk = _decoder.decode(data)
        if chunk.error is not None:
            raise AnswerError("error event", error_message(data))
        for choice in chunk.choices:
            self._finished = self._finished or choice.finish_reason is not None
            delta = choice.delta
            if delta is None or not (delta.content or delta.reasoning_content or delta.reasoning):
                continue
            if self._last:
                self.gaps.append(now - self._last)
            else:
                answer.first = now - self._began
            self._last = now
            answer.last = now - self._began
            answer.tokens_seen += 1
        if chunk.usage is not None:
            answer.prompt, answer.completion = chunk.usage.prompt_tokens, chunk.usage.completion_tokens
            details = chunk.usage.prompt_tokens_details
            answer.cached = details.cached_tokens if details is not None else None


async def ask(
    client: Client,
    headers: Mapping[str, str],
    body: bytes,
    *,
    started: float,
    late: float | None,
    gap: Callable[[float], None],
) -> Answer:
    """Send a request and read its answer; ``gap`` receives the seconds between its tokens if it is complete.

    Whatever the endpoint does is the answer's ``error``, never an exception.
    """
    answer = Answer(started, late)
    began = clock()
    reader = StreamReader(answer, began)
    try:
        await client.post("/v1/chat/completions", {**IDENTITY, **headers}, body, reader)
    except TimeoutError:
        if not reader.complete:
            reader.error = AnswerError("timeout", f"no complete answer in {client.timeout:g} s")
    except ConnectError as error:
        reader.error = AnswerError("connect", str(error))
    answer.total = answer.total or clock() - began
    failure = reader.error
    if failure is None:
        for seconds in reader.gaps:
            gap(seconds)
    elif isinstance(failure, AnswerError):
        answer.error, answer.message = failure.args
    elif isinstance(failure, OSError):
        answer.error = "broken off" if answer.first else "no answer"
        answer.message = str(failure) or type(failure).__name__
    else:
        answer.error, answer.message = "unreadable", str(failure)
    answer.message = " ".join(answer.message.split())[:ERROR_LENGTH]
    return answer


def note_routing(answer: Answer, headers: Mapping[str, str]) -> None:
    """Record the decision of an mmrouter; it shows all but the request id to holders of the control token only."""
    answer.routed = "x-mmrouter-request-id" in headers
    answer.exactness = headers.get("x-mmrouter-exactness", "")
    answer.worker = headers.get("x-mmrouter-worker", "")
    blocks, size = headers.get("x-mmrouter-overlap-blocks", ""), headers.get("x-mmrouter-block-size", "")
    if blocks.isdigit() and size.isdigit():
        answer.overlap = int(blocks) * int(size)


def error_message(raw: bytes) -> str:
    """Return the message of an error body, or the whole body where it has none."""
    try:
        value = msgspec.json.decode(raw)
    except msgspec.DecodeError:
        value = None
    if isinstance(value, dict):
        error = value.get("error", value)
        message = error.get("message") if isinstance(error, dict) else error
        if isinstance(message, str) and message:
            return message
    return raw.decode(errors="replace")
