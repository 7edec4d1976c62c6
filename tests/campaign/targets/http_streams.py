"""Byte streams of clients against a router's client port, in front of an engine that answers everything.

Every stream is answered or its connection closed, with no status of 500 to 599; the router holds nothing of it
afterwards and serves the next client; the engine gets well-formed requests only, at most one for each answer.
"""

import asyncio
import json
import logging
import random
import re
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from typing import Self

import uvloop
from campaign.mutation import mutated
from campaign.target import BrokenPropertyError, Target
from unit.router.rig import PORT, Engine, LoopbackServer, http_answer
from unit.router.router_rig import heard, member, router
from waiting import until

from mmrouter_router.fleet.membership import Membership

CHAT = json.dumps({"model": "t", "messages": [{"role": "user", "content": "hello"}]}).encode()
CHOICE = {"index": 0, "message": {"role": "assistant", "content": "a"}, "finish_reason": "stop"}
ANSWER = json.dumps({"id": "chatcmpl-1", "model": "t", "created": 0, "choices": [CHOICE]}).encode()
HALF, ABORT, QUIET = b"half", b"abort", b"quiet"
"""Ends of a stream: half-closed, reset, or half-closed once the router has nothing more to say."""
ROUTES = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
BOUND_S = 30.0  # for one stream whose end the client has announced
_STATUS = re.compile(rb"(?:^|\n|})HTTP/1\.1 (\d{3}) ")


def post(path: bytes, *headers: bytes, body: bytes = CHAT, length: bool = True) -> bytes:
    lines = [b"POST " + path + b" HTTP/1.1", b"host: x", *headers]
    lines += [b"content-length: %d" % len(body)] if length else []
    return b"\r\n".join((*lines, b"", body))


def chunked(body: bytes, size: int = 20) -> bytes:
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


LAST = post(b"/v1/chat/completions", b"connection: close")
STREAMS = (
    post(b"/v1/chat/completions"),
    post(b"/v1/completions", body=b'{"model":"t","prompt":"a"}'),
    post(b"/v1/responses", body=b'{"model":"t","input":"a"}'),
    post(b"/v1/chat/completions", b"transfer-encoding: chunked", body=chunked(CHAT), length=False),
    post(b"/v1/chat/completions", b"expect: 100-continue"),
    post(b"/v1/chat/completions", b"connection: close"),
    post(b"/v1/chat/completions?a=b", b"authorization: Bearer x", b"x-mmrouter-control: t"),
    post(b"/v1/chat/completions", b"connection: upgrade", b"upgrade: h2c"),
    post(b"/v1/chat/completions") * 3,
    post(b"/v1/chat/completions") + b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n" + post(b"/v1/responses"),
    b"GET /health HTTP/1.1\r\nhost: x\r\n\r\nHEAD /v1/models HTTP/1.0\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\nhost: x\r\n\r\nPUT /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n",
    post(b"/v1/chat/completions", body=CHAT[:-2] + b" " * 70_000 + CHAT[-2:]),
)


class ChatEngine(Engine):
    """Answers everything with a chat, of which the router can make the answer to any path."""

    async def respond(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, headers: object) -> bool:
        writer.write(http_answer(200, ANSWER))
        return True


class HttpStreams(Target):
    """An input: a line with the places at which the stream is cut and how it ends, then the stream."""

    name = "http_streams"
    short = 150
    words = (
        *b"\r\n|\r\n\r\n|\r|\n| |\t|:|\0|0\r\n\r\n|1\r\na\r\n|ffffffffffffffff\r\n|;x=y".split(b"|"),
        *b"HTTP/1.0|HTTP/1.1|HTTP/2.0|PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n|POST|GET|HEAD|CONNECT|OPTIONS".split(b"|"),
        *b"/v1/chat/completions|/v1/completions|host: x\r\n|host: y\r\n|content-length: 3\r\n".split(b"|"),
        *b"content-length: 0\r\n|content-length: +3\r\n|content-length: 99999999\r\n| folded\r\n".split(b"|"),
        *b"transfer-encoding: chunked\r\n|transfer-encoding: identity\r\n|expect: 100-continue\r\n".split(b"|"),
        *b"transfer-encoding:\x0bchunked\r\n|connection: close\r\n|connection: keep-alive\r\n".split(b"|"),
        *(b"upgrade: websocket\r\n", b"authorization: Bearer \xff\r\n", STREAMS[0]),
    )

    def seeds(self) -> list[bytes]:
        return [QUIET + b"\n" + stream for stream in STREAMS]

    def draw(self, source: random.Random, kept: Sequence[bytes]) -> bytes:
        stream = mutated(
            source, [data.partition(b"\n")[2] for data in (source.choice(kept), source.choice(kept))], self.words
        )
        cuts = sorted(source.randrange(len(stream) + 1) for _ in range(source.choice((0, 0, 1, 2, 5))))
        end = source.choice((QUIET, QUIET, QUIET, HALF, ABORT)).decode()
        return " ".join((*map(str, cuts), end)).encode() + b"\n" + stream

    def __enter__(self) -> Self:
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)  # as in a router
        self._errors = Errors()
        logging.getLogger().addHandler(self._errors)
        self._stack = AsyncExitStack()
        self._runner.run(self._start())
        self._checked = 0
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.run(self._stack.aclose())
        self._runner.close()
        logging.getLogger().removeHandler(self._errors)

    async def _start(self) -> None:
        self._engine = await self._stack.enter_async_context(ChatEngine())
        self._router = await self._stack.enter_async_context(router())
        self._router.apply_membership(Membership((member(ip=self._engine.ip),)))
        heard(self._router, "uid-w0")
        self._server = await self._stack.enter_async_context(LoopbackServer(self._router.client_app()))

    def check(self, data: bytes) -> str:
        line, _, stream = data.partition(b"\n")
        words = line.split()
        cuts = [min(int(word), len(stream)) for word in words if word.isdigit() and len(word) < 9]
        end = words[-1] if words and words[-1] in (HALF, ABORT) else QUIET
        return self._runner.run(self._check(stream, sorted(cuts), end))

    async def _check(self, stream: bytes, cuts: list[int], end: bytes) -> str:
        del self._engine.requests[:], self._errors.seen[:]
        # Where the stream ends within a request the last one completes it, else it is a request of its own.
        answer = await self._exchange(stream + LAST if end == QUIET else stream, cuts, end)
        statuses = [int(status) for status in _STATUS.findall(answer)]
        if server_errors := [status for status in statuses if status >= 500]:
            raise BrokenPropertyError(f"answered with {server_errors}", "5xx")
        self._check_requests()
        await self._check_released()
        if self._errors.seen:
            raise BrokenPropertyError(f"logged: {self._errors.seen[0]}", "crash")
        if self._checked % 8 == 0:
            await self._check_next()
        self._checked += 1
        return " ".join((end.decode(), *map(str, statuses[:4])))

    async def _exchange(self, stream: bytes, cuts: list[int], end: bytes) -> bytes:
        """Send a stream and return the answers to it."""
        reader, writer = await asyncio.open_connection(self._server.ip, PORT)
        received = bytearray()
        try:
            async with asyncio.timeout(BOUND_S):
                with suppress(ConnectionError):
                    for start, stop in zip((0, *cuts), (*cuts, len(stream)), strict=True):
                        writer.write(stream[start:stop])
                        await writer.drain()
                        await asyncio.sleep(0)
                    reading = asyncio.create_task(_read(reader, received))
                    if end == QUIET:
                        await _quiet(received, reading)
                    if end in (QUIET, HALF) and not writer.is_closing():
                        writer.write_eof()
                    if end != ABORT:
                        await reading
                    reading.cancel()
        except TimeoutError:
            raise BrokenPropertyError(f"neither answered nor closed within {BOUND_S:.0f} s", "hang") from None
        finally:
            writer.transport.abort()
        return bytes(received)

    def _check_requests(self) -> None:
        """The engine got only requests of known routes, with a body of ours."""
        for path, headers, body in self._engine.requests:
            if path not in ROUTES or body.get("model") != "t" or "transfer-encoding" in headers:
                raise BrokenPropertyError(f"the engine got {path} {headers} {body}")

    async def _check_released(self) -> None:
        chat, metrics, state = self._router.chat, self._router.metrics, self._server.server.server_state
        try:
            await until(
                lambda: not (state.connections or state.tasks or chat.body_budget.held or metrics.in_flight), 60
            )
        except TimeoutError:
            raise BrokenPropertyError(
                "a connection, a request or room for a body is held after the client has gone", "hang"
            ) from None

    async def _check_next(self) -> None:
        answer = await self._exchange(LAST, [], b"")
        if not answer.startswith(b"HTTP/1.1 200 "):
            raise BrokenPropertyError(f"the next request was answered {answer[:100]!r}")


async def _read(reader: asyncio.StreamReader, received: bytearray) -> None:
    with suppress(ConnectionError):
        while data := await reader.read(65536):
            received += data


async def _quiet(received: bytearray, reading: "asyncio.Task[None]") -> None:
    """Wait until nothing has come for some turns of the loop, in which router and engine run, too."""
    size, turns = -1, 0
    while turns < 30 and not reading.done():
        await asyncio.sleep(0)
        size, turns = len(received), turns + 1 if len(received) == size else 0


class Errors(logging.Handler):
    """Errors that a process logs, in particular of handlers that raise."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append(self.format(record))
