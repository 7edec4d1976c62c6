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
    body: dict[str, Any] = {"model": "bench", "messages": [{"role": "user", "content": text}], "max_tokens": TOKENS}
    if stream:
        body["stream"] = True
    if pause_ms is not None:
        body["seed"] = pause_ms
    return json.dumps(body).encode()


class Repeated(Receiver):
    """Sends one request ``count`` times over its connection, each after the answer before it.

    Answers must contain ``expected``. ``us``: microseconds of each; ``tokens``: events with text in all of them.
    """

    def __init__(self, connection: Connection, message: bytes, count: int, expected: bytes) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.us: list[float] = []
        self.tokens = 0
        self._message, self._left, self._expected = message, count, expected
        self._status = 0
        self._body: list[bytes] = []
        self._began = time.perf_counter_ns()
        connection.send(message, self)

    def on_head(self, status: int, headers: Mapping[str, str]) -> None:
        self._status = status

    def on_data(self, data: bytes) -> None:
        self._body.append(data)

    def on_end(self, error: Exception | None) -> None:
        self.us.append((time.perf_counter_ns() - self._began) / 1000)
        body = b"".join(self._body)
        self._body.clear()
        if error is None and (self._status != 200 or self._expected not in body):
            error = ValueError(f"status {self._status}: {body[:200].decode(errors='replace')}")
        if error is not None:
            self.done.set_exception(error)
            return
        self.tokens += body.count(b'"delta"')
        self._left -= 1
        if self._left:
            self._began = time.perf_counter_ns()
            self.connection.send(self._message, self)
        else:
            self.connection.close()
            self.done.set_result(None)


class Held(Receiver):
    """A stream that is held open: ``began`` resolves with its first token."""

    def __init__(self, connection: Connection, message: bytes) -> None:
        self.began: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._body = b""
        connection.send(message, self)

    def on_data(self, data: bytes) -> None:
        if not self.began.done():
            self._body += data
            if b'"delta"' in self._body:
                self.began.set_result(None)

    def on_end(self, error: Exception | None) -> None:
        if not self.began.done():
            self.began.set_exception(ConnectionError(f"ended before its first token ({error}): {self._body[:200]!r}"))


async def _repeat(host: str, port: int, count: int, bodies: Sequence[bytes], expected: bytes) -> list[Repeated]:
    connections = await asyncio.gather(*(connect(host, port) for _ in bodies))
    receivers = [
        Repeated(connection, _message(host, port, body), count, expected)
        for connection, body in zip(connections, bodies, strict=True)
    ]
    await asyncio.gather(*(receiver.done for receiver in receivers))
    return receivers


def _message(host: str, port: int, body: bytes) -> bytes:
    return post_message(f"{host}:{port}", "/v1/chat/completions", {"content-type": "application/json"}, body)


class LoadGenerator:
    async def plain(self, host: str, port: int, count: int, connections: int = 1, image: str = "") -> dict[str, Any]:
        """Send requests over connections at once, one after the other on each; answer the microseconds of each."""
        bodies = [chat_body(stream=False, image=image)] * connections
        receivers = await _repeat(host, port, count, bodies, b"lazy dog")
        return {"us": [us for receiver in receivers for us in receiver.us]}

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
        receivers = await _repeat(host, port, count, bodies, b"[DONE]")
        tokens = sum(receiver.tokens for receiver in receivers)
        if tokens != connections * count * TOKENS:
            raise ValueError(f"{tokens} tokens of {connections * count * TOKENS} arrived")
        return {"tokens": tokens, "seconds": time.perf_counter() - began}

    async def idle(self, host: str, port: int, connections: int) -> dict[str, Any]:
        """Open streams that pause after their first token; they stay open until this process ends."""
        message = _message(host, port, chat_body(stream=True, pause_ms=IDLE_PAUSE_MS))
        for first in range(0, connections, OPENED_AT_ONCE):
            opened = await asyncio.gather(
                *(connect(host, port) for _ in range(min(OPENED_AT_ONCE, connections - first)))
            )
            await asyncio.gather(*(Held(connection, message).began for connection in opened))
        return {}


if __name__ == "__main__":
    uvloop.run(serve(LoadGenerator()))
