"""One request of a hot route, whose task reads its body from and writes its answer to the client's connection."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any, Final, Protocol

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE
from uvicorn.server import ServerState

from mmrouter_router.core.errors import RequestError
from mmrouter_router.http.body_budget import BodyReservation
from mmrouter_router.http.client_channel import ClientGoneError, Headers, declared_length
from mmrouter_router.http.engine_connection import Source
from mmrouter_router.http.received_body import ReceivedBody

log = logging.getLogger("mmrouter.http")

LARGE_BODY: Final = 64 * 1024  # missing bytes of a body from which they are read into one buffer without the parser
_FAILED: Final = b"Internal Server Error"


class Connection(Protocol):
    """What a hot request uses of its client's connection (:mod:`.connection`)."""

    loop: asyncio.AbstractEventLoop
    transport: asyncio.Transport
    flow: FlowControl
    server_state: ServerState
    on_writable: Callable[[], None] | None

    def read_body(
        self, pieces: Sequence[bytes | bytearray], length: int, done: asyncio.Future[bytearray], held: BodyReservation
    ) -> None: ...

    def linger(self) -> None: ...

    def on_response_complete(self) -> None: ...


Handler = Callable[["HotRequest"], Awaitable[None]]


class HotRequest:
    """A :class:`~mmrouter_router.http.client_channel.Client`, and the sink of its answer."""

    message_event: Final = asyncio.Event()  # uvicorn sets it on its own cycles; the input comes through :meth:`feed`
    scope: Final[MutableMapping[str, Any]] = {}
    gateway: Final[None] = None  # the router sends the request itself

    def __init__(self, connection: Connection, path: str, headers: Headers, keep_alive: bool, chunked: bool) -> None:
        """``chunked``: the client understands chunks; else the connection's end delimits an answer without a length."""
        self.method, self.path, self.keep_alive = "POST", path, keep_alive
        self.headers, self._chunked = headers, chunked
        self.task: asyncio.Task[None] | None = None
        self.response_started = self.response_complete = self.disconnected = False
        self._connection, self._transport = connection, connection.transport
        self._received = ReceivedBody()  # by the parser
        self.more_body = True
        self._wake_per_piece = False  # the length is unknown, so the reader checks the limit at every piece
        self._wake: asyncio.Future[Any] | None = None
        self._left: int | None = None  # bytes of the answer's body to be written, None where its length is unknown

    async def run(self, handler: Handler) -> None:
        """Run the handler; close the connection of an incomplete answer, so that the client sees the truncation."""
        try:
            await handler(self)
        except BaseException as error:
            log.error("%s: request failed", self.path, exc_info=error)
            if not self.response_started:
                length = (b"content-length", b"%d" % len(_FAILED))
                self.keep_alive = False
                await self.respond(500, ((b"content-type", b"text/plain; charset=utf-8"), length), _FAILED)
        finally:
            if not self.response_complete and not self.disconnected:
                self._transport.close()

    # -- request -----------------------------------------------------------------------------------------------------

    @property
    def gone(self) -> bool:
        return self.disconnected

    @property
    def begun(self) -> bool:
        return self.response_started

    def disconnect(self) -> None:
        if not self.response_complete and self.task is not None and not self.task.cancelling():
            self.disconnected = True
            self.task.cancel()

    @property
    def size(self) -> int:
        """Bytes of the body that the parser has delivered."""
        return self._received.size

    @property
    def waiting(self) -> bool:
        return self._wake is not None and not self._wake.done()

    def refuse_body(self, error: RequestError) -> None:
        if self._wake is not None and not self._wake.done():
            self.keep_alive = False
            self._wake.set_exception(error)

    def feed(self, piece: bytes | None) -> None:
        """Add a piece of the body; ``None``: the body is complete."""
        if self.response_complete:
            return
        if piece is None:
            self.more_body = False
        else:
            self._received.add(piece)
        if (not self.more_body or self._wake_per_piece) and self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    async def body(self, limit: int, held: BodyReservation) -> bytes | bytearray:
        length = declared_length(self.headers, limit, held)
        self._wake_per_piece = length is None
        if length is not None and length - self.size > LARGE_BODY and self.more_body:
            done: asyncio.Future[bytearray] = self._connection.loop.create_future()
            self._wake = done
            self._connection.read_body(self._received.pieces, length, done, held)
            return await done
        self._connection.flow.resume_reading()
        while True:
            if self.size > limit:
                raise RequestError.too_large(limit)
            held.grow(self.size)
            if not self.more_body:
                break
            if self.disconnected:
                raise ClientGoneError
            self._wake = self._connection.loop.create_future()
            await self._wake
        held.complete()
        return await self._received.whole()

    # -- answer ------------------------------------------------------------------------------------------------------

    async def respond(self, status: int, headers: Headers, body: bytes) -> None:
        if not self.disconnected:
            self._transport.write(self._head(status, headers) + body)
            self._complete_response()

    async def stream(self, status: int, headers: Headers, first: bytes, source: Source) -> None:
        if self.disconnected:
            return
        head = self._head(status, headers)
        remaining = source.remaining()
        if remaining is not None and self._left == len(first) + len(remaining):
            self._transport.write(b"".join((head, first, remaining)))
            self._complete_response()
            return
        if first and self._left is None and self._chunked:
            self._transport.write(b"%b%x\r\n%b\r\n" % (head, len(first), first))
        else:
            self._transport.write(head)
            if first:
                self.write(first)
        if remaining:
            self.write(remaining)
        await source.pour(self)
        if self.disconnected:
            return
        if self._left:
            raise ConnectionError("the answer is shorter than its content-length")
        if self._left is None and self._chunked:
            self._transport.write(b"0\r\n\r\n")
        self._complete_response()

    @property
    def full(self) -> bool:
        return self._connection.flow.write_paused

    def when_writable(self, callback: Callable[[], None] | None) -> None:
        self._connection.on_writable = callback

    def write(self, piece: bytes) -> None:
        """Write a piece; nothing after a disconnect. Raises ``ValueError`` for bytes beyond the content-length."""
        if self.disconnected or self.response_complete:
            return
        if self._left is None:
            self._transport.write(b"%x\r\n%b\r\n" % (len(piece), piece) if self._chunked else piece)
            return
        if len(piece) > self._left:
            raise ValueError("the answer is longer than its content-length")
        self._left -= len(piece)
        self._transport.write(piece)

    def _head(self, status: int, headers: Headers) -> bytes:
        """Return the answer's head and note how its body is delimited. Raises ``ValueError`` for a header injection."""
        lines = [STATUS_LINE[status]]
        for name, value in self._connection.server_state.default_headers:
            lines.append(b"%b: %b\r\n" % (name, value))
        if status in (204, 304):
            self._left = 0
        for name, value in headers:
            if name == b"content-length":
                self._left = int(value)
            lines.append(b"%b: %b\r\n" % (name, value))
        if not self.keep_alive:
            lines.append(b"connection: close\r\n")
        if self._left is None and self._chunked:
            lines.append(b"transfer-encoding: chunked\r\n")
        head = b"".join(lines)
        if head.count(b"\n") != len(lines) or head.count(b"\r") != len(lines):
            raise ValueError("a header holds a line break")
        self.response_started = True
        return head + b"\r\n"

    def _complete_response(self) -> None:
        self.response_complete = True
        self._received.pieces = []
        if not self.keep_alive and not self.more_body:
            self._transport.close()
        elif not self.keep_alive:
            self._connection.linger()
        self._connection.on_response_complete()
