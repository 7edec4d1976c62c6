"""A lean HTTP/1.1 client for load generators, shared by `mmrouter bench` and the benchmarks of ``bench/``.

Answers are handed to a :class:`Receiver` from within the event loop's read callback: no task switch and no queue lies
between a token's arrival and its timestamp, and a client costs little of the CPU that it shares with what it measures.
"""

import asyncio
import os
import ssl
import time
from collections.abc import Mapping
from typing import cast
from urllib.parse import urlsplit

import httptools

CONNECT_SECONDS = 10.0
KEEP_ALIVE_SECONDS = 2.0
"""Idle connections are closed before servers close them: a request sent into a closing connection would fail."""

clock = time.perf_counter


class ConnectError(Exception):
    """No connection could be opened; the message is the system's."""


class Receiver:
    """Takes the parts of one answer. A method that raises ends the exchange with that error."""

    connection: "Connection"
    """The connection that the answer comes over; set by :meth:`Connection.send`."""

    def on_head(self, status: int, headers: Mapping[str, str]) -> None:
        """Take the status and the headers, whose names are in lower case."""

    def on_data(self, data: bytes) -> None:
        """Take a part of the body as it arrives."""

    def on_end(self, error: Exception | None) -> None:
        """Take the end: ``None`` for a complete answer. Called once, and last."""


class Connection(asyncio.Protocol):
    """One connection, with at most one request in flight."""

    def __init__(self) -> None:
        self.reusable = False
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._receiver: Receiver | None = None
        self._ended: asyncio.Future[None] | None = None
        self._headers: dict[str, str] = {}
        self._ends_at_close = False

    def send(self, message: bytes, receiver: Receiver) -> None:
        """Send a request; ``receiver`` gets its answer."""
        assert self._transport is not None
        self._receiver, self.reusable, self._ends_at_close = receiver, False, False
        receiver.connection = self
        self._headers.clear()
        self._transport.write(message)

    async def exchange(self, message: bytes, receiver: Receiver) -> None:
        self._ended = asyncio.get_running_loop().create_future()
        self.send(message, receiver)
        await self._ended

    def close(self) -> None:
        """Close at once; a request in flight ends with ``ConnectionError``."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            self._fail(cast(Exception, error.__context__ or error))
        except httptools.HttpParserError as error:
            self._fail(ValueError(str(error)))

    def connection_lost(self, exc: Exception | None) -> None:
        self.reusable = False
        complete = self._ends_at_close and exc is None
        self._end(None if complete else exc or ConnectionResetError("the connection was closed within an answer"))

    # -- callbacks of the parser ---------------------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._ends_at_close = not {"content-length", "transfer-encoding"} & self._headers.keys()
        if self._receiver is not None:
            self._receiver.on_head(self._parser.get_status_code(), self._headers)

    def on_body(self, data: bytes) -> None:
        if self._receiver is not None:
            self._receiver.on_data(data)

    def on_message_complete(self) -> None:
        self.reusable = self._parser.should_keep_alive()
        self._end(None)

    def _fail(self, error: Exception) -> None:
        self._end(error)
        self.close()

    def _end(self, error: Exception | None) -> None:
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.on_end(error)
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)


class Client:
    """Sends requests to one endpoint over connections that it keeps and reuses."""

    def __init__(self, url: str, timeout: float, tls: ssl.SSLContext | None = None) -> None:
        """``tls``: for https; default: the system's trust."""
        parts = urlsplit(url)
        self.timeout = timeout
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = (tls or ssl.create_default_context()) if parts.scheme == "https" else None
        self._authority, self._path = parts.netloc, parts.path.rstrip("/")
        self._idle: list[tuple[float, Connection]] = []

    async def post(self, path: str, headers: Mapping[str, str], body: bytes, receiver: Receiver) -> None:
        """Send a request and return after ``receiver.on_end``.

        Raises :class:`ConnectError`, ``TimeoutError``, and ``ValueError`` for a header that would not be one line.
        """
        message = post_message(self._authority, self._path + path, headers, body)
        async with asyncio.timeout(self.timeout):
            connection = await self._connection()
            try:
                await connection.exchange(message, receiver)
            except BaseException:  # also when cancelled: half an answer makes the connection unusable
                connection.close()
                raise
        if connection.reusable:
            self._idle.append((clock() + KEEP_ALIVE_SECONDS, connection))
        else:
            connection.close()

    async def probe(self) -> None:
        """Open a connection and close it. Raises :class:`ConnectError`."""
        (await self._connection()).close()

    def close(self) -> None:
        while self._idle:
            self._idle.pop()[1].close()

    async def _connection(self) -> Connection:
        while self._idle:
            expires, connection = self._idle.pop()
            if connection.reusable and clock() < expires:
                return connection
            connection.close()
        try:
            async with asyncio.timeout(min(self.timeout, CONNECT_SECONDS)):
                return await connect(self._host, self._port, self._tls)
        except TimeoutError:
            raise ConnectError(f"no connection within {min(self.timeout, CONNECT_SECONDS):g} s") from None
        except OSError as error:
            # Names that cannot be resolved have negative numbers, which are no errno.
            known = error.errno is not None and error.errno > 0 and not isinstance(error, ssl.SSLError)
            raise ConnectError(os.strerror(error.errno or 0) if known else error.strerror or str(error)) from error


async def connect(host: str, port: int, tls: ssl.SSLContext | None = None) -> Connection:
    """Open a connection. Raises ``OSError``."""
    _, connection = await asyncio.get_running_loop().create_connection(Connection, host, port, ssl=tls)
    return connection


def post_message(authority: str, path: str, headers: Mapping[str, str], body: bytes) -> bytes:
    """Return a POST request. Raises ``ValueError`` for a header that would not be one line."""
    lines = [f"POST {path} HTTP/1.1", f"host: {authority}", f"content-length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    if any("\r" in line or "\n" in line for line in lines):
        raise ValueError("a header contains a line break")
    return "\r\n".join([*lines, "", ""]).encode() + body
