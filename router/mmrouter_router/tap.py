"""The hot routes' own end of a client's connection: no ASGI between uvicorn's parser and the task that answers.

The server stays uvicorn's: it parses (httptools), keeps connections alive, times them out and drains them. But a POST
to a hot path becomes no scope and no queue of messages: one task has the request, writes head and body with one call
where the answer is there, and has the rest poured in by the engine's connection in the moment it comes. Whatever is
unusual about a request (HTTP/1.0, a query, ``Expect``, a second one before the first is answered) is left to it.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any, Final

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from mmrouter_router.client import ClientGoneError, Headers, Source, declared
from mmrouter_router.errors import RequestError

log = logging.getLogger("mmrouter.tap")

_FEW_DIGITS: Final = 5
"""Digits of a length that may be large."""
LARGE: Final = 64 * 1024
"""Bytes of a body that are still to come from which they are read into one place."""
_FAILED: Final = b"Internal Server Error"

Handler = Callable[["Direct"], Awaitable[None]]


class _Unheard:
    """The event that uvicorn's connection sets for a cycle of its own; ours is told otherwise."""

    def set(self) -> None:
        """Nobody waits."""


class Tapped(HttpToolsProtocol):
    """A connection of a client. ``hot`` of the application: path as it stands in a request -> who answers it."""

    on_room: Callable[[], None] | None = None
    """Called when the client has taken enough of what was written to it, or is gone."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._hot: Mapping[bytes, Handler] = getattr(self.app, "hot", {})
        self._direct: Direct | None = None
        self._taking: Direct | None = None  # whose body is coming

    def on_message_begin(self) -> None:
        """A request begins. Its scope is made where its head turns out to need one."""
        self.url = b""
        self.expect_100_continue = False
        self.headers = []

    def on_headers_complete(self) -> None:
        """Begin to answer."""
        parser, handler = self.parser, self._hot.get(self.url)
        if (
            handler is None
            or parser.get_method() != b"POST"
            or parser.get_http_version() != "1.1"
            or parser.should_upgrade()
            or self.expect_100_continue
            or (self.cycle is not None and not self.cycle.response_complete)
        ):
            self._as_ever()
            return
        direct = self._direct = self._taking = Direct(
            self, self.url.decode("ascii"), self.headers, parser.should_keep_alive()
        )
        self.cycle = direct  # type: ignore[assignment] # what uvicorn asks of a cycle it has
        if any(name == b"content-length" and len(value) > _FEW_DIGITS for name, value in self.headers):
            self.flow.pause_reading()  # until the task says where to
        task = direct.task = self.loop.create_task(direct.run(handler))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def _as_ever(self) -> None:
        """Make an ASGI request of what has come."""
        self._taking = None
        url, headers, expects = self.url, self.headers, self.expect_100_continue
        super().on_message_begin()
        self.url, self.expect_100_continue = url, expects
        self.headers += headers
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Some of a request's body is there."""
        if (direct := self._taking) is not None:
            direct.took(body)
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """All of a request is there."""
        if (direct := self._taking) is not None:
            direct.took(None)
        else:
            super().on_message_complete()

    def fill(self, pieces: list[bytes], length: int, done: asyncio.Future[bytearray]) -> None:
        """Read the rest of a body of this length past the parser, which has nothing to say about it."""
        self.flow.pause_reading()
        self.transport.set_protocol(_Filling(self, pieces, length, done))
        self.flow.resume_reading()

    def read_on(self) -> None:
        """Parse again, what follows that body."""
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn has it
        self._taking = None
        self.transport.set_protocol(self)
        self.flow.resume_reading()

    def resume_writing(self) -> None:
        """The client has taken what was written."""
        super().resume_writing()
        self._tell()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone."""
        super().connection_lost(exc)
        if self._direct is not None:
            self._direct.lost()
        self._tell()

    def _tell(self) -> None:
        if self.on_room is not None:
            self.on_room()


class _Filling(asyncio.BufferedProtocol):
    """Takes the place of a connection's protocol while a large body of known length comes: it is read where it stays.

    Not a byte behind the body is read, so whatever comes next is for the connection again.
    """

    def __init__(self, connection: Tapped, pieces: list[bytes], length: int, done: asyncio.Future[bytearray]) -> None:
        self._connection, self._length, self._done = connection, length, done
        self._body = bytearray(length)
        self._view, self._at = memoryview(self._body), 0
        for piece in pieces:
            self._view[self._at : self._at + len(piece)] = piece
            self._at += len(piece)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the next bytes go."""
        return self._view[self._at :]

    def buffer_updated(self, nbytes: int) -> None:
        """Some of the body is there."""
        self._at += nbytes
        if self._at == self._length:
            self._connection.flow.pause_reading()
            self._connection.loop.call_soon(self._back)

    def _back(self) -> None:
        if self._connection.parser is not None:  # else the client is gone
            self._connection.read_on()
            if not self._done.done():  # nobody waits for it any more
                self._done.set_result(self._body)

    def eof_received(self) -> None:
        """The client has closed its side."""
        self._connection.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone."""
        self._connection.connection_lost(exc)

    def pause_writing(self) -> None:
        """Nothing is written while a body comes."""
        self._connection.pause_writing()

    def resume_writing(self) -> None:
        """Nothing is written while a body comes."""
        self._connection.resume_writing()


class Direct:
    """One request of a hot route: a :class:`~mmrouter_router.client.Client`, and a sink for its answer."""

    message_event: Final = _Unheard()
    scope: Final[MutableMapping[str, Any]] = {}

    def __init__(self, connection: Tapped, path: str, headers: list[tuple[bytes, bytes]], keep_alive: bool) -> None:
        self.method, self.path, self.keep_alive = "POST", path, keep_alive
        self.headers: Headers = headers
        self.task: asyncio.Task[None] | None = None
        self.response_complete = self.disconnected = False
        self._connection, self._transport = connection, connection.transport
        self._pieces: list[bytes] = []
        self._size = 0
        self._complete = False
        self._each = False  # the reader looks at every piece, because nobody said how many there are
        self._wake: asyncio.Future[None] | None = None
        self._begun = False
        self._left: int | None = None  # bytes of the answer's body that are still to come; None: chunks

    async def run(self, handler: Handler) -> None:
        """Have the request answered. What is not answered to its end is cut, so that the client sees it is short."""
        try:
            await handler(self)
        except BaseException as error:
            log.error("%s: not answered", self.path, exc_info=error)
            if not self._begun:
                length = (b"content-length", b"%d" % len(_FAILED))
                self.keep_alive = False
                await self.whole(500, ((b"content-type", b"text/plain; charset=utf-8"), length), _FAILED)
        finally:
            if not self.response_complete:
                self._transport.close()

    # -- the request -------------------------------------------------------------------------------------------------

    @property
    def gone(self) -> bool:
        """Whether the client has left before its answer's end."""
        return self.disconnected

    def lost(self) -> None:
        """The connection is closed."""
        if not self.response_complete and self.task is not None:
            self.disconnected = True
            self.task.cancel()

    def took(self, piece: bytes | None) -> None:
        """Some of the body is there; ``None``: all of it."""
        if self.response_complete:
            return
        if piece is None:
            self._complete = True
        else:
            self._pieces.append(piece)
            self._size += len(piece)
        if (self._complete or self._each) and self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    async def body(self, limit: int, grow: Callable[[int], None]) -> bytes | bytearray:
        """Return the request's body."""
        length = declared(self.headers, limit, grow)
        self._each = length is None
        if length is not None and length - self._size > LARGE and not self._complete:
            filled: asyncio.Future[bytearray] = self._connection.loop.create_future()
            self._connection.fill(self._pieces, length, filled)
            return await filled
        self._connection.flow.resume_reading()
        while not self._complete:
            if self._size > limit:
                raise RequestError.too_large(limit)
            grow(self._size)
            if self.disconnected:
                raise ClientGoneError
            self._wake = self._connection.loop.create_future()
            await self._wake
        if self._size > limit:
            raise RequestError.too_large(limit)
        grow(self._size)
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
        if first and self._left is None:
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
        if self._left is None:
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
            self._transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            return
        if len(piece) > self._left:
            raise ValueError("an answer is longer than its head says")
        self._left -= len(piece)
        self._transport.write(piece)

    def _head(self, status: int, headers: Headers) -> bytes:
        """Return the answer's head, and note how its body is delimited. Raises ``ValueError`` for a broken header."""
        self._begun = True
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
        if self._left is None:
            lines.append(b"transfer-encoding: chunked\r\n")
        head = b"".join(lines)
        if head.count(b"\n") != len(lines) or head.count(b"\r") != len(lines):
            raise ValueError("a header holds a line break")
        return head + b"\r\n"

    def _complete_response(self) -> None:
        self.response_complete = True
        self._pieces = []
        if not self.keep_alive:
            self._transport.close()
        self._connection.on_response_complete()
