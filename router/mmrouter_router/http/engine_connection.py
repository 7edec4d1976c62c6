"""One HTTP/1.1 connection to an engine: writes requests, parses answers by httptools, and stops reading in time.

It stops reading while the consumer is behind, so a slow client holds at most ``HIGH_WATER`` bytes.
"""

import asyncio
import ssl
from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol, cast

import httptools

from mmrouter_router.core.errors import is_exhausted

Address = tuple[str, int]
HIGH_WATER = 256 * 1024
HEAD_LIMIT = 64 * 1024  # bytes of an answer's heads with all 1xx answers, and of framing between two pieces of its body
PIECE = 1 << 20  # bytes of a request that one turn of the loop copies
Body = bytes | tuple[bytes | memoryview, ...]  # of a request: one buffer, or several that are too large to be joined


def address(ip: str, port: int) -> str:
    """Return an address as URLs and headers have it: an IPv6 one stands in brackets."""
    return f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"


class Sink(Protocol):
    """The consumer of a body, with back pressure."""

    @property
    def full(self) -> bool:
        """Whether the source should pause."""

    def when_writable(self, callback: Callable[[], None] | None) -> None:
        """Set the function that is called when the sink is no longer full; ``None``: none."""

    def write(self, piece: bytes) -> None: ...


class Source(Protocol):
    """The body of an engine's answer, which may still be arriving."""

    def remaining(self) -> bytes | None:
        """Return the unread bytes of a complete body, ``None`` of an incomplete one."""

    async def piece(self) -> bytes:
        """Return the next bytes, empty at the end."""

    async def pour(self, sink: Sink) -> None:
        """Write the unread bytes into a sink as they arrive; return at the end of the body."""


class UpstreamError(ConnectionError):
    """The engine is unreachable or broke off; ``sent``: it may have the request, ``began``: it began to answer."""

    def __init__(self, message: str, *, sent: bool, began: bool = False) -> None:
        super().__init__(message)
        self.sent, self.began = sent, began

    @property
    def exhausted(self) -> bool:
        """Whether this process lacked memory or file descriptors, which is no fault of the engine."""
        return self.__cause__ is not None and is_exhausted(self.__cause__)


class EngineConnection(asyncio.Protocol):
    """One connection to an engine; parses one answer at a time. ``context``: the trust that authenticated it."""

    def __init__(self, loop: asyncio.AbstractEventLoop, context: ssl.SSLContext | None = None) -> None:
        self._loop, self.context = loop, context
        self.transport: asyncio.Transport  # from connection_made on
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.idle_since = 0.0
        self.complete = True
        self.silence = 0  # periods without a byte, counted by the stall watch
        self.stalled = False  # ended by that watch
        self._unparsed = 0  # bytes received since the parser's last callback that counts as progress
        self._fault = "the engine closed the connection"
        self._full = False  # more of a request is written than the engine has read
        self.closed = self._paused = self._began = self._headers_done = self._keep_alive = False
        self._parser: httptools.HttpResponseParser | None = None
        self._chunks: deque[bytes] = deque()
        self.buffered = 0
        self._wake: asyncio.Future[None] | None = None
        self._sink: Sink | None = None
        self.on_lost: Callable[[], None] | None = None

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._parser is None:  # bytes without a request: the connection is out of step
            self.close()
            return
        self._began, self.silence = True, 0
        self._unparsed += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._fault = "the engine's answer is not valid HTTP"
            self.close()
        if self._unparsed > HEAD_LIMIT:  # endless 1xx answers, headers, trailers or chunk extensions
            self._fault = f"the head of the engine's answer is larger than {HEAD_LIMIT} bytes"
            self.close()
        if self._sink is not None:
            self._flush(self._sink)
            if not self.complete and not self.closed:
                return  # pour() waits for the end only
        self._notify()

    def pause_writing(self) -> None:
        self._full = True

    def resume_writing(self) -> None:
        self._full = False
        self._notify()

    def connection_lost(self, exc: Exception | None) -> None:
        by_engine, self.closed = not self.closed, True
        if by_engine and exc is None and self._headers_done:
            names = {name for name, _ in self.headers}
            if b"content-length" not in names and b"transfer-encoding" not in names:
                self.complete = True  # the close ends the body
        self._parser = None  # break the reference cycle so that both are freed without the garbage collector
        if self.on_lost is not None:
            self.on_lost()
            self.on_lost = None
        self._notify()

    # -- httptools

    def on_message_begin(self) -> None:
        if self._headers_done:  # a second answer to one request
            raise ConnectionError("an answer without a request")

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._headers_done:  # trailers are no headers of the answer
            self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        parser = self._parser
        assert parser is not None
        self.status = parser.get_status_code()
        self._keep_alive = parser.should_keep_alive()
        if self.status >= 200:
            self._headers_done, self._unparsed = True, 0
        else:
            self.headers.clear()  # 1xx: the final answer follows

    def on_body(self, body: bytes) -> None:
        self._unparsed = 0
        self._chunks.append(body)
        self.buffered += len(body)
        if self.buffered > HIGH_WATER:
            self._pause()

    def on_message_complete(self) -> None:
        if self._headers_done:
            self.complete, self._unparsed = True, 0

    # -- use

    async def send(self, head: bytes, body: Body) -> None:
        """Send one request and wait for the answer's headers, which may precede the end of the request."""
        self.status, self.headers, self.complete = 0, [], False
        self.silence = 0
        self._began = self._headers_done = False
        self._unparsed = 0
        self._parser = httptools.HttpResponseParser(self)
        parts = (head, body) if isinstance(body, bytes) else (head, *body)
        if sum(map(len, parts)) <= PIECE:
            self.transport.writelines(parts)
        else:
            await self._write_pieces(parts)
        while not self._headers_done:
            if self.closed:
                raise UpstreamError(self._fault, sent=True, began=self._began)
            await self._wait()

    async def _write_pieces(self, parts: Iterable[bytes | memoryview]) -> None:
        """Write a large request, in other turns of the loop while the engine reads; until it answers or closes."""
        for part in parts:
            for start in range(0, len(part), PIECE):
                while self._full and not (self.closed or self._headers_done):
                    await self._wait()
                if self.closed or self._headers_done:  # an engine may refuse a request without reading it
                    self._keep_alive = False
                    return
                self.transport.write(memoryview(part)[start : start + PIECE])
                await asyncio.sleep(0)

    async def piece(self) -> bytes:
        """Return the body's next bytes, de-chunked; empty at its end. Raises :class:`UpstreamError`."""
        while not self._chunks:
            if self.complete:
                return b""
            if self.closed:
                raise UpstreamError("the engine broke off its answer", sent=True, began=True)
            await self._wait()
        data = self._take_buffered()
        self._resume()
        return data

    def remaining(self) -> bytes | None:
        if not self.complete:
            return None
        data = self._take_buffered() if self._chunks else b""
        self._resume()
        return data

    async def pour(self, sink: Sink) -> None:
        """Write the body into a sink as it arrives; return at its end. Raises what :meth:`piece` raises."""
        self._sink = sink
        sink.when_writable(self._resume)
        try:
            self._flush(sink)
            while not self.complete:
                if self.closed:
                    raise UpstreamError("the engine broke off its answer", sent=True, began=True)
                await self._wait()
        finally:
            self._sink = None
            sink.when_writable(None)

    def _flush(self, sink: Sink) -> None:
        if self._chunks:
            try:
                sink.write(self._take_buffered())
            except ValueError:  # more bytes than the answer's content-length
                self.close()
            if sink.full:
                self._pause()

    def _take_buffered(self) -> bytes:
        data = self._chunks.popleft() if len(self._chunks) == 1 else b"".join(self._chunks)
        self._chunks.clear()
        self.buffered = 0
        return data

    def _pause(self) -> None:
        if not self._paused and not self.closed:
            self._paused = True
            self.transport.pause_reading()

    def _resume(self) -> None:
        if self._paused and not self.closed:
            self._paused = False
            self.transport.resume_reading()

    @property
    def paused(self) -> bool:
        """Whether reading is paused because the consumer is slower than the engine."""
        return self._paused

    @property
    def reusable(self) -> bool:
        if not self.complete or not self._keep_alive or self.closed or self._chunks:
            return False
        return not self.transport.get_write_buffer_size()  # an engine may answer before it has read the request

    def close(self) -> None:
        """Abort the connection; the engine sees a disconnect and aborts the request."""
        self.closed = True
        self.transport.abort()

    async def _wait(self) -> None:
        self._wake = self._loop.create_future()
        try:
            await self._wake
        finally:
            self._wake = None

    def _notify(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)
