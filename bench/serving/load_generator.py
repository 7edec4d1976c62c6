"""The load generator process: sends the requests that JSON lines on stdin describe, and answers with their times.

It uses the HTTP client of `mmrouter bench` (:mod:`mmrouter_cli.bench.http_client`) with fixed requests whose answers
are only counted, so that it takes little of the CPU that it shares with the routers under test.
"""

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import uvloop

from bench.child_process import serve
from bench.serving.plain_engine import TOKENS
from mmrouter_cli.bench.http_client import Connection, Receiver, connect, post_message

PROMPT = "Say what is in the picture, in one sentence that a child understands. " * 6
IDLE_PAUSE_MS = 3_600_000
KEY = "bench"
"""API key of the requests; a router without tenants ignores it."""
OPENED_AT_ONCE = 50


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
    body: dict[str, Any] = {"model": "bench", "messages": [{"role": "user", "content": content}], "max_tokens": TOKENS}
    if stream:
        body["stream"] = True
    if pause_ms is not None:
        body["seed"] = pause_ms
    return json.dumps(body).encode()


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


async def _repeat(
    host: str, port: int, count: int, bodies: Sequence[bytes], expected: bytes
) -> tuple[list[float], int]:
    """Send each body ``count`` times over a connection of its own, each after the answer before it. Return the
    microseconds of all answers, which must contain ``expected``, and the number of events with text in them.
    """
    connections = await asyncio.gather(*(connect(host, port) for _ in bodies))
    times, tokens = list[float](), 0

    async def one_after_the_other(connection: Connection, message: bytes) -> None:
        nonlocal tokens
        for _ in range(count):
            answer, began = Answer(), time.perf_counter_ns()
            await connection.exchange(message, answer)
            times.append((time.perf_counter_ns() - began) / 1000)
            answer.check(expected)
            tokens += answer.body.count(b'"delta"')
        connection.close()

    messages = (message(host, port, body) for body in bodies)
    await asyncio.gather(*map(one_after_the_other, connections, messages))
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
        bodies = [chat_body(stream=False, image=image, repeats=repeats)] * connections
        return {"us": (await _repeat(host, port, count, bodies, b"lazy dog"))[0]}

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
        _, tokens = await _repeat(host, port, count, bodies, b"[DONE]")
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
