"""HTTP/1.1 client for engines: pooled connections, answers passed on as they arrive.

It speaks only what engines speak, because a general client costs several times the CPU of a routing decision.
"""

import asyncio
import logging
import ssl
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from functools import partial

from mmrouter_lib.tls_context import EngineTrust, refusal
from mmrouter_router.http.engine_connection import Address, Body, EngineConnection, UpstreamError, address

log = logging.getLogger("mmrouter.tls")

IDLE_SECONDS = 4.0  # uvicorn closes idle connections after 5 s, so a reuse rarely meets a close


class Answer:
    """An engine's answer: status and headers, and its body as it arrives. Call ``close`` in every case."""

    def __init__(self, pool: "Upstream", address: Address, connection: EngineConnection) -> None:
        self._pool, self._address, self.connection = pool, address, connection
        self._closed = False
        self.status, self.headers = connection.status, connection.headers
        self.piece, self.remaining, self.pour = connection.piece, connection.remaining, connection.pour

    @property
    def complete(self) -> bool:
        return self.connection.complete

    async def body(self) -> AsyncIterator[bytes]:
        """Yield the unread pieces of the body. Raises what :meth:`piece` raises."""
        while piece := await self.piece():
            yield piece

    async def read(self, limit: int) -> bytes:
        data = bytearray()
        while len(data) < limit and (piece := await self.piece()):
            data += piece
        return bytes(data[:limit])

    def close(self) -> None:
        """Return the connection to the pool, or abort it where the answer was not read to its end.

        A second call does nothing: another request may have the connection by then.
        """
        if not self._closed:
            self._closed = True
            self._pool.release(self._address, self.connection)


class Upstream:
    """A pool of connections to engines, keyed by address."""

    def __init__(self, *, connect_seconds: float = 2.0, trust: EngineTrust | None = None) -> None:
        """``trust``: for the engines in ``encrypted``."""
        self.encrypted: frozenset[str] = frozenset()  # addresses of engines that serve TLS
        self._trust = trust
        self._idle: dict[Address, list[EngineConnection]] = {}
        self._active: dict[Address, set[EngineConnection]] = {}  # with a request in progress
        self._connect_seconds = connect_seconds

    async def request(
        self, host: str, port: int, method: str, path: str, headers: Mapping[str, str], body: Body = b""
    ) -> Answer:
        """Send a request; return at the answer's headers. Retries a closed idle connection. Raises UpstreamError."""
        address = (host, port)
        length = len(body) if isinstance(body, bytes) else sum(map(len, body))
        head = _head(method, path, host, port, headers.items(), length)
        idle = self._take(address)
        if idle is not None:
            try:
                return await self._exchange(address, idle, head, body)
            except UpstreamError as error:
                if error.began or idle.stalled:
                    raise
        # Where a fresh connection fails, too, the engine is down, possibly because of this request.
        connection = await self._connect(address, sent=idle is not None)
        return await self._exchange(address, connection, head, body)

    async def ask(
        self, address: Address, method: str, path: str, headers: Mapping[str, str], body: Body = b"", *, limit: int
    ) -> tuple[int, bytes]:
        """Send a request; return status and complete answer. Raises :class:`UpstreamError`, also above the limit."""
        answer = await self.request(*address, method, path, headers, body)
        try:
            return answer.status, await answer.read(limit)
        finally:
            answer.close()

    def active(self) -> tuple[Address, ...]:
        """Return the addresses with requests in progress."""
        return tuple(self._active)

    def count_silence(self, address: Address) -> int:
        """Count a period without a byte on each connection in use to an address; return the largest count."""
        connections = self._active.get(address, ())
        for connection in connections:
            connection.silence = 0 if connection.paused else connection.silence + 1
        return max((connection.silence for connection in connections), default=0)

    def end_silent(self, address: Address, periods: float) -> None:
        """Close the connections to an address that were silent for that many periods."""
        for connection in tuple(self._active.get(address, ())):
            if connection.silence >= periods:
                connection.stalled = True
                connection.close()

    def release(self, address: Address, connection: EngineConnection) -> None:
        self._deactivate(address, connection)
        if connection.reusable:
            connection.idle_since = time.monotonic()
            self._idle.setdefault(address, []).append(connection)
        else:
            connection.close()

    def idle_connections(self, host: str, port: int) -> int:
        return len(self._idle.get((host, port), ()))

    def close(self) -> None:
        for connections in self._idle.values():
            for connection in connections:
                connection.close()
        self._idle.clear()

    async def _exchange(self, address: Address, connection: EngineConnection, head: bytes, body: Body) -> Answer:
        self._active.setdefault(address, set()).add(connection)
        try:
            await connection.send(head, body)
        except BaseException:
            self._deactivate(address, connection)
            connection.close()
            raise
        return Answer(self, address, connection)

    def _deactivate(self, address: Address, connection: EngineConnection) -> None:
        active = self._active.get(address)
        if active is not None:
            active.discard(connection)
            if not active:
                del self._active[address]

    def _take(self, address: Address) -> EngineConnection | None:
        """Return an idle connection whose engine was authenticated by the present CA, or ``None``."""
        oldest, context = time.monotonic() - IDLE_SECONDS, self._context(address)
        idle = self._idle.get(address, [])
        while idle:
            connection = idle.pop()
            if not connection.closed and connection.idle_since > oldest and connection.context is context:
                return connection
            connection.close()
        return None

    async def _connect(self, address: Address, *, sent: bool) -> EngineConnection:
        loop, context = asyncio.get_running_loop(), self._context(address)
        name = None if context is None or self._trust is None else self._trust.name or address[0]
        try:
            async with asyncio.timeout(self._connect_seconds):
                _, connection = await loop.create_connection(
                    partial(EngineConnection, loop, context), *address, ssl=context, server_hostname=name
                )
        except (OSError, TimeoutError) as error:
            raise UpstreamError(self._fault(address, error), sent=sent) from error
        connection.on_lost = lambda: self._forget(address, connection)
        return connection

    def _context(self, address: Address) -> ssl.SSLContext | None:
        """Return the present TLS context for an engine, ``None`` for one that serves plain HTTP."""
        return None if self._trust is None or address[0] not in self.encrypted else self._trust.context

    def _fault(self, address: Address, error: Exception) -> str:
        fault = f"cannot connect to {address[0]}:{address[1]}"
        if self._trust is None or not (reason := refusal(error)):
            return fault
        self._trust.count(reason)
        fault += f" by TLS ({reason}): {error}"
        log.error("%s", fault)
        return fault

    def _forget(self, address: Address, connection: EngineConnection) -> None:
        """Remove a closed connection, which no request would take once its engine is gone."""
        idle = self._idle.get(address, [])
        if connection in idle:
            idle.remove(connection)
        if not idle:
            self._idle.pop(address, None)


def _head(method: str, path: str, host: str, port: int, headers: Iterable[tuple[str, str]], length: int) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", f"host: {address(host, port)}", f"content-length: {length}"]
    lines += [f"{name}: {value}" for name, value in headers]
    head = "\r\n".join(lines)
    if head.count("\r\n") != len(lines) - 1:
        raise ValueError("a header value holds a line break")
    return head.encode("latin-1") + b"\r\n\r\n"
