"""A lean HTTP client in a process of its own, told what to do by JSON lines on stdin."""

import asyncio
import json
import socket
import sys
import time
from typing import Any, cast

import uvloop

from bench.engine import TOKENS

PROMPT = "Say what is in the picture, in one sentence that a child understands. " * 6


def request(host: str, port: int, *, stream: bool, pause_ms: int | None) -> bytes:
    """Return one chat request as bytes."""
    body: dict[str, Any] = {"model": "bench", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": TOKENS}
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
    """One connection that has ``count`` streams answered, one after the other."""

    def __init__(self, message: bytes, count: int) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.bodies: list[tuple[int, bytes]] = []
        self._message, self._left = message, count
        self._pieces: list[bytes] = []
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(self._message)

    def data_received(self, data: bytes) -> None:
        assert self._transport is not None
        self._pieces.append(data)
        if not data.endswith(b"0\r\n\r\n") and len(data) > 5:
            return
        answer = split(b"".join(self._pieces))
        if answer is None:
            return
        self.bodies.append(answer)
        self._pieces.clear()
        self._left -= 1
        if self._left:
            self._transport.write(self._message)
        else:
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            if self._left:
                self.done.set_exception(ConnectionError(f"closed with {self._left} streams to go: {exc}"))
            else:
                self.done.set_result(None)


async def streams(host: str, port: int, connections: int, count: int, pause_ms: int | None) -> dict[str, Any]:
    """Hold connections that stream at once; answer the number of tokens and the seconds it took."""
    loop = asyncio.get_running_loop()
    message = request(host, port, stream=True, pause_ms=pause_ms)
    began = time.perf_counter()
    pairs = await asyncio.gather(
        *(loop.create_connection(lambda: Stream(message, count), host, port) for _ in range(connections))
    )
    await asyncio.gather(*(protocol.done for _, protocol in pairs))
    seconds = time.perf_counter() - began
    tokens = 0
    for _, protocol in pairs:
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


async def main() -> None:
    """Serve commands until stdin ends."""
    for line in sys.stdin:
        command = json.loads(line)
        do = command.pop("do")
        try:
            answer = plain(**command) if do == "plain" else await {"streams": streams, "idle": idle}[do](**command)
        except Exception as error:  # everything is the driver's to report
            answer = {"error": f"{type(error).__name__}: {error}"}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    uvloop.run(main())
