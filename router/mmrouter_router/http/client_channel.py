"""The interface through which a request is read and answered, its implementation for ASGI servers, and timeouts.

:class:`.hot_request.HotRequest` implements the interface for the router's own connections. A slow client holds memory,
a part of the body budget (:mod:`.body_budget`) or an engine, so its time is limited. The server checks every connection
about once a second, so requests pay nothing for it.
"""

import asyncio
import fcntl
import sys
import termios
from asyncio import Transport
from collections.abc import Awaitable, Callable, Hashable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, Self

from mmrouter_router.core.errors import RequestError
from mmrouter_router.http.body_budget import BodyReservation
from mmrouter_router.http.engine_connection import Source
from mmrouter_router.http.gateway import Gateway
from mmrouter_router.http.received_body import ReceivedBody

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = Sequence[tuple[bytes, bytes]]  # names in lower case


_MAX_DIGITS: Final = 18  # of a content-length; Python refuses to read thousands


class ClientGoneError(Exception):
    """The client closed the connection."""


class Client(Protocol):
    """A client's request and the means to answer it. The task that answers is cancelled when the client disconnects."""

    method: str
    path: str  # without the query
    headers: Headers

    @property
    def gateway(self) -> Gateway | None:
        """The gateway that sends the request to its engine and the answer to the client, where the router does not."""

    @property
    def gone(self) -> bool:
        """Whether the client disconnected before the end of its answer."""

    @property
    def begun(self) -> bool:
        """Whether a part of the answer has been sent."""

    async def body(self, limit: int, held: BodyReservation) -> bytes | bytearray:
        """Return the body, charged as it arrives. Raises 413, ClientGoneError, and what the reservation raises."""

    def refuse_body(self, error: RequestError) -> None:
        """Let :meth:`body` raise an error where it still waits for bytes."""

    async def respond(self, status: int, headers: Headers, body: bytes) -> None:
        """Send a whole answer; ``headers`` hold the body's length."""

    async def stream(self, status: int, headers: Headers, first: bytes, source: Source) -> None:
        """Send an answer that begins with ``first`` and continues with ``source``. Raises what the source raises."""


def declared_length(headers: Headers, limit: int, held: BodyReservation) -> int | None:
    """Return the body's length where the head declares it. Raises what :meth:`Client.body` raises for it."""
    for name, value in headers:
        if name == b"content-length" and value.isdigit():
            if len(value) > _MAX_DIGITS or (length := int(value)) > limit:
                raise RequestError.too_large(limit)
            held.expect(length)
            return length
    return None


class AsgiClient:
    """A :class:`Client` behind an ASGI server."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.headers: Headers = scope["headers"]
        self.gateway: Gateway | None = None
        self.gone = self.begun = False
        self._receive, self._send = receive, send
        self._disconnect_watch: asyncio.Task[None] | None = None
        self._refused: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def refuse_body(self, error: RequestError) -> None:
        if not self._refused.done():
            self._refused.set_exception(error)

    async def body(self, limit: int, held: BodyReservation) -> bytes | bytearray:
        declared_length(self.headers, limit, held)
        received = ReceivedBody()
        while True:
            receiving = asyncio.ensure_future(self._receive())
            either: set[asyncio.Future[Any]] = {receiving, self._refused}
            try:
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                if self._refused.done():
                    self._refused.result()
                message = receiving.result()
            finally:
                receiving.cancel()  # no more than a pending one
            if message["type"] == "http.disconnect":
                self.gone = True
                raise ClientGoneError
            received.add(message.get("body", b""))
            if received.size > limit:
                raise RequestError.too_large(limit)
            held.grow(received.size)
            if not message.get("more_body"):
                break
        held.complete()
        self._disconnect_watch = asyncio.create_task(self._cancel_on_disconnect(asyncio.current_task()))
        return await received.whole()

    async def respond(self, status: int, headers: Headers, body: bytes) -> None:
        self.begun = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def stream(self, status: int, headers: Headers, first: bytes, source: Source) -> None:
        self.begun = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        await self._send({"type": "http.response.body", "body": first, "more_body": True})
        while piece := await source.piece():
            await self._send({"type": "http.response.body", "body": piece, "more_body": True})
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """End the watch for a disconnect."""
        if self._disconnect_watch is not None:
            self._disconnect_watch.cancel()
            await asyncio.gather(self._disconnect_watch, return_exceptions=True)

    async def _cancel_on_disconnect(self, task: asyncio.Task[Any] | None) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.gone = True
        assert task is not None
        task.cancel()


@dataclass(frozen=True, slots=True)
class ClientTimeouts:
    """Limits for one connection, in seconds; a body may stall, but must average ``body_rate`` bytes per second.

    While an answer is paused because its client reads slowly, the client must take ``answer_rate`` bytes per second.
    """

    head_seconds: float = 75.0  # as long as an idle connection is kept
    body_stall_seconds: float = 30.0
    body_rate: int = 16 * 1024
    answer_stall_seconds: float = 60.0
    answer_rate: int = 1024

    def body_seconds(self, received: int) -> float:
        return self.body_stall_seconds + received / self.body_rate


CLIENT_TIMEOUTS: Final = ClientTimeouts()
MAX_STEP_SECONDS: Final = 2.0  # the most that :class:`ProcessClock` advances between two checks


class ProcessClock:
    """A clock that pauses while the process does, so that a stalled router does not time out its clients."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._at: float | None = None

    def advance(self, now: float) -> float:
        """Return the clock's seconds at ``now``, a time of a clock that never stops."""
        if self._at is not None:
            self._seconds += min(now - self._at, MAX_STEP_SECONDS)
        self._at = now
        return self._seconds


class StallTimer:
    """Measures for how long a connection has waited for the same thing."""

    def __init__(self) -> None:
        self._awaited: Hashable = None
        self._since = 0.0

    def expired(self, awaited: Hashable, seconds: float, now: float) -> bool:
        """Return whether ``awaited`` has been the same for more than ``seconds``; ``None``: nothing is awaited."""
        if awaited != self._awaited:
            self._awaited, self._since = awaited, now
        return awaited is not None and now - self._since > seconds


def unread_bytes(transport: Transport) -> int:
    """Return how many written bytes the peer has not acknowledged, in our buffer and in the kernel's."""
    number = transport.get_extra_info("socket").fileno()
    queued = fcntl.ioctl(number, termios.TIOCOUTQ, bytes(4)) if number >= 0 else b""
    return transport.get_write_buffer_size() + int.from_bytes(queued, sys.byteorder)
