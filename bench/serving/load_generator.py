"""The load generator process: sends the requests that JSON lines on stdin describe, and answers with their times.

It uses the HTTP client of `mmrouter bench` (:mod:`mmrouter_cli.bench.http_client`) with fixed requests whose answers
are only counted, so that it takes little of the CPU that it shares with the routers under test.
"""

import asyncio
import base64
import json
import random
import time
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Literal

import uvloop

from bench.child_process import serve
from bench.placing.workload import padded_png
from bench.serving.minimal_engine import TOKENS
from mmrouter_cli.bench.http_client import Connection, Receiver, connect, post_message

PROMPT = "Say what is in the picture, in one sentence that a child understands. " * 6
IDLE_PAUSE_MS = 3_600_000
KEY = "bench"
"""API key of the requests; a router without tenants ignores it."""
OPENED_AT_ONCE = 50
Kind = Literal["1k", "8k", "conversation", "image"]
"""Of requests that are new to every router."""
WORDS = {"1k": 690, "8k": 5500}
"""Of a new prompt: about 1,000 and 8,000 tokens of the benchmark's tokenizer."""
TURNS, TURN_WORDS = 20, 70
"""Requests of a conversation, each with about 100 new tokens of the user."""
ANSWER = "The quick brown fox jumps over the lazy dog."
"""Of the assistant in a conversation: what the engine answers."""
IMAGE_BYTES = 1_000_000


def chat_body(
    *, stream: bool, pause_ms: int | None = None, repeats: int = 1, image: str = "", number: int = 0
) -> bytes:
    """Return a chat request's body.

    ``pause_ms``: the engine's pause between tokens. ``repeats``: of the prompt. ``image``: a data URI before it.
    ``number``: other than 0, makes the prompt differ from others from its first word on.
    """
    text: str | list[dict[str, Any]] = (f"{number}. " if number else "") + PROMPT * repeats
    if image:
        text = [{"type": "image_url", "image_url": {"url": image}}, {"type": "text", "text": text}]
    return body_of(text, stream=stream, pause_ms=pause_ms)


def body_of(content: str | list[dict[str, Any]], *, stream: bool = False, pause_ms: int | None = None) -> bytes:
    """Return the body of a chat of one message."""
    return _body([{"role": "user", "content": content}], stream=stream, pause_ms=pause_ms)


def _body(messages: Sequence[Mapping[str, Any]], *, stream: bool = False, pause_ms: int | None = None) -> bytes:
    body: dict[str, Any] = {"model": "bench", "messages": messages, "max_tokens": TOKENS}
    if stream:
        body["stream"] = True
    if pause_ms is not None:
        body["seed"] = pause_ms
    return json.dumps(body).encode()


def new_bodies(kind: Kind, number: int) -> list[bytes]:
    """Return the chat requests of one client in order: one, or the turns of a conversation.

    Neither the first words nor the image are those of another ``number``.
    """
    if kind == "conversation":
        messages: list[dict[str, str]] = []
        bodies = []
        for turn in range(TURNS):
            messages.append({"role": "user", "content": _new_text(number * TURNS + turn, TURN_WORDS)})
            bodies.append(_body(messages))
            messages.append({"role": "assistant", "content": ANSWER})
        return bodies
    if kind == "image":
        encoded = _encoded_image()
        middle = len(encoded) // 8 * 4  # in the data that decoders skip
        url = f"data:image/png;base64,{encoded[:middle]}{number:08d}{encoded[middle + 8 :]}"
        return [body_of([{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": PROMPT}])]
    return [body_of(_new_text(number, WORDS[kind]))]


def requests_of(kind: Kind) -> int:
    """Return the number of requests of one client."""
    return TURNS if kind == "conversation" else 1


@cache
def _encoded_image() -> str:
    return base64.b64encode(padded_png(IMAGE_BYTES)).decode()


def _new_text(number: int, words: int) -> str:
    return f"{number}. " + " ".join(random.Random(number).choices(PROMPT.split(), k=words))


class Answer(Receiver):
    """Collects one answer; ``began`` resolves with its first token."""

    def __init__(self) -> None:
        self.began: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.body = b""
        self.error: Exception | None = None
        self.status = 0

    def on_head(self, status: int, headers: Mapping[str, str]) -> None:
        self.status = status

    def on_data(self, data: bytes) -> None:
        self.body += data
        if not self.began.done() and b'"delta"' in self.body:
            self.began.set_result(None)

    def on_end(self, error: Exception | None) -> None:
        self.error = error
        if not self.began.done():
            self.began.set_exception(ConnectionError(f"ended before its first token ({error}): {self.body[:200]!r}"))
            self.began.exception()  # of a plain answer, which has no tokens

    def check(self, expected: bytes) -> None:
        """Raise the answer's error, or ``ValueError`` where it lacks what is expected."""
        if self.error is not None:
            raise self.error
        if self.status != 200 or expected not in self.body:
            raise ValueError(f"status {self.status}: {self.body[:200].decode(errors='replace')}")


async def _repeat(host: str, port: int, clients: Sequence[Sequence[bytes]], expected: bytes) -> tuple[list[float], int]:
    """Send the messages of each client over a connection of its own, each after the answer before it. Return the
    microseconds of all answers, which must contain ``expected``, and the number of events with text in them.
    """
    connections = await asyncio.gather(*(connect(host, port) for _ in clients))
    times, tokens = list[float](), 0

    async def one_after_the_other(connection: Connection, messages: Sequence[bytes]) -> None:
        nonlocal tokens
        for message in messages:
            answer, began = Answer(), time.perf_counter_ns()
            await connection.exchange(message, answer)
            times.append((time.perf_counter_ns() - began) / 1000)
            answer.check(expected)
            tokens += answer.body.count(b'"delta"')
        connection.close()

    await asyncio.gather(*map(one_after_the_other, connections, clients))
    return times, tokens


def message(host: str, port: int, body: bytes, key: str = KEY) -> bytes:
    """Return a chat request of the tenant with this API key."""
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    return post_message(f"{host}:{port}", "/v1/chat/completions", headers, body)


class LoadGenerator:
    async def plain(
        self, host: str, port: int, count: int, connections: int = 1, image: str = "", repeats: int = 1
    ) -> dict[str, Any]:
        """Send requests over connections at once, one after the other on each; answer the microseconds of each.

        ``repeats``: of the prompt.
        """
        request = message(host, port, chat_body(stream=False, image=image, repeats=repeats))
        return {"us": (await _repeat(host, port, [[request] * count] * connections, b"lazy dog"))[0]}

    async def new(
        self, host: str, port: int, kind: Kind, connections: int, count: int, first: int = 0
    ) -> dict[str, Any]:
        """Send plain requests that are new to the target, or ``count`` conversations per connection; answer the
        microseconds of each request.

        ``first``: the least of the numbers of :func:`new_bodies`, of which each connection takes ``count``.
        """
        clients = [
            [message(host, port, body) for number in range(start, start + count) for body in new_bodies(kind, number)]
            for start in range(first, first + connections * count, count)
        ]
        return {"us": (await _repeat(host, port, clients, b"lazy dog"))[0]}

    async def streams(
        self, host: str, port: int, connections: int, count: int, pause_ms: int | None, repeats: int = 1
    ) -> dict[str, Any]:
        """Stream over connections at once; answer the number of tokens and the seconds.

        ``repeats``: of the prompt; with more than one each connection has a prompt of its own.
        """
        began = time.perf_counter()
        bodies = [
            chat_body(stream=True, pause_ms=pause_ms, repeats=repeats, number=number + 1 if repeats > 1 else 0)
            for number in range(connections)
        ]
        _, tokens = await _repeat(host, port, [[message(host, port, body)] * count for body in bodies], b"[DONE]")
        if tokens != connections * count * TOKENS:
            raise ValueError(f"{tokens} tokens of {connections * count * TOKENS} arrived")
        return {"tokens": tokens, "seconds": time.perf_counter() - began}

    async def idle(self, host: str, port: int, connections: int) -> dict[str, Any]:
        """Open streams that pause after their first token; they stay open until this process ends."""
        request = message(host, port, chat_body(stream=True, pause_ms=IDLE_PAUSE_MS))
        for first in range(0, connections, OPENED_AT_ONCE):
            count = min(OPENED_AT_ONCE, connections - first)
            answers = []
            for connection in await asyncio.gather(*(connect(host, port) for _ in range(count))):
                connection.send(request, answer := Answer())
                answers.append(answer.began)
            await asyncio.gather(*answers)
        return {}


if __name__ == "__main__":
    uvloop.run(serve(LoadGenerator()))
