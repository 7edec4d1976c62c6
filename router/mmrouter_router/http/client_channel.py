"""The client's end of one request, whoever serves it: an ASGI server, or our own connection (:mod:`.tap`)."""

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
    """An answer that may not be complete yet."""

    def rest(self) -> bytes | None:
        """Return what has not been read, where all of it is there; ``None`` where some is still to come."""
        ...

    async def piece(self) -> bytes:
        """Return the next bytes, empty at the end."""
        ...

    async def pour(self, sink: Sink) -> None:
        """Write the rest into a sink as it comes; return when all of it is there."""
        ...


class Client(Protocol):
    """One request of a client, and the way to answer it. The task that answers is cancelled when the client leaves."""

    @property
    def method(self) -> str:
        """As in the request's first line."""
        ...

    @property
    def path(self) -> str:
        """Without a query."""
        ...

    @property
    def headers(self) -> Headers:
        """All of them, in their order."""
        ...

    @property
    def gone(self) -> bool:
        """Whether the client has left before its answer's end."""
        ...

    async def body(self, limit: int, grow: Callable[[int], None]) -> bytes | bytearray:
        """Return the request's body; ``grow`` is told how large it gets, before it is there where that is known.

        Raises :class:`RequestError` (413) above ``limit`` bytes and what ``grow`` raises; :class:`ClientGoneError`.
        """
        ...

    async def whole(self, status: int, headers: Headers, body: bytes) -> None:
        """Answer at once; ``headers`` say how long the body is."""
        ...

    async def stream(self, status: int, headers: Headers, first: bytes, source: Source) -> None:
        """Answer with ``first`` and what comes after it. Raises what the source raises."""
        ...


def declared(headers: Headers, limit: int, grow: Callable[[int], None]) -> int | None:
    """Return the body's length where the head tells it. Raises what :meth:`Client.body` raises for it."""
    for name, value in headers:
        if name == b"content-length" and value.isdigit():
            length = int(value)
            if length > limit:
                raise RequestError.too_large(limit)
            grow(length)  # before it comes: what is refused is not waited for
            return length
    return None


class AsgiClient:
    """A client behind an ASGI server."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.headers: Headers = scope["headers"]
        self.gone = False
        self._receive, self._send = receive, send
        self._watch: asyncio.Task[None] | None = None

    async def body(self, limit: int, grow: Callable[[int], None]) -> bytes:
        """Return the request's body, and watch from here on whether the client leaves."""
        declared(self.headers, limit, grow)
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
        self._watch = asyncio.create_task(self._leaves(task))
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def whole(self, status: int, headers: Headers, body: bytes) -> None:
        """Answer at once."""
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def stream(self, status: int, headers: Headers, first: bytes, source: Source) -> None:
        """Answer with ``first`` and what comes after it."""
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        await self._send({"type": "http.response.body", "body": first, "more_body": True})
        while piece := await source.piece():
            await self._send({"type": "http.response.body", "body": piece, "more_body": True})
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def close(self) -> None:
        """Watch no more. Call it in every case."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)

    async def _leaves(self, task: asyncio.Task[Any]) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.gone = True
        task.cancel()
