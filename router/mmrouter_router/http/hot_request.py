"""One request of a hot route, whose task writes its answer to the client's connection (:mod:`.tap`) itself."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final, Protocol

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE
from uvicorn.server import ServerState

from mmrouter_router.core.errors import RequestError
from mmrouter_router.http.client_channel import ClientGoneError, Headers, Source, declared

log = logging.getLogger("mmrouter.tap")

LARGE: Final = 64 * 1024
"""Bytes of a body that are still to come from which they are read into one place."""
_FAILED: Final = b"Internal Server Error"


class Connection(Protocol):
    """What a hot request uses of its client's connection."""

    loop: asyncio.AbstractEventLoop
    transport: asyncio.Transport
    flow: FlowControl
    server_state: ServerState
    on_room: Callable[[], None] | None

    def fill(self, pieces: list[bytes], length: int, done: asyncio.Future[bytearray]) -> None:
        """Read the rest of a body of ``length`` bytes, which begins with ``pieces``, into one buffer."""
        ...

    def linger(self) -> None:
        """Close the connection once the client has had time to read the answer."""
        ...

    def on_response_complete(self) -> None:
        """Serve the connection's next request."""
        ...


Handler = Callable[["Direct"], Awaitable[None]]


class _Unheard:
    """The event that uvicorn's connection sets for a cycle of its own; ours is told otherwise."""

    def set(self) -> None:
        """Nobody waits."""


class Direct:
    """One request of a hot route: a :class:`~mmrouter_router.http.client_channel.Client`, and a sink for its answer."""

    message_event: Final = _Unheard()
    scope: Final[MutableMapping[str, Any]] = {}

    def __init__(
        self, connection: Connection, path: str, headers: list[tuple[bytes, bytes]], keep_alive: bool, chunks: bool
    ) -> None:
        """``chunks``: whether the client knows them; else an answer of no known length ends with its connection."""
        self.method, self.path, self.keep_alive = "POST", path, keep_alive
        self.headers: Headers = headers
        self.task: asyncio.Task[None] | None = None
        self.response_complete = self.disconnected = False
        self._connection, self._transport = connection, connection.transport
        self._pieces: list[bytes] = []
        self.size = 0  # of the body that the parser has brought
        self.more_body = True
        self._each = False  # the reader looks at every piece, because nobody said how many there are
        self._wake: asyncio.Future[Any] | None = None
        self.response_started = False
        self._left: int | None = None  # bytes of the answer's body that are still to come; None: nobody knows
        self._chunks = chunks

    async def run(self, handler: Handler) -> None:
        """Have the request answered. What is not answered to its end is cut, so that the client sees it is short."""
        try:
            await handler(self)
        except BaseException as error:
            log.error("%s: not answered", self.path, exc_info=error)
            if not self.response_started:
                length = (b"content-length", b"%d" % len(_FAILED))
                self.keep_alive = False
                await self.whole(500, ((b"content-type", b"text/plain; charset=utf-8"), length), _FAILED)
        finally:
            if not self.response_complete and not self.disconnected:
                self._transport.close()

    # -- the request -------------------------------------------------------------------------------------------------

    @property
    def gone(self) -> bool:
        """Whether the client has left before its answer's end."""
        return self.disconnected

    def lost(self) -> None:
        """The connection is closed."""
        if not self.response_complete and self.task is not None and not self.task.cancelling():
            self.disconnected = True
            self.task.cancel()

    @property
    def waiting(self) -> bool:
        """Whether some of the body is awaited."""
        return self._wake is not None and not self._wake.done()

    def late(self, error: RequestError) -> None:
        """Wait no more for the body."""
        if self._wake is not None and not self._wake.done():
            self.keep_alive = False
            self._wake.set_exception(error)

    def took(self, piece: bytes | None) -> None:
        """Some of the body is there; ``None``: all of it."""
        if self.response_complete:
            return
        if piece is None:
            self.more_body = False
        else:
            self._pieces.append(piece)
            self.size += len(piece)
        if (not self.more_body or self._each) and self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    async def body(self, limit: int, grow: Callable[[int], None]) -> bytes | bytearray:
        """Return the request's body."""
        length = declared(self.headers, limit, grow)
        self._each = length is None
        if length is not None and length - self.size > LARGE and self.more_body:
            filled: asyncio.Future[bytearray] = self._connection.loop.create_future()
            self._wake = filled
            self._connection.fill(self._pieces, length, filled)
            return await filled
        self._connection.flow.resume_reading()
        while self.more_body:
            if self.size > limit:
                raise RequestError.too_large(limit)
            grow(self.size)
            if self.disconnected:
                raise ClientGoneError
            self._wake = self._connection.loop.create_future()
            await self._wake
        if self.size > limit:
            raise RequestError.too_large(limit)
        grow(self.size)
        pieces, self._pieces = self._pieces, []
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    # -- the answer --------------------------------------------------------------------------------------------------

    async def whole(self, status: int, headers: Headers, body: bytes) -> None:
        """Answer at once."""
        if not self.disconnected:
            self._transport.write(self._head(status, headers) + body)
            self._complete_response()

    async def stream(self, status: int, headers: Headers, first: bytes, source: Source) -> None:
        """Answer with ``first`` and what comes after it."""
        if self.disconnected:
            return
        head = self._head(status, headers)
        rest = source.rest()
        if rest is not None and self._left == len(first) + len(rest):
            self._transport.write(b"".join((head, first, rest)))
            self._complete_response()
            return
        if first and self._left is None and self._chunks:
            self._transport.write(b"%b%x\r\n%b\r\n" % (head, len(first), first))
        else:
            self._transport.write(head)
            if first:
                self.write(first)
        if rest:
            self.write(rest)
        await source.pour(self)
        if self.disconnected:
            return
        if self._left:
            raise ConnectionError("an answer is shorter than its head says")
        if self._left is None and self._chunks:
            self._transport.write(b"0\r\n\r\n")
        self._complete_response()

    @property
    def full(self) -> bool:
        """Whether the client is behind, so that nothing more should be written now."""
        return self._connection.flow.write_paused

    def when_room(self, then: Callable[[], None] | None) -> None:
        """Have a function called whenever the client has caught up, or is gone; ``None`` ends that."""
        self._connection.on_room = then

    def write(self, piece: bytes) -> None:
        """Write a piece, which is not empty. A client that is gone gets nothing.

        Raises ``ValueError`` for bytes beyond the length that the answer's head has told.
        """
        if self.disconnected or self.response_complete:
            return
        if self._left is None:
            self._transport.write(b"%x\r\n%b\r\n" % (len(piece), piece) if self._chunks else piece)
            return
        if len(piece) > self._left:
            raise ValueError("an answer is longer than its head says")
        self._left -= len(piece)
        self._transport.write(piece)

    def _head(self, status: int, headers: Headers) -> bytes:
        """Return the answer's head, and note how its body is delimited. Raises ``ValueError`` for a broken header."""
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
        if self._left is None and self._chunks:
            lines.append(b"transfer-encoding: chunked\r\n")
        head = b"".join(lines)
        if head.count(b"\n") != len(lines) or head.count(b"\r") != len(lines):
            raise ValueError("a header holds a line break")
        self.response_started = True
        return head + b"\r\n"

    def _complete_response(self) -> None:
        self.response_complete = True
        self._pieces = []
        if not self.keep_alive and not self.more_body:
            self._transport.close()
        elif not self.keep_alive:
            self._connection.linger()
        self._connection.on_response_complete()
