"""A lean HTTP client in a process of its own, told what to do by JSON lines on stdin."""

import asyncio
import json
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, cast

import uvloop

from bench.serving.plain_engine import TOKENS

PROMPT = "Say what is in the picture, in one sentence that a child understands. " * 6


def request(
    host: str, port: int, *, stream: bool, pause_ms: int | None, repeats: int = 1, image: str = "", number: int = 0
) -> bytes:
    """Return one chat request as bytes. ``repeats``: of the prompt. ``image``: a data URI before it; ``number`` makes
    a prompt that differs from others from its first word on.
    """
    text: str | list[dict[str, Any]] = (f"{number}. " if number else "") + PROMPT * repeats
    if image:
        text = [{"type": "image_url", "image_url": {"url": image}}, {"type": "text", "text": text}]
    body: dict[str, Any] = {"model": "bench", "messages": [{"role": "user", "content": text}], "max_tokens": TOKENS}
    if stream:
        body["stream"] = True
    if pause_ms is not None:
        body["seed"] = pause_ms
    raw = json.dumps(body).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: {host}:{port}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(raw)}\r\n\r\n"
    )
    return head.encode() + raw


def split(data: bytes) -> tuple[int, bytes] | None:
    """Return status and body of a whole answer, or ``None`` while some of it is missing."""
    head, found, rest = data.partition(b"\r\n\r\n")
    if not found:
        return None
    status, lower = int(head[9:12]), head.lower()
    if b"\r\ntransfer-encoding: chunked" in lower:
        if not rest.endswith(b"0\r\n\r\n"):
            return None
        body = []
        while rest:
            size, _, rest = rest.partition(b"\r\n")
            length = int(size, 16)
            body.append(rest[:length])
            rest = rest[length + 2 :]
        return status, b"".join(body)
    length = int(lower.partition(b"\r\ncontent-length:")[2].partition(b"\r\n")[0] or 0)
    return None if len(rest) < length else (status, rest[:length])


def plain(host: str, port: int, count: int) -> dict[str, Any]:
    """Send requests one after the other on one connection; answer microseconds of each."""
    message = request(host, port, stream=False, pause_ms=None)
    took = []
    with socket.create_connection((host, port), timeout=10) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(count):
            began = time.perf_counter_ns()
            connection.sendall(message)
            data = b""
            while (answer := split(data)) is None:
                piece = connection.recv(65536)
                if not piece:
                    raise ConnectionError("the connection was closed within an answer")
                data += piece
            took.append((time.perf_counter_ns() - began) / 1000)
            _require(answer, b"lazy dog")
    return {"us": took}


class Stream(asyncio.Protocol):
    """One connection that has ``count`` requests answered, one after the other; ``us``: what each took."""

    def __init__(self, message: bytes, count: int) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.bodies: list[tuple[int, bytes]] = []
        self.us: list[float] = []
        self._began = 0
        self._message, self._left = message, count
        self._pieces: list[bytes] = []
        self._transport: asyncio.Transport | None = None
        self._chunked: bool | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._ask()

    def _ask(self) -> None:
        assert self._transport is not None
        self._began = time.perf_counter_ns()
        self._transport.write(self._message)

    def data_received(self, data: bytes) -> None:
        assert self._transport is not None
        self._pieces.append(data)
        if self._chunked is None:
            self._chunked = b"transfer-encoding: chunked" in data.lower()
        if self._chunked and not data.endswith(b"0\r\n\r\n") and len(data) > 5:
            return
        answer = split(b"".join(self._pieces))
        if answer is None:
            return
        self.bodies.append(answer)
        self.us.append((time.perf_counter_ns() - self._began) / 1000)
        self._pieces.clear()
        self._left -= 1
        if self._left:
            self._ask()
        else:
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            if self._left:
                self.done.set_exception(ConnectionError(f"closed with {self._left} streams to go: {exc}"))
            else:
                self.done.set_result(None)


async def _ask_at_once(host: str, port: int, count: int, messages: Sequence[bytes]) -> list[Stream]:
    """Have each message answered ``count`` times, on a connection of its own, all at once."""
    loop = asyncio.get_running_loop()
    pairs = await asyncio.gather(
        *(loop.create_connection(partial(Stream, message, count), host, port) for message in messages)
    )
    await asyncio.gather(*(protocol.done for _, protocol in pairs))
    return [protocol for _, protocol in pairs]


async def plains(host: str, port: int, connections: int, count: int, image: str = "") -> dict[str, Any]:
    """Hold connections that ask at once, each one request after the other; answer microseconds of each."""
    message = request(host, port, stream=False, pause_ms=None, image=image)
    asked = await _ask_at_once(host, port, count, [message] * connections)
    for protocol in asked:
        for answer in protocol.bodies:
            _require(answer, b"lazy dog")
    return {"us": [us for protocol in asked for us in protocol.us]}


async def streams(
    host: str, port: int, connections: int, count: int, pause_ms: int | None, repeats: int = 1
) -> dict[str, Any]:
    """Hold connections that stream at once; answer the number of tokens and the seconds it took.

    ``repeats``: of the prompt; with more than one each connection has a prompt of its own.
    """
    began = time.perf_counter()
    messages = [
        request(host, port, stream=True, pause_ms=pause_ms, repeats=repeats, number=number + 1 if repeats > 1 else 0)
        for number in range(connections)
    ]
    asked = await _ask_at_once(host, port, count, messages)
    seconds = time.perf_counter() - began
    tokens = 0
    for protocol in asked:
        for answer in protocol.bodies:
            _require(answer, b"[DONE]")
            tokens += answer[1].count(b'"delta"')
    if tokens != connections * count * TOKENS:
        raise ValueError(f"{tokens} tokens came of {connections * count * TOKENS}")
    return {"tokens": tokens, "seconds": seconds}


class Idle(asyncio.Protocol):
    """One connection whose stream has begun and then says nothing for an hour."""

    def __init__(self, message: bytes) -> None:
        self.began: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._message = message
        self._data = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.Transport, transport).write(self._message)

    def data_received(self, data: bytes) -> None:
        self._data += data
        if b'"delta"' in self._data and not self.began.done():
            self.began.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.began.done():
            self.began.set_exception(ConnectionError(f"closed before its stream began: {self._data[:200]!r}"))


async def idle(host: str, port: int, connections: int) -> dict[str, Any]:
    """Open connections, a few at a time, whose streams begin and pause; they stay until this process ends."""
    loop = asyncio.get_running_loop()
    message = request(host, port, stream=True, pause_ms=3_600_000)
    for first in range(0, connections, 50):
        pairs = await asyncio.gather(
            *(loop.create_connection(lambda: Idle(message), host, port) for _ in range(min(50, connections - first)))
        )
        await asyncio.gather(*(protocol.began for _, protocol in pairs))
    return {}


def _require(answer: tuple[int, bytes], words: bytes) -> None:
    status, body = answer
    if status != 200 or words not in body:
        raise ValueError(f"status {status}: {body[:200].decode(errors='replace')}")


ASKS: dict[str, Callable[..., Awaitable[dict[str, Any]]]] = {"streams": streams, "plains": plains, "idle": idle}


async def main() -> None:
    """Serve commands until stdin ends."""
    for line in sys.stdin:
        command = json.loads(line)
        do = command.pop("do")
        try:
            answer = plain(**command) if do == "plain" else await ASKS[do](**command)
        except Exception as error:  # everything is the driver's to report
            answer = {"error": f"{type(error).__name__}: {error}"}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    uvloop.run(main())
