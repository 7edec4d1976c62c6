"""The hot routes' own end of a client's connection: no ASGI between uvicorn's parser and the task that answers.

The server stays uvicorn's: it parses (httptools), keeps connections alive, times them out and drains them. But a POST
to a hot path becomes no scope and no queue of messages: one task has the request, writes head and body with one call
where the answer is there, and has the rest poured in by the engine's connection in the moment it comes. Whatever is
unusual about a request (a query, ``Expect``, a second one before the first is answered) is left to it.

What it does not bound is bounded here, for every request: the bytes of a head, and the time that a client may take
(:mod:`.patience`).
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any, Final

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from mmrouter_router.core.errors import RequestError
from mmrouter_router.http.client_channel import Headers
from mmrouter_router.http.client_timeouts import Patience, Watch, untaken
from mmrouter_router.http.hot_request import Direct, Handler

log = logging.getLogger("mmrouter.tap")

_FEW_DIGITS: Final = 5
"""Digits of a length that may be large."""
HEAD_LIMIT: Final = 64 * 1024
"""Bytes of a request's head, and of whatever else stands around a body."""
LINGER_SECONDS: Final = 2.0
"""How long the rest of a body that nobody wants is read before the connection is closed. Closing at once would have the
client's system throw away the answer that says why."""


class _Unwanted:
    """What the parser says of a request that is about to be parsed anew."""

    def took(self, piece: bytes | None) -> None:
        """Nobody wants it."""


class _HeadTooLargeError(Exception):
    """A head is whole, and larger than it may be."""


class Tapped(HttpToolsProtocol):
    """A connection of a client. ``hot`` of the application: path as it stands in a request -> who answers it."""

    on_room: Callable[[], None] | None = None
    """Called when the client has taken enough of what was written to it, or is gone."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._hot: Mapping[bytes, Handler] = getattr(self.app, "hot", {})
        self._direct: Direct | None = None
        self._taking: Direct | _Unwanted | None = None  # whose body is coming
        self._around = 0  # bytes since the parser last had something to say
        self._deaf = self._lingers = False  # nothing more is wanted of the client; it is only waited for
        self._broken: RequestError | None = None  # what is wrong behind the requests that are still to be answered
        self._filling: _Filling | None = None
        self._came = 0  # bytes of a body that the server's own way has taken
        self._watch = Watch()

    def data_received(self, data: bytes) -> None:
        """Parse what the client sends."""
        if self.timeout_keep_alive_task is not None:
            self._unset_keepalive_if_required()
        if self._deaf:
            return
        self._around += len(data)
        rest: bytes | memoryview = data
        try:
            while True:
                try:
                    self.parser.feed_data(rest)
                    break
                except httptools.HttpParserUpgrade as offer:
                    rest = memoryview(rest)[offer.args[0] :]
                    self._stay()
        except httptools.HttpParserError as error:
            if isinstance(error.__context__, _HeadTooLargeError):
                self._end(RequestError.head_too_large(HEAD_LIMIT))
            else:
                self._end(RequestError.invalid("The request is not valid HTTP.", code="invalid_http"))
        else:
            if self._around > HEAD_LIMIT:
                self._end(RequestError.head_too_large(HEAD_LIMIT))

    def on_message_begin(self) -> None:
        """A request begins. Its scope is made where its head turns out to need one."""
        self.url = b""
        self.expect_100_continue = False
        self.headers = []

    def on_headers_complete(self) -> None:
        """Begin to answer."""
        parser, handler = self.parser, self._hot.get(self.url)
        if self._around > HEAD_LIMIT and _size(self.url, self.headers) > HEAD_LIMIT:
            raise _HeadTooLargeError
        self._around = 0
        if parser.should_upgrade() and parser.get_method() != b"CONNECT":
            self._taking = _Unwanted()  # see _stay
            return
        if (
            handler is None
            or parser.get_method() != b"POST"
            or self.expect_100_continue
            or (self.cycle is not None and not self.cycle.response_complete)
        ):
            self._as_ever()
            return
        headers, self.headers = self.headers, []  # what a body ends with is no header of the request (RFC 9110 6.5.1)
        chunks = parser.get_http_version() != "1.0"
        direct = self._direct = self._taking = Direct(
            self, self.url.decode("ascii"), headers, chunks and parser.should_keep_alive(), chunks
        )
        self.cycle = direct  # type: ignore[assignment] # what uvicorn asks of a cycle it has
        if any(name == b"content-length" and len(value) > _FEW_DIGITS for name, value in headers):
            self.flow.pause_reading()  # until the task says where to
        task = direct.task = self.loop.create_task(direct.run(handler))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def _as_ever(self) -> None:
        """Make an ASGI request of what has come."""
        self._taking = None
        self._came = 0
        url, headers, expects = self.url, self.headers, self.expect_100_continue
        super().on_message_begin()
        self.url, self.expect_100_continue = url, expects
        self.headers += headers
        super().on_headers_complete()
        self.headers = []

    def _stay(self) -> None:
        """Parse a request anew without its offer to speak another protocol, with which the parser takes no body.

        A client may offer one with any request (RFC 9110 7.8), and some do with every first one.
        """
        parser = self.parser
        lines = [b"%b %b HTTP/%b" % (parser.get_method(), self.url, parser.get_http_version().encode())]
        lines += [b"%b: %b" % (name, value) for name, value in self.headers if name != b"upgrade"]
        self._parse_anew()
        self.parser.feed_data(b"\r\n".join((*lines, b"\r\n")))

    def on_body(self, body: bytes) -> None:
        """Some of a request's body is there."""
        self._around = 0
        if (direct := self._taking) is not None:
            direct.took(body)
        else:
            self._came += len(body)
            super().on_body(body)

    def on_message_complete(self) -> None:
        """All of a request is there."""
        self._around = 0
        if (direct := self._taking) is not None:
            direct.took(None)
        else:
            super().on_message_complete()

    def fill(self, pieces: list[bytes], length: int, done: asyncio.Future[bytearray]) -> None:
        """Read the rest of a body of this length past the parser, which has nothing to say about it."""
        self.flow.pause_reading()
        self._filling = _Filling(self, pieces, length, done)
        self.transport.set_protocol(self._filling)
        self.flow.resume_reading()

    def read_on(self) -> None:
        """Parse again, what follows that body."""
        self._parse_anew()
        self._filling = self._taking = None
        if self._direct is not None:
            self._direct.more_body = False
        self.transport.set_protocol(self)
        self.flow.resume_reading()

    def _parse_anew(self) -> None:
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn has it

    def linger(self) -> None:
        """Close, once the client has had time to see why."""
        if not self._lingers and not self.transport.is_closing():
            self._deaf = self._lingers = True
            if self._filling is not None:
                self.flow.pause_reading()
                self.read_on()
            self.transport.write_eof()
            self.flow.resume_reading()
            self.loop.call_later(LINGER_SECONDS, self.transport.close)

    def _end(self, error: RequestError) -> None:
        """Take no more of this client. What it asked for before is answered; then it is told what is wrong."""
        self._deaf = True
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            self._refuse(error)
        elif not cycle.more_body:
            self._broken = error
        elif self.pipeline:  # it is the last one there that is broken
            self.pipeline.popleft()
            self._broken = error
        elif cycle.response_started:
            self.transport.close()
        else:
            self._refuse(error)
            cycle.disconnected = True
            if isinstance(cycle, Direct):
                cycle.lost()
            else:
                cycle.waiting_for_100_continue = False
                cycle.message_event.set()

    def on_response_complete(self) -> None:
        """An answer is out: go on with the next request."""
        if self._broken is None or self.pipeline:
            super().on_response_complete()
        else:
            self._refuse(self._broken)

    def _refuse(self, error: RequestError) -> None:
        if self.transport.is_closing():
            return
        log.info("a request is refused: %s", error)
        body = error.to_body()
        lines = [STATUS_LINE[error.status], b"content-type: application/json\r\nconnection: close\r\n"]
        lines += [b"%b: %b\r\n" % pair for pair in self.server_state.default_headers]
        self.transport.write(b"".join((*lines, b"content-length: %d\r\n\r\n" % len(body), body)))
        self.linger()

    def look(self, patience: Patience, now: float) -> None:
        """Have a client go that keeps us waiting for too long; ``now``: seconds of a clock, :class:`.Clock`."""
        cycle = self.cycle
        if self.flow.write_paused:
            if self._watch.over((cycle, untaken(self.transport)), patience.taking_seconds, now):
                log.info("a client takes nothing of its answer: cut")
                self.transport.abort()
        elif self._deaf or self.flow.read_paused or self.pipeline or self.timeout_keep_alive_task is not None:
            self._watch.over(None, 0, now)  # the client waits for us, or the server's own clock runs
        elif cycle is None or cycle.response_complete:
            if self._watch.over(("head", cycle), patience.head_seconds, now):
                self.transport.close()
        elif isinstance(cycle, Direct):
            came = self._filling.at if self._filling is not None else cycle.size
            if self._watch.over(("body", cycle) if cycle.waiting else None, patience.body_seconds(came), now):
                cycle.late(RequestError.too_slow())
        elif self._watch.over(("body", cycle) if cycle.more_body else None, patience.body_seconds(self._came), now):
            self._end(RequestError.too_slow())

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
        # They know this connection: without them it goes at once, and not when a collector looks at everything.
        self._direct = self._taking = self.cycle = None  # type: ignore[assignment]

    def _tell(self) -> None:
        if self.on_room is not None:
            self.on_room()


def _size(url: bytes, headers: Headers) -> int:
    """Return how many bytes the lines of a head are, but for its method."""
    return len(url) + sum(len(name) + len(value) + 4 for name, value in headers)


class _Filling(asyncio.BufferedProtocol):
    """Takes the place of a connection's protocol while a large body of known length comes: it is read where it stays.

    Not a byte behind the body is read, so whatever comes next is for the connection again.
    """

    def __init__(self, connection: Tapped, pieces: list[bytes], length: int, done: asyncio.Future[bytearray]) -> None:
        self._connection, self._length, self._done = connection, length, done
        self._body = bytearray(length)
        self._view, self.at = memoryview(self._body), 0
        for piece in pieces:
            self._view[self.at : self.at + len(piece)] = piece
            self.at += len(piece)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the next bytes go."""
        return self._view[self.at :]

    def buffer_updated(self, nbytes: int) -> None:
        """Some of the body is there."""
        self.at += nbytes
        if self.at == self._length:
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
