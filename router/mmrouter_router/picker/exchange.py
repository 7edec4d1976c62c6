"""One request of a gateway: a stream of ext_proc, from the client's headers to the end of the engine's answer.

To the frontend's pipeline it is both sides of a request: the client, and the connection to the engine, because the
gateway sends the request to the engine and its answer to the client, each through this stream.
"""

import asyncio
from collections.abc import Awaitable, Mapping
from typing import Any, Protocol

from mmrouter_router.core.errors import RequestError
from mmrouter_router.http.body_budget import BodyReservation
from mmrouter_router.http.client_channel import ClientGoneError, Headers, declared_length
from mmrouter_router.http.engine_connection import Body, Sink, Source, UpstreamError, address
from mmrouter_router.http.gateway import Gateway
from mmrouter_router.picker import protocol


class Stream(Protocol):
    """The gRPC stream. ``read`` returns the next message, ``None`` at the gateway's end of the stream.

    ``cancelled``: whether the gateway has ended the exchange.
    """

    def read(self) -> Awaitable[Any]: ...

    def write(self, message: Any) -> Awaitable[None]: ...

    def cancelled(self) -> bool: ...


class Exchange:
    """A :class:`~mmrouter_router.http.client_channel.Client` and a :class:`~mmrouter_router.http.gateway.Gateway`.

    ``fault``: what the gateway sent against the protocol, after which nothing more is answered. ``answered``: the whole
    answer has been sent, or the client is gone.
    """

    def __init__(self, stream: Stream, first: Any, *, test_selection: bool = False) -> None:
        """``first``: the stream's first message. ``test_selection``: obey the header of conformance tests.

        Raises :class:`.protocol.ProtocolError` where that message begins no request.
        """
        protocol.check_first(first)
        self.fault = ""
        self.begun = self.answered = False
        self._stream, self._arrived = stream, protocol.client_headers(first.request_headers)
        own = dict(self._arrived)
        self.method = own.get(b":method", b"").decode("latin-1")
        self.path, _, self.query = own.get(b":path", b"").decode("latin-1").partition("?")
        self.path = self.path.removesuffix("/") or self.path
        self.headers: Headers = [(name, value) for name, value in self._arrived if not name.startswith(b":")]
        self._allowed = protocol.allowed(first, test_selection=test_selection)
        self._ended = first.request_headers.end_of_stream
        self._trailers = False  # the request ends with trailers
        self._answer: EngineAnswer | None = None
        self._sent = self._gone = False
        self._reading: asyncio.Future[Any] | None = None
        self._refused: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    # -- the client

    @property
    def gateway(self) -> Gateway:
        return self

    @property
    def gone(self) -> bool:
        return self._gone or self._stream.cancelled()

    def refuse_body(self, error: RequestError) -> None:
        if not self._refused.done():
            self._refused.set_exception(error)

    async def body(self, limit: int, held: BodyReservation) -> bytes | bytearray:
        declared_length(self.headers, limit, held)
        body = bytearray()
        while not self._ended:
            message = await self.next("request_body", "request_trailers")
            if message.WhichOneof("kind") == "request_trailers":
                self._ended = self._trailers = True
                break
            piece = message.request_body.body
            if len(body) + len(piece) > limit:
                raise RequestError.too_large(limit)
            held.grow(len(body) + len(piece))
            body += piece
            self._ended = message.request_body.end_of_stream
        held.complete()
        return body

    async def respond(self, status: int, headers: Headers, body: bytes) -> None:
        self.begun = True
        await self._write(protocol.immediate(status, headers, body))
        self.answered = True

    async def stream(self, status: int, headers: Headers, first: bytes, source: Source) -> None:
        answer = self._answer
        assert answer is not None, "only an engine's answer is passed on"
        self.begun = True
        await self._write(protocol.answer_headers(status, answer.arrived, headers))
        ended, piece = False, first or await source.piece()
        while piece:
            ended = source.remaining() is not None and not answer.trailers
            for message in protocol.body_chunks("response_body", (piece,), last=ended):
                await self._write(message)
            piece = b"" if ended else await source.piece()
        if answer.trailers:
            await self._write(protocol.pass_on("response_trailers"))
        elif not ended and not answer.bodiless:
            for message in protocol.body_chunks("response_body", (), last=True):
                await self._write(message)
        self.answered = True

    # -- the gateway

    def allows(self, ip: str, port: int) -> bool:
        return protocol.allows(self._allowed, ip, port)

    def served_elsewhere(self, ip: str, port: int) -> str:
        served = self._answer.served if self._answer is not None else ""
        return "" if served in ("", ip, address(ip, port)) else served

    async def request(
        self, host: str, port: int, method: str, path: str, headers: Mapping[str, str], body: Body = b""
    ) -> "EngineAnswer":
        if self._sent:
            raise UpstreamError("a gateway sends a request once", sent=True)
        self._sent = True
        pieces = (body,) if isinstance(body, bytes) else body
        await self._write(protocol.forward(host, port, path, self._arrived, headers, sum(map(len, pieces))))
        for message in protocol.body_chunks("request_body", pieces, last=not self._trailers):
            await self._write(message)
        if self._trailers:
            await self._write(protocol.pass_on("request_trailers"))
        self._answer = EngineAnswer(self, await self.next("response_headers"))
        return self._answer

    async def next(self, *kinds: str) -> Any:
        """Return the next message, which must be of these kinds.

        Raises :class:`ClientGoneError` at the end of the stream and for any other message, which is the ``fault``.
        """
        if self._reading is None:
            self._reading = asyncio.ensure_future(self._stream.read())
        await asyncio.wait((self._reading, self._refused), return_when=asyncio.FIRST_COMPLETED)
        if self._refused.done() and not self._ended:
            self._refused.result()
        message, self._reading = await self._reading, None
        if message is None:
            self._gone = self.answered = True
            raise ClientGoneError
        if message.WhichOneof("kind") not in kinds:
            self.fault = f"{' or '.join(kinds)} is expected here, not {message.WhichOneof('kind')}"
            raise ClientGoneError
        return message

    def close(self) -> None:
        """Drop what is still to be read. Call it in every case."""
        self._refused.cancel()
        if self._reading is not None:
            self._reading.cancel()

    async def _write(self, message: Any) -> None:
        if self.gone:
            raise ClientGoneError
        await self._stream.write(message)


class EngineAnswer:
    """An engine's answer as its messages arrive (:class:`~mmrouter_router.http.gateway.GatewayAnswer`).

    ``arrived``: its headers with ``:status``. ``bodiless``: it is its headers only. ``trailers``: it ended with them.
    ``served``: the endpoint that the gateway reports to have used.
    """

    def __init__(self, exchange: Exchange, message: Any) -> None:
        self.arrived = protocol.client_headers(message.response_headers)
        self.headers = [(name, value) for name, value in self.arrived if not name.startswith(b":")]
        self.status = int(dict(self.arrived).get(b":status", b"502"))
        self.served = protocol.served(message)
        self.bodiless = self.complete = message.response_headers.end_of_stream
        self.trailers = False
        self._exchange = exchange

    def remaining(self) -> bytes | None:
        return b"" if self.complete else None

    async def piece(self) -> bytes:
        while not self.complete:
            message = await self._exchange.next("response_body", "response_trailers")
            if message.WhichOneof("kind") == "response_trailers":
                self.complete = self.trailers = True
                break
            self.complete = message.response_body.end_of_stream
            if message.response_body.body:
                return bytes(message.response_body.body)
        return b""

    async def pour(self, sink: Sink) -> None:
        while piece := await self.piece():
            sink.write(piece)

    def close(self) -> None:
        """Release nothing: the end of the stream ends the exchange."""
