"""A client's connection: uvicorn's HTTP protocol, with requests to hot paths served without ASGI.

uvicorn parses (httptools), keeps connections alive, times idle ones out and drains them. A POST to a hot path becomes a
:class:`.hot_request.HotRequest`: no scope and no message queue stand between the parser and the task that answers. A
request with anything unusual (a query, ``Expect``, pipelining behind an unanswered request) takes uvicorn's ASGI path.
This class bounds what uvicorn does not: the bytes of a head, and the time that a client may take.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from mmrouter_router.core.errors import RequestError
from mmrouter_router.core.request_ids import NAME_HEADER, answered_name
from mmrouter_router.http.body_budget import BodyReservation
from mmrouter_router.http.client_channel import ClientTimeouts, Headers, StallTimer, unread_bytes
from mmrouter_router.http.hot_request import Handler, HotRequest
from mmrouter_router.http.received_body import allocate

log = logging.getLogger("mmrouter.http")

SlowClient = Literal["head", "body", "answer"]  # what a client was too slow with

_SMALL_LENGTH_DIGITS: Final = 5  # digits of a content-length up to which a body is read without pausing
HEAD_LIMIT: Final = 64 * 1024  # bytes of a head, and of trailers and chunk framing between two pieces of a body
LINGER_SECONDS: Final = 2.0  # input is read until the close, which at once would make the client discard the answer


class _DiscardedBody:
    """Body receiver of a request that is about to be parsed again."""

    def feed(self, piece: bytes | None) -> None:
        pass


class _HeadRefusedError(Exception):
    """A complete head is refused; ends the parser, so that no later request of the same bytes is served."""

    def __init__(self, error: RequestError) -> None:
        super().__init__()
        self.error = error


class ClientConnection(HttpToolsProtocol):
    """One connection of a client. The application's attribute ``hot`` maps raw paths to their handlers."""

    on_writable: Callable[[], None] | None = None  # called when the write buffer has drained, or the connection is lost

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._hot: Mapping[bytes, Handler] = getattr(self.app, "hot", {})
        self.request: HotRequest | None = None
        self._body_receiver: HotRequest | _DiscardedBody | None = None  # None: the body belongs to an ASGI request
        self.unparsed = 0  # bytes received since the parser's last callback
        self.input_ended = self._lingering = False  # whether further input is discarded
        self._deferred_error: RequestError | None = None  # answered after the requests before it
        self._body_reader: _BodyReader | None = None
        self._asgi_cycle: RequestResponseCycle | None = None  # of the request that is being answered, or was the last
        self._asgi_body_size = 0
        self._stall = StallTimer()
        self._resumed = 0  # how often writing resumed after a pause

    @property
    def idle(self) -> bool:
        """Whether no request is being answered: a connection between requests, or in front of its first one."""
        return self.cycle is None or self.cycle.response_complete

    def data_received(self, data: bytes) -> None:
        if self.timeout_keep_alive_task is not None:
            self._unset_keepalive_if_required()
        if self.input_ended:
            return
        self.unparsed += len(data)
        unread: bytes | memoryview = data
        try:
            while True:
                try:
                    self.parser.feed_data(unread)
                    break
                except httptools.HttpParserUpgrade as offer:
                    unread = memoryview(unread)[offer.args[0] :]
                    self._parse_without_upgrade()
        except httptools.HttpParserError as error:
            if isinstance(refusal := error.__context__, _HeadRefusedError):
                self._end_input(refusal.error)
            else:
                self._end_input(RequestError.invalid("The request is not valid HTTP.", code="invalid_http"))
        else:
            if self.unparsed > HEAD_LIMIT:
                self._end_input(RequestError.head_too_large(HEAD_LIMIT))

    def on_message_begin(self) -> None:
        # An ASGI scope is made only once the head turns out to need one.
        self.url = b""
        self.expect_100_continue = False
        self.headers = []

    def on_headers_complete(self) -> None:
        parser, handler = self.parser, self._hot.get(self.url)
        if self.unparsed > HEAD_LIMIT and _head_size(self.url, self.headers) > HEAD_LIMIT:
            raise _HeadRefusedError(RequestError.head_too_large(HEAD_LIMIT))
        self.unparsed = 0
        version = parser.get_http_version()
        if (error := self._malformed(version)) is not None:
            raise _HeadRefusedError(error)
        if parser.should_upgrade():
            self._body_receiver = _DiscardedBody()  # see _parse_without_upgrade
            return
        if (
            handler is None
            or parser.get_method() != b"POST"
            or self.expect_100_continue
            or (self.cycle is not None and not self.cycle.response_complete)
        ):
            self._begin_asgi_request()
            return
        headers, self.headers = self.headers, []  # trailers are no headers of the request (RFC 9110 6.5.1)
        chunked = version != "1.0"
        request = HotRequest(self, self.url.decode("ascii"), headers, chunked and parser.should_keep_alive(), chunked)
        self.request = self._body_receiver = request
        self.cycle = request  # type: ignore[assignment] # implements what uvicorn uses of a cycle
        if any(name == b"content-length" and len(value) > _SMALL_LENGTH_DIGITS for name, value in headers):
            self.flow.pause_reading()  # until the task provides a buffer
        task = request.task = self.loop.create_task(request.run(handler))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def _malformed(self, version: str) -> RequestError | None:
        """Return why a head that the parser accepts is refused."""
        if version not in ("1.0", "1.1"):
            return RequestError.invalid("HTTP/1.0 and HTTP/1.1 are served.", code="invalid_http")
        hosts = sum(name == b"host" for name, _ in self.headers)
        if hosts > 1 or (not hosts and version == "1.1"):  # RFC 9112 3.2
            return RequestError.invalid("The request must have one 'Host' header.", code="invalid_http")
        if self.parser.get_method() == b"CONNECT":
            return RequestError.method_not_allowed("CONNECT", self.url.decode("latin-1"))
        return None

    def _begin_asgi_request(self) -> None:
        self._body_receiver = None
        self._asgi_body_size = 0
        url, headers, expects = self.url, self.headers, self.expect_100_continue
        super().on_message_begin()
        self.url, self.expect_100_continue = url, expects
        self.headers += headers
        super().on_headers_complete()
        self.headers = []

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._asgi_cycle = cycle
        super()._start_asgi_task(cycle, app)

    def _parse_without_upgrade(self) -> None:
        """Parse a head again without its upgrade offer (RFC 9110 7.8), behind which the parser reads no body."""
        parser = self.parser
        lines = [b"%b %b HTTP/%b" % (parser.get_method(), self.url, parser.get_http_version().encode())]
        lines += [b"%b: %b" % (name, value) for name, value in self.headers if name != b"upgrade"]
        self._reset_parser()
        self.parser.feed_data(b"\r\n".join((*lines, b"\r\n")))

    def on_body(self, body: bytes) -> None:
        self.unparsed = 0
        if (receiver := self._body_receiver) is not None:
            receiver.feed(body)
        else:
            self._asgi_body_size += len(body)
            super().on_body(body)

    def on_message_complete(self) -> None:
        self.unparsed = 0
        if (receiver := self._body_receiver) is not None:
            receiver.feed(None)
        else:
            super().on_message_complete()

    def read_body(
        self, pieces: Sequence[bytes | bytearray], length: int, done: asyncio.Future[bytearray], held: BodyReservation
    ) -> None:
        """Read a body of ``length`` bytes, which begins with ``pieces``, into one buffer without the parser."""
        self.flow.pause_reading()
        self._body_reader = _BodyReader(self, pieces, length, done, held)
        self.transport.set_protocol(self._body_reader)
        self.flow.resume_reading()

    def resume_parsing(self) -> None:
        self._reset_parser()
        self._body_reader = self._body_receiver = None
        if self.request is not None:
            self.request.more_body = False
        self.transport.set_protocol(self)
        self.flow.resume_reading()

    def _reset_parser(self) -> None:
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn has it

    def linger(self) -> None:
        """Close the connection once the client has had time to read the answer."""
        if not self._lingering and not self.transport.is_closing():
            self.input_ended = self._lingering = True
            if self._body_reader is not None:
                self.flow.pause_reading()
                self.resume_parsing()
            if self.transport.can_write_eof():  # not with TLS
                self.transport.write_eof()
            self.flow.resume_reading()
            self.loop.call_later(LINGER_SECONDS, self.transport.close)

    def _end_input(self, error: RequestError) -> None:
        """Discard all further input; send the error once the requests before it are answered."""
        self.input_ended = True
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            self._refuse(error)
        elif not cycle.more_body:
            self._deferred_error = error
        elif self.pipeline:  # the last pipelined request is the malformed one
            self.pipeline.popleft()
            self._deferred_error = error
        elif cycle.response_started:
            self.transport.close()
        else:
            self._refuse(error)
            cycle.disconnected = True
            if isinstance(cycle, HotRequest):
                cycle.disconnect()
            else:
                cycle.waiting_for_100_continue = False
                cycle.message_event.set()

    def on_response_complete(self) -> None:
        if self._deferred_error is None or self.pipeline:
            super().on_response_complete()
        else:
            self._refuse(self._deferred_error)

    def _refuse(self, error: RequestError) -> None:
        if self.transport.is_closing():
            return
        body, name = error.to_body(), answered_name(self.headers)
        log.info("%s: request refused: %s", name.decode(), error)
        lines = [STATUS_LINE[error.status], b"content-type: application/json\r\nconnection: close\r\n"]
        lines.append(b"%b: %b\r\n" % (NAME_HEADER, name))
        lines += [b"%b: %b\r\n" % pair for pair in self.server_state.default_headers]
        self.transport.write(b"".join((*lines, b"content-length: %d\r\n\r\n" % len(body), body)))
        self.linger()

    def check_timeouts(self, timeouts: ClientTimeouts, now: float) -> SlowClient | None:
        """Disconnect a client that exceeds a timeout, and return which; ``now``: seconds of a :class:`.ProcessClock`.

        A client must read a paused answer at a minimum rate: within each stall time the unread bytes must fall below
        the next multiple of ``answer_rate * answer_stall_seconds``, or writing must resume.
        """
        cycle = self.cycle
        if self.flow.write_paused or (self.transport.is_closing() and self.transport.get_write_buffer_size()):
            step = timeouts.answer_rate * timeouts.answer_stall_seconds
            unread = unread_bytes(self.transport)
            if self._stall.expired((cycle, self._resumed, -(-unread // step)), timeouts.answer_stall_seconds, now):
                log.info("connection aborted: the client does not read its answer")
                self.transport.abort()
                return "answer"
        elif self.input_ended or self.flow.read_paused or self.pipeline or self.timeout_keep_alive_task is not None:
            self._stall.expired(None, 0, now)  # the client waits for the router, or uvicorn's keep-alive timer runs
        elif cycle is None or cycle.response_complete:
            if self._stall.expired(("head", cycle), timeouts.head_seconds, now):
                self.transport.close()
                return "head"
        else:
            waiting = cycle.waiting if isinstance(cycle, HotRequest) else cycle.more_body
            awaited = ("body", cycle) if waiting else None
            if self._stall.expired(awaited, timeouts.body_seconds(self.body_received), now):
                if isinstance(cycle, HotRequest):
                    cycle.refuse_body(RequestError.too_slow())
                else:
                    self._end_input(RequestError.too_slow())
                return "body"
        return None

    @property
    def body_received(self) -> int:
        if self._body_reader is not None:
            return self._body_reader.received
        return self.cycle.size if isinstance(self.cycle, HotRequest) else self._asgi_body_size

    def resume_writing(self) -> None:
        super().resume_writing()
        self._resumed += 1
        if self.on_writable is not None:
            self.on_writable()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self.request is not None:
            self.request.disconnect()
        if self._asgi_cycle is not None:  # uvicorn informs only the newest request, which may wait behind this one
            self._asgi_cycle.disconnected = not self._asgi_cycle.response_complete
            self._asgi_cycle.message_event.set()
        if self.on_writable is not None:
            self.on_writable()
        # Break the reference cycles so that the connection is freed without a pass of the garbage collector.
        self.request = self._body_receiver = self.cycle = self._asgi_cycle = None  # type: ignore[assignment]


def _head_size(url: bytes, headers: Headers) -> int:
    return len(url) + sum(len(name) + len(value) + 4 for name, value in headers)


class _BodyReader(asyncio.BufferedProtocol):
    """Replaces the connection's protocol to read a large body of known length in place, and no byte behind it."""

    def __init__(
        self,
        connection: ClientConnection,
        pieces: Sequence[bytes | bytearray],
        length: int,
        done: asyncio.Future[bytearray],
        held: BodyReservation,
    ) -> None:
        self._connection, self._length, self._done, self._held = connection, length, done, held
        self._body = allocate(None, length)
        self._view, self.received = memoryview(self._body), 0
        for piece in pieces:
            self._view[self.received : self.received + len(piece)] = piece
            self.received += len(piece)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._view[self.received :]

    def buffer_updated(self, nbytes: int) -> None:
        self.received += nbytes
        try:
            self._held.grow(self.received)
        except RequestError as error:
            if self._connection.request is not None:
                self._connection.request.refuse_body(error)
            return
        if self.received == self._length:
            self._held.complete()
            self._connection.flow.pause_reading()
            self._connection.loop.call_soon(self._finish)

    def _finish(self) -> None:
        if self._connection.parser is not None:  # None after a disconnect
            self._connection.resume_parsing()
            if not self._done.done():  # done where the request was cancelled meanwhile
                self._done.set_result(self._body)

    def eof_received(self) -> None:
        self._connection.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connection.connection_lost(exc)

    def pause_writing(self) -> None:
        self._connection.pause_writing()

    def resume_writing(self) -> None:
        self._connection.resume_writing()
