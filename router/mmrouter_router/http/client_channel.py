"""The interface through which a request is read and answered, and its implementation for ASGI servers.

:class:`.hot_request.HotRequest` implements it for the router's own connections.
"""

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any, Protocol

from mmrouter_router.core.errors import RequestError
from mmrouter_router.http.upstream import Sink

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = Sequence[tuple[bytes, bytes]]
"""Names in lower case."""


class ClientGoneError(Exception):
    """The client closed the connection."""


class Source(Protocol):
    """The body of an engine's answer, which may still be arriving."""

    def remaining(self) -> bytes | None:
        """Return the unread bytes of a complete body, ``None`` of an incomplete one."""
        ...

    async def piece(self) -> bytes:
        """Return the next bytes, empty at the end."""
        ...

    async def pour(self, sink: Sink) -> None:
        """Write the unread bytes into a sink as they arrive; return at the end of the body."""
        ...


class Client(Protocol):
    """A client's request and the means to answer it. The task that answers is cancelled when the client disconnects."""

    @property
    def method(self) -> str: ...

    @property
    def path(self) -> str:
        """Without the query."""
        ...

    @property
    def headers(self) -> Headers: ...

    @property
    def gone(self) -> bool:
        """Whether the client disconnected before the end of its answer."""
        ...

    async def body(self, limit: int, grow: Callable[[int], None]) -> bytes | bytearray:
        """Return the request's body; ``grow`` gets its size, in advance where the head declares it.

        Raises :class:`RequestError` (413) above ``limit`` bytes and what ``grow`` raises; :class:`ClientGoneError`.
        """
        ...

    async def respond(self, status: int, headers: Headers, body: bytes) -> None:
        """Send a whole answer; ``headers`` hold the body's length."""
        ...

    async def stream(self, status: int, headers: Headers, first: bytes, source: Source) -> None:
        """Send an answer that begins with ``first`` and continues with ``source``. Raises what the source raises."""
        ...


def declared_length(headers: Headers, limit: int, grow: Callable[[int], None]) -> int | None:
    """Return the body's length where the head declares it. Raises what :meth:`Client.body` raises for it."""
    for name, value in headers:
        if name == b"content-length" and value.isdigit():
            length = int(value)
            if length > limit:
                raise RequestError.too_large(limit)
            grow(length)  # a body beyond the budget is refused before it arrives
            return length
    return None


class AsgiClient:
    """A :class:`Client` behind an ASGI server."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.headers: Headers = scope["headers"]
        self.gone = False
        self._receive, self._send = receive, send
        self._disconnect_watch: asyncio.Task[None] | None = None

    async def body(self, limit: int, grow: Callable[[int], None]) -> bytes:
        """Return the request's body and begin to watch for a disconnect."""
        declared_length(self.headers, limit, grow)
        pieces: list[bytes] = []
        size = 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self.gone = True
                raise ClientGoneError
            piece = message.get("body", b"")
            size += len(piece)
            if size > limit:
                raise RequestError.too_large(limit)
            grow(size)
            pieces.append(piece)
            if not message.get("more_body"):
                break
        task = asyncio.current_task()
        assert task is not None
        self._disconnect_watch = asyncio.create_task(self._cancel_on_disconnect(task))
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def respond(self, status: int, headers: Headers, body: bytes) -> None:
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def stream(self, status: int, headers: Headers, first: bytes, source: Source) -> None:
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        await self._send({"type": "http.response.body", "body": first, "more_body": True})
        while piece := await source.piece():
            await self._send({"type": "http.response.body", "body": piece, "more_body": True})
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def close(self) -> None:
        """End the watch for a disconnect. Call it in every case."""
        if self._disconnect_watch is not None:
            self._disconnect_watch.cancel()
            await asyncio.gather(self._disconnect_watch, return_exceptions=True)

    async def _cancel_on_disconnect(self, task: asyncio.Task[Any]) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.gone = True
        task.cancel()
