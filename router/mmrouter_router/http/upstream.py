"""HTTP/1.1 client for engines: pooled connections, httptools parser, answers passed on as they arrive.

It speaks only what engines speak, because a general client costs several times the CPU of a routing decision. It stops
reading while the consumer is behind, so a slow client holds at most ``HIGH_WATER`` bytes.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from functools import partial
from typing import Protocol, cast

import httptools

Address = tuple[str, int]
HIGH_WATER = 256 * 1024
HEAD_LIMIT = 64 * 1024  # bytes of an answer's heads with all 1xx answers, and of framing between two pieces of its body
Body = bytes | tuple[bytes | memoryview, ...]  # of a request: one buffer, or several that are too large to be joined
IDLE_SECONDS = 4.0  # uvicorn closes idle connections after 5 s, so a reuse rarely meets a close


class Sink(Protocol):
    """The consumer of a body, with back pressure."""

    @property
    def full(self) -> bool:
        """Whether the source should pause."""

    def when_writable(self, callback: Callable[[], None] | None) -> None:
        """Set the function that is called when the sink is no longer full; ``None``: none."""

    def write(self, piece: bytes) -> None: ...


class UpstreamError(ConnectionError):
    """The engine is unreachable or broke off; ``sent``: it may have the request, ``began``: it began to answer."""

    def __init__(self, message: str, *, sent: bool, began: bool = False) -> None:
        super().__init__(message)
        self.sent, self.began = sent, began


class EngineConnection(asyncio.Protocol):
    """One connection to an engine; parses one answer at a time."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.transport: asyncio.Transport  # from connection_made on
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.idle_since = 0.0
        self.complete = True
        self.silence = 0  # periods without a byte, counted by the stall watch
        self.stalled = False  # ended by that watch
        self._unparsed = 0  # bytes received since the parser's last callback that counts as progress
        self._fault = "the engine closed the connection"
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

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        if exc is None and self._headers_done:
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
        self.transport.writelines((head, body) if isinstance(body, bytes) else (head, *body))
        while not self._headers_done:
            if self.closed:
                raise UpstreamError(self._fault, sent=True, began=self._began)
            await self._wait()

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


class Answer:
    """An engine's answer: status and headers, and its body as it arrives. Call ``close`` in every case."""

    def __init__(self, pool: "Upstream", address: Address, connection: EngineConnection) -> None:
        self._pool, self._address, self.connection = pool, address, connection
        self.status, self.headers = connection.status, connection.headers
        self.piece, self.remaining, self.pour = connection.piece, connection.remaining, connection.pour

    @property
    def complete(self) -> bool:
        return self.connection.complete

    async def body(self) -> AsyncIterator[bytes]:
        """Yield the unread pieces of the body. Raises what :meth:`piece` raises."""
        while piece := await self.piece():
            yield piece

    async def read(self, limit: int) -> bytes:
        data = bytearray()
        while len(data) < limit and (piece := await self.piece()):
            data += piece
        return bytes(data[:limit])

    def close(self) -> None:
        """Return the connection to the pool, or abort it where the answer was not read to its end."""
        self._pool.release(self._address, self.connection)


class Upstream:
    """A pool of connections to engines, keyed by address."""

    def __init__(self, *, connect_seconds: float = 2.0) -> None:
        self._idle: dict[Address, list[EngineConnection]] = {}
        self._active: dict[Address, set[EngineConnection]] = {}  # with a request in progress
        self._connect_seconds = connect_seconds

    async def request(
        self, host: str, port: int, method: str, path: str, headers: Mapping[str, str], body: Body = b""
    ) -> Answer:
        """Send a request; return at the answer's headers. Retries a closed idle connection. Raises UpstreamError."""
        address = (host, port)
        length = len(body) if isinstance(body, bytes) else sum(map(len, body))
        head = _head(method, path, host, port, headers.items(), length)
        idle = self._take(address)
        if idle is not None:
            try:
                return await self._exchange(address, idle, head, body)
            except UpstreamError as error:
                if error.began:
                    raise
        # Where a fresh connection fails, too, the engine is down, possibly because of this request.
        connection = await self._connect(address, sent=idle is not None)
        return await self._exchange(address, connection, head, body)

    async def ask(
        self, address: Address, method: str, path: str, headers: Mapping[str, str], body: Body = b"", *, limit: int
    ) -> tuple[int, bytes]:
        """Send a request; return status and complete answer. Raises :class:`UpstreamError`, also above the limit."""
        answer = await self.request(*address, method, path, headers, body)
        try:
            return answer.status, await answer.read(limit)
        finally:
            answer.close()

    def active(self) -> tuple[Address, ...]:
        """Return the addresses with requests in progress."""
        return tuple(self._active)

    def count_silence(self, address: Address) -> int:
        """Count a period without a byte on each connection in use to an address; return the largest count."""
        connections = self._active.get(address, ())
        for connection in connections:
            connection.silence = 0 if connection.paused else connection.silence + 1
        return max((connection.silence for connection in connections), default=0)

    def end_silent(self, address: Address, periods: float) -> None:
        """Close the connections to an address that were silent for that many periods."""
        for connection in tuple(self._active.get(address, ())):
            if connection.silence >= periods:
                connection.stalled = True
                connection.close()

    def release(self, address: Address, connection: EngineConnection) -> None:
        self._deactivate(address, connection)
        if connection.reusable:
            connection.idle_since = time.monotonic()
            self._idle.setdefault(address, []).append(connection)
        else:
            connection.close()

    def idle_connections(self, host: str, port: int) -> int:
        return len(self._idle.get((host, port), ()))

    def close(self) -> None:
        for connections in self._idle.values():
            for connection in connections:
                connection.close()
        self._idle.clear()

    async def _exchange(self, address: Address, connection: EngineConnection, head: bytes, body: Body) -> Answer:
        self._active.setdefault(address, set()).add(connection)
        try:
            await connection.send(head, body)
        except BaseException:
            self._deactivate(address, connection)
            connection.close()
            raise
        return Answer(self, address, connection)

    def _deactivate(self, address: Address, connection: EngineConnection) -> None:
        active = self._active.get(address)
        if active is not None:
            active.discard(connection)
            if not active:
                del self._active[address]

    def _take(self, address: Address) -> EngineConnection | None:
        oldest = time.monotonic() - IDLE_SECONDS
        idle = self._idle.get(address, [])
        while idle:
            connection = idle.pop()
            if not connection.closed and connection.idle_since > oldest:
                return connection
            connection.close()
        return None

    async def _connect(self, address: Address, *, sent: bool) -> EngineConnection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_seconds):
                _, connection = await loop.create_connection(partial(EngineConnection, loop), *address)
        except (OSError, TimeoutError) as error:
            raise UpstreamError(f"cannot connect to {address[0]}:{address[1]}", sent=sent) from error
        connection.on_lost = lambda: self._forget(address, connection)
        return connection

    def _forget(self, address: Address, connection: EngineConnection) -> None:
        """Remove a closed connection, which no request would take once its engine is gone."""
        idle = self._idle.get(address, [])
        if connection in idle:
            idle.remove(connection)
        if not idle:
            self._idle.pop(address, None)


def _head(method: str, path: str, host: str, port: int, headers: Iterable[tuple[str, str]], length: int) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", f"host: {host}:{port}", f"content-length: {length}"]
    lines += [f"{name}: {value}" for name, value in headers]
    head = "\r\n".join(lines)
    if head.count("\r\n") != len(lines) - 1:
        raise ValueError("a header value holds a line break")
    return head.encode("latin-1") + b"\r\n\r\n"
