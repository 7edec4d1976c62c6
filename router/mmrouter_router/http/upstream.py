"""HTTP/1.1 client of the data path: pooled connections, httptools parser, answer bytes passed on as they come.

The hot route has its own transport because a general client costs several times the CPU of a decision (facts on
performance 3). It speaks only what engines speak: one request at a time per connection, no redirects, no cookies,
no proxies. Reading stops while the consumer is behind, so a slow client holds at most ``HIGH_WATER`` bytes.

A consumer takes pieces, or has them poured into a client's connection in the moment they come (:mod:`.tap`).
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from functools import partial
from typing import Protocol, cast

import httptools

HIGH_WATER = 256 * 1024
Body = bytes | tuple[bytes | memoryview, ...]
"""What is sent: at once, or in pieces that nobody puts together, because they are large."""
IDLE_SECONDS = 4.0
"""uvicorn closes idle connections after 5 s; ours are given up earlier, so that a reuse rarely meets a close."""


class Sink(Protocol):
    """Where a body is poured into."""

    @property
    def full(self) -> bool:
        """Whether nothing more should be written now."""
        ...

    def when_room(self, then: Callable[[], None] | None) -> None:
        """Have a function called whenever it is not full any more; ``None`` ends that."""
        ...

    def write(self, piece: bytes) -> None:
        """Take a piece."""
        ...


class UpstreamError(ConnectionError):
    """The engine could not be reached or broke off; ``sent``: it may have the request, ``began``: it answered."""

    def __init__(self, message: str, *, sent: bool, began: bool = False) -> None:
        super().__init__(message)
        self.sent = sent
        self.began = began


class _Connection(asyncio.Protocol):
    """One connection; parses one answer at a time."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.transport: asyncio.Transport | None = None
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.idle_since = 0.0
        self.closed = False
        self.complete = True
        self._parser: httptools.HttpResponseParser | None = None
        self._chunks: deque[bytes] = deque()
        self._buffered = 0
        self._paused = False
        self._wake: asyncio.Future[None] | None = None
        self._began = False
        self._headers_done = False
        self._keep_alive = False
        self._sink: Sink | None = None
        self.on_lost: Callable[[], None] | None = None

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._parser is None:  # bytes that nobody asked for: the connection cannot be trusted any more
            self.close()
            return
        self._began = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.close()
        if self._sink is not None:
            self._spill(self._sink)
            if not self.complete and not self.closed:
                return  # nothing for whoever waits: it is there for the end
        self._notify()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        if exc is None and not self.complete and self._headers_done and self._ends_with_close():
            self.complete = True
        self._parser = None  # which knows this connection: without it both go at once
        if self.on_lost is not None:
            self.on_lost()
            self.on_lost = None
        self._notify()

    # -- httptools

    def on_message_begin(self) -> None:
        if self._headers_done:  # not of the next request's: it has not been sent
            raise ConnectionError("an answer that nobody asked for")

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._headers_done:  # else it stands behind the body, and is no header of the answer
            self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        parser = self._parser
        assert parser is not None
        self.status = parser.get_status_code()
        self._keep_alive = parser.should_keep_alive()
        if self.status >= 200:
            self._headers_done = True
        else:
            self.headers.clear()  # 1xx: the real answer follows

    def on_body(self, body: bytes) -> None:
        self._chunks.append(body)
        self._buffered += len(body)
        if self._buffered > HIGH_WATER:
            self._hold()

    def on_message_complete(self) -> None:
        if self._headers_done:
            self.complete = True

    # -- use

    async def send(self, head: bytes, body: Body) -> None:
        """Send one request and wait for the answer's headers, which may come before all of the request is out."""
        assert self.transport is not None
        self.status, self.headers, self.complete = 0, [], False
        self._began = self._headers_done = False
        self._parser = httptools.HttpResponseParser(self)
        self.transport.writelines((head, body) if isinstance(body, bytes) else (head, *body))
        while not self._headers_done:
            if self.closed:
                raise UpstreamError("the engine closed the connection", sent=True, began=self._began)
            await self._wait()

    async def piece(self) -> bytes:
        """Return the body's next bytes, empty at its end. Raises :class:`UpstreamError` when the answer breaks off."""
        while not self._chunks:
            if self.complete:
                return b""
            if self.closed:
                raise UpstreamError("the engine broke off its answer", sent=True, began=True)
            await self._wait()
        data = self._taken()
        self._go_on()
        return data

    def rest(self) -> bytes | None:
        """Return what has not been taken of a body that is complete, ``None`` of any other."""
        if not self.complete:
            return None
        data = self._taken() if self._chunks else b""
        self._go_on()
        return data

    async def pour(self, sink: Sink) -> None:
        """Write the rest of the body into a sink as it comes. Raises what :meth:`piece` raises."""
        self._sink = sink
        sink.when_room(self._go_on)
        try:
            if self._chunks:
                self._spill(sink)
            while not self.complete:
                if self.closed:
                    raise UpstreamError("the engine broke off its answer", sent=True, began=True)
                await self._wait()
        finally:
            self._sink = None
            sink.when_room(None)

    def _spill(self, sink: Sink) -> None:
        """Write what is there."""
        if self._chunks:
            try:
                sink.write(self._taken())
            except ValueError:  # the engine says more than it said it would
                self.close()
            if sink.full:
                self._hold()

    def _taken(self) -> bytes:
        data = self._chunks.popleft() if len(self._chunks) == 1 else b"".join(self._chunks)
        self._chunks.clear()
        self._buffered = 0
        return data

    def _hold(self) -> None:
        """Stop reading until there is room."""
        if not self._paused and self.transport is not None and not self.closed:
            self._paused = True
            self.transport.pause_reading()

    def _go_on(self) -> None:
        if self._paused and self.transport is not None and not self.closed:
            self._paused = False
            self.transport.resume_reading()

    @property
    def reusable(self) -> bool:
        if not self.complete or not self._keep_alive or self.closed or self._chunks or self.transport is None:
            return False
        return not self.transport.get_write_buffer_size()  # an engine may answer what it has not read

    def close(self) -> None:
        """Drop the connection: the engine sees a disconnect and aborts the request."""
        self.closed = True
        if self.transport is not None:
            self.transport.abort()

    def _ends_with_close(self) -> bool:
        names = {name for name, _ in self.headers}
        return b"content-length" not in names and b"transfer-encoding" not in names

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
    """An engine's answer: status and headers now, body as it comes. Call ``close`` in every case."""

    def __init__(self, pool: "Upstream", address: tuple[str, int], connection: _Connection) -> None:
        self._pool, self._address, self._connection = pool, address, connection
        self.status = connection.status
        self.headers = connection.headers

    @property
    def whole(self) -> bool:
        """Whether all of it has come."""
        return self._connection.complete

    async def piece(self) -> bytes:
        """Return the body's next bytes, de-chunked, as they arrived; empty at its end.

        Raises :class:`UpstreamError` when the answer breaks off.
        """
        return await self._connection.piece()

    def rest(self) -> bytes | None:
        """Return what has not been read, where all of it is there; ``None`` where some is still to come."""
        return self._connection.rest()

    async def body(self) -> AsyncIterator[bytes]:
        """Yield the rest of the body's bytes, piece by piece. Raises what :meth:`piece` raises."""
        while piece := await self._connection.piece():
            yield piece

    async def pour(self, sink: Sink) -> None:
        """Write the rest of the body into a sink as it comes; return when all of it is there.

        Raises what :meth:`piece` raises.
        """
        await self._connection.pour(sink)

    async def read(self, limit: int) -> bytes:
        """Return the whole body, at most ``limit`` bytes of it."""
        data = bytearray()
        async for piece in self.body():
            data += piece
            if len(data) >= limit:
                break
        return bytes(data[:limit])

    def close(self) -> None:
        """Give the connection back, or drop it when the answer was not read to its end (the engine then aborts)."""
        self._pool.release(self._address, self._connection)


class Upstream:
    """A pool of connections to engines, keyed by address."""

    def __init__(self, *, connect_seconds: float = 2.0) -> None:
        self._idle: dict[tuple[str, int], list[_Connection]] = {}
        self._connect_seconds = connect_seconds

    async def request(
        self, host: str, port: int, method: str, path: str, headers: Mapping[str, str], body: Body = b""
    ) -> Answer:
        """Send a request and return once the answer's headers are there. Raises :class:`UpstreamError`.

        A kept connection that turns out to be closed before the engine said anything is replaced by a fresh one once.
        """
        address = (host, port)
        length = len(body) if isinstance(body, bytes) else sum(map(len, body))
        head = _head(method, path, host, port, headers.items(), length)
        connection = self._take(address)
        if connection is not None:
            try:
                return await self._exchange(address, connection, head, body)
            except UpstreamError as error:
                if error.began:
                    raise
            try:
                fresh = await self._connect(address)
            except UpstreamError as error:
                # Not an idle close: the engine is gone, and it may have gone with this request.
                raise UpstreamError(str(error), sent=True) from error
            return await self._exchange(address, fresh, head, body)
        return await self._exchange(address, await self._connect(address), head, body)

    def release(self, address: tuple[str, int], connection: _Connection) -> None:
        """Keep a connection whose answer was read whole, drop any other."""
        if connection.reusable:
            connection.idle_since = time.monotonic()
            self._idle.setdefault(address, []).append(connection)
        else:
            connection.close()

    def close(self) -> None:
        """Drop all idle connections."""
        for connections in self._idle.values():
            for connection in connections:
                connection.close()
        self._idle.clear()

    async def _exchange(self, address: tuple[str, int], connection: _Connection, head: bytes, body: Body) -> Answer:
        try:
            await connection.send(head, body)
        except BaseException:
            connection.close()
            raise
        return Answer(self, address, connection)

    def _take(self, address: tuple[str, int]) -> _Connection | None:
        oldest = time.monotonic() - IDLE_SECONDS
        idle = self._idle.get(address, [])
        while idle:
            connection = idle.pop()
            if not connection.closed and connection.idle_since > oldest:
                return connection
            connection.close()
        return None

    async def _connect(self, address: tuple[str, int]) -> _Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_seconds):
                _, connection = await loop.create_connection(partial(_Connection, loop), *address)
        except (OSError, TimeoutError) as error:
            raise UpstreamError(f"cannot connect to {address[0]}:{address[1]}", sent=False) from error
        connection.on_lost = lambda: self._lost(address, connection)
        return connection

    def _lost(self, address: tuple[str, int], connection: _Connection) -> None:
        """Forget a connection that is closed: nobody asks for those of an engine that is gone."""
        idle = self._idle.get(address)
        if idle is not None:
            if connection in idle:
                idle.remove(connection)
            if not idle:
                del self._idle[address]


def _head(method: str, path: str, host: str, port: int, headers: Iterable[tuple[str, str]], length: int) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", f"host: {host}:{port}", f"content-length: {length}"]
    lines += [f"{name}: {value}" for name, value in headers]
    head = "\r\n".join(lines)
    if head.count("\r\n") != len(lines) - 1:
        raise ValueError("a header value holds a line break")
    return head.encode("latin-1") + b"\r\n\r\n"
