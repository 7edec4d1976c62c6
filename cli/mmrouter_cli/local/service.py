"""A Service as a small TCP forwarder: each connection goes to the next Ready pod, or to the one after it."""

import asyncio
import contextlib
import itertools
import socket
from collections.abc import Callable, Sequence

CONNECT_SECONDS = 2.0
CHUNK = 256 * 1024


class Forwarder:
    """Forwards one port. ``backends`` names the addresses that are Ready at this moment."""

    def __init__(self, backends: Callable[[], Sequence[tuple[str, int]]]) -> None:
        self._backends = backends
        self._turn = itertools.count()
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()

    async def listen(self, host: str, port: int) -> None:
        """Begin. Raises ``OSError``."""
        self._server = await asyncio.start_server(self._serve, host, port, backlog=1024)

    async def close(self) -> None:
        """End, and cut what is open."""
        if self._server is not None:
            self._server.close()
        for writer in list(self._open):
            writer.transport.abort()
        if self._server is not None:
            await self._server.wait_closed()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
        backends = self._backends()
        first = next(self._turn)
        for step in range(len(backends)):
            host, port = backends[(first + step) % len(backends)]
            try:
                async with asyncio.timeout(CONNECT_SECONDS):
                    return await asyncio.open_connection(host, port)
            except (OSError, TimeoutError):
                continue  # it ended a moment ago; its pod will not be Ready for long
        return None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        upstream = None
        try:
            upstream = await self._connect()
            if upstream is None:
                writer.transport.abort()  # nobody is there: a reset, as a Service without endpoints gives
                return
            up_reader, up_writer = upstream
            self._open.add(up_writer)
            for end in (writer, up_writer):
                end.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await asyncio.gather(_copy(reader, up_writer), _copy(up_reader, writer))
        except OSError:
            # One side broke off in the middle: the other must see that, not a clean end.
            for end in (writer, upstream[1] if upstream else writer):
                end.transport.abort()
        finally:
            for end in (writer, upstream[1] if upstream else writer):
                self._open.discard(end)
                end.close()
                with contextlib.suppress(OSError):
                    await end.wait_closed()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(CHUNK):
        writer.write(data)
        await writer.drain()
    if writer.can_write_eof() and not writer.is_closing():
        writer.write_eof()
