"""A run's network: a block of loopback addresses 127.1.K.0/24, and Services as small TCP forwarders."""

import asyncio
import contextlib
import errno
import itertools
import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from mmrouter_cli.local.folders import LocalError

NETWORK = "127.1"
LOCK_PORT = 47_127
FIRST_POD = 2


@dataclass(slots=True)
class AddressBlock:
    """The addresses of one run: ``.1`` for Services, ``.2`` and up for pods.

    A listening socket reserves the block, which the kernel releases however the process ends.
    """

    number: int
    lock: socket.socket
    used: int = 0

    @property
    def service(self) -> str:
        return _address(self.number, 1)

    def next_pod(self) -> str:
        """Return the next pod's address. Raises :class:`LocalError` when none is left."""
        host = FIRST_POD + self.used
        if host > 253:
            raise LocalError("too many pods for one machine: 252 addresses are all there are")
        self.used += 1
        return _address(self.number, host)

    def close(self) -> None:
        self.lock.close()


def take_block(ports: Iterable[int], pods: int = 1) -> AddressBlock:
    """Take the first block that is free and where Services and pods can bind ``ports``. Raises :class:`LocalError`."""
    wanted = sorted(set(ports))
    problem = "every block is in use"
    for number in range(256):
        lock = _listen(_address(number, 254), LOCK_PORT)
        if lock is None:
            continue
        hosts = range(1, min(FIRST_POD + pods, 254))
        taken = next((port for host in hosts for port in wanted if not can_bind(_address(number, host), port)), None)
        if taken is None:
            return AddressBlock(number, lock)
        lock.close()
        problem = f"port {taken} is taken by a process that listens on all addresses; stop it"
    raise LocalError(f"no free block of loopback addresses {NETWORK}.K.0/24: {problem}")


def _address(block: int, host: int) -> str:
    return f"{NETWORK}.{block}.{host}"


def can_bind(host: str, port: int) -> bool:
    probe = _listen(host, port)
    if probe is not None:
        probe.close()
    return probe is not None


def _listen(host: str, port: int) -> socket.socket | None:
    lock = socket.socket()
    try:
        lock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of an earlier run may linger
        lock.bind((host, port))
        lock.listen(1)
    except OSError as error:
        lock.close()
        if error.errno == errno.EADDRNOTAVAIL:
            raise LocalError(f"{host} cannot be bound: the whole of 127.0.0.0/8 must be local, as on Linux") from error
        return None
    return lock


CONNECT_SECONDS = 2.0
CHUNK = 256 * 1024


class Forwarder:
    """Forwards one port, in turn to the addresses that ``backends`` returns as Ready."""

    def __init__(self, backends: Callable[[], Sequence[tuple[str, int]]]) -> None:
        self._backends = backends
        self._turn = itertools.count()
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()

    async def listen(self, host: str, port: int) -> None:
        """Start to listen. Raises ``OSError``."""
        self._server = await asyncio.start_server(self._serve, host, port, backlog=1024)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
            for writer in list(self._open):
                writer.transport.abort()
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
                continue  # it has just ended, and its pod is about to be unready
        return None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        upstream = None
        try:
            upstream = await self._connect()
            if upstream is None:
                writer.transport.abort()  # no backend: reset, like a Service without endpoints
                return
            up_reader, up_writer = upstream
            self._open.add(up_writer)
            for end in (writer, up_writer):
                end.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await asyncio.gather(_copy(reader, up_writer), _copy(up_reader, writer))
        except OSError:
            # One side was aborted: abort the other instead of closing it cleanly.
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
