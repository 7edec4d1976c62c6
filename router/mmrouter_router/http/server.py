"""The HTTP servers of one process, and their shutdown without losing a request, in two steps.

*Draining* begins when the pod is deleted, or with the signal at the latest: the frontend is no longer Ready and sends
``connection: close`` with every answer so that clients go elsewhere. *Stopping* begins with SIGTERM or SIGINT: no
connection is accepted, idle ones have a moment for a request on its way, answers in progress have the drain time.
"""

import asyncio
import contextlib
import errno
import logging
import resource
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Any, Final

import uvicorn
from uvicorn.config import STARTUP_FAILURE

from mmrouter_router.http.certificate import HANDSHAKE_SECONDS, SHUTDOWN_SECONDS, ServerCertificate
from mmrouter_router.http.client_channel import CLIENT_TIMEOUTS, Message, ProcessClock, Send
from mmrouter_router.http.connection import ClientConnection

log = logging.getLogger("mmrouter.http")

SIGNALS = (signal.SIGTERM, signal.SIGINT)
LINGER_SECONDS = 1.0  # how long an idle connection may still send a request once the listener is closed
STEP_SECONDS = 0.02
TIMEOUT_CHECK_TICKS = 10  # ticks of uvicorn's clock, ten a second, between two checks of client timeouts
ADMIN_DRAIN_SECONDS = 1.0  # drain time of the servers for control and metrics
BATCH: Final = 8  # connections accepted per turn; a whole burst at once would leave engines idle, then flood them
RETRY_SECONDS: Final = 1.0  # pause without file descriptors; connections wait in the kernel's queue meanwhile
MAX_ADMIN_CONNECTIONS: Final = 256  # of a port for control or metrics
FILES_KEPT: Final = 256 + 2 * MAX_ADMIN_CONNECTIONS  # for feeds, media, files of keys and the other ports
MOST_FILES: Final = 1 << 20  # what Linux allows a process by default
IDLE_BATCH: Final = 64  # idle connections closed at a time where new ones exceed the limit
_EXHAUSTED: Final = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))


def raise_open_files() -> int:
    """Raise the soft limit of open files as far as the hard one allows; return how many clients may be connected."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = MOST_FILES if hard == resource.RLIM_INFINITY else max(soft, min(hard, MOST_FILES))
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
    return client_limit(files)


def client_limit(files: int) -> int:
    """Return how many clients may be connected under a limit of open files.

    A client takes two files, its connection and one to an engine. A quarter of a small limit is kept for other files.
    """
    return max((files - min(FILES_KEPT, files // 4)) // 2, 1)


class Shutdown:
    """State of the process's end. ``draining``: not Ready, connections close; ``stopping``: nothing new is accepted."""

    def __init__(self) -> None:
        self.draining = False
        self.stopping = asyncio.Event()

    def drain(self, why: str) -> None:
        if not self.draining:
            self.draining = True
            log.info("draining: %s", why)

    def stop(self, why: str) -> None:
        self.drain(why)
        self.stopping.set()

    def closing(self, send: Send) -> Send:
        """Return ``send`` with ``connection: close`` in the answer's headers."""

        async def send_closing(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
            await send(message)

        return send_closing


class Server(uvicorn.Server):
    """One port. ``should_exit`` ends it; :func:`serve` handles signals for all servers of the process."""

    def __init__(
        self,
        app: Any,
        host: str,
        port: int,
        *,
        drain_seconds: float,
        max_connections: int = MAX_ADMIN_CONNECTIONS,
        count: Callable[[str], None] = lambda outcome: None,
        certificate: ServerCertificate | None = None,
        count_slow: Callable[[str], None] = lambda part: None,
    ) -> None:
        """``drain_seconds``: how long answers in progress may take once the server is to exit. ``count``: gets the
        outcome of every connection that exceeds ``max_connections``: ``refused``, or ``idle`` for one closed instead.
        ``count_slow``: called with the part for which a client was too slow: ``head``, ``body`` or ``answer``.
        ``certificate``: serve TLS.
        """
        super().__init__(
            uvicorn.Config(
                app,
                host=host,
                port=port,
                http=ClientConnection,
                loop="uvloop",
                lifespan="off",
                interface="asgi3",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=75,
                timeout_graceful_shutdown=max(1, round(drain_seconds)),
            )
        )
        self.linger = 0.0
        self._max_connections, self._certificate = max_connections, certificate
        self._count, self._count_slow = count, count_slow
        self._clock = ProcessClock()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Override uvicorn, which would handle signals for one server only."""
        yield

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets=[])
        factory = partial(
            ClientConnection, config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        try:
            listener = Listener(
                factory, self.config.host, self.config.port, self.config.backlog, self._admit, self._certificate
            )
        except OSError as error:
            log.error("cannot listen on %s, port %d: %s", self.config.host, self.config.port, error)
            sys.exit(STARTUP_FAILURE)
        self.servers = [listener]  # type: ignore[list-item] # implements what uvicorn uses of a server

    def _admit(self, opening: int) -> bool:
        """Return whether one more connection may be served; where there are too many, close idle ones to make room.

        ``opening``: how many are accepted but not served yet, for instance in their TLS handshake.
        """
        connections = self.server_state.connections
        if len(connections) + opening < self._max_connections:
            return True
        clients = (connection for connection in connections if isinstance(connection, ClientConnection))
        idle = list(islice((client for client in clients if client.idle), IDLE_BATCH))
        for connection in idle:
            connection.transport.abort()
            self._count("idle")
        if not idle:
            self._count("refused")
        return bool(idle)

    async def on_tick(self, counter: int) -> bool:
        if counter % TIMEOUT_CHECK_TICKS == 0:
            now = self._clock.advance(asyncio.get_running_loop().time())
            for connection in tuple(self.server_state.connections):
                if isinstance(connection, ClientConnection):
                    slow = connection.check_timeouts(CLIENT_TIMEOUTS, now)
                    if slow is not None:
                        self._count_slow(slow)
        return await super().on_tick(counter)

    async def shutdown(self, sockets: Any = None) -> None:
        """Stop listening, give idle connections ``linger`` seconds, then drain as uvicorn does."""
        for server in self.servers:
            server.close()
            await server.wait_closed()
        for _ in range(round(self.linger / STEP_SECONDS)):
            if not self.server_state.connections:
                break
            await asyncio.sleep(STEP_SECONDS)
        await super().shutdown(sockets)


async def serve(clients: Server, others: list[Server], shutdown: Shutdown, *, notice_seconds: float = 0.0) -> None:
    """Run all servers until a signal or ``shutdown.stop``; return when clients are answered or out of time.

    ``notice_seconds``: how long the first SIGTERM only drains, in a pod that has no hook to wait before it.
    """
    loop = asyncio.get_running_loop()
    clients.linger = LINGER_SECONDS

    def handle_signal(name: str) -> None:
        if shutdown.stopping.is_set():
            clients.force_exit = True  # the second signal skips the drain
        elif name == "SIGTERM" and notice_seconds and not shutdown.draining:
            shutdown.drain(name)
            loop.call_later(notice_seconds, shutdown.stop, name)
            return
        shutdown.stop(name)

    async def exit_when_stopping() -> None:
        await shutdown.stopping.wait()
        clients.should_exit = True

    for number in SIGNALS:
        with contextlib.suppress(ValueError, RuntimeError):  # not in the main thread, as in tests
            loop.add_signal_handler(number, handle_signal, number.name)
    running = [asyncio.create_task(server.serve()) for server in others]
    stopper = asyncio.create_task(exit_when_stopping())
    try:
        await clients.serve()
    finally:
        shutdown.stop("the clients' server has ended")
        stopper.cancel()
        for server in others:
            server.should_exit = True
        await asyncio.gather(*running)
        for number in SIGNALS:
            with contextlib.suppress(ValueError, RuntimeError):
                loop.remove_signal_handler(number)


class Listener:
    """Replaces ``asyncio.Server`` in a uvicorn server, for one address; accepts connections in small batches.

    asyncio accepts one connection per turn of the event loop: the last of a burst would wait for all others' requests.
    """

    def __init__(
        self,
        protocol_factory: Callable[[], asyncio.Protocol],
        host: str,
        port: int,
        backlog: int,
        admit: Callable[[int], bool] = lambda opening: True,
        certificate: ServerCertificate | None = None,
    ) -> None:
        """``admit``: gets the number of connections that wait for their protocol, and returns whether to serve one
        more, else it is closed. ``certificate``: serve TLS. Raises ``OSError`` for an address in use.
        """
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family, backlog=backlog)
        self._socket.setblocking(False)
        self._protocol_factory, self._admit, self._certificate = protocol_factory, admit, certificate
        self._max_batches = backlog // BATCH + 1  # until the kernel's queue is empty
        self._loop = asyncio.get_running_loop()
        self._opening: set[asyncio.Task[object]] = set()  # accepted, not yet handed to their protocol
        self._retry: asyncio.TimerHandle | None = None
        self._closed = False
        self._loop.add_reader(self._socket, self._accept_batch)
        log.info("listening on %s, port %d", host, port)

    def close(self) -> None:
        """Stop listening, after accepting what the kernel has already accepted: closing would reset those."""
        if self._closed:
            return
        self._closed = True
        if self._retry is not None:
            self._retry.cancel()
        else:
            self._loop.remove_reader(self._socket)
        for _ in range(self._max_batches):
            if not self._accept_batch():
                break
        self._socket.close()

    async def wait_closed(self) -> None:
        """Return once every accepted connection has its protocol."""
        await asyncio.gather(*self._opening, return_exceptions=True)

    def _accept_batch(self) -> bool:
        """Accept up to ``BATCH`` connections. Returns whether there may be more."""
        for _ in range(BATCH):
            try:
                connection, _ = self._socket.accept()
            except BlockingIOError:
                return False
            except ConnectionAbortedError:  # the client left before it was accepted
                continue
            except OSError as error:
                if error.errno in _EXHAUSTED:
                    self._pause(error)
                    return False
                raise
            if not self._admit(len(self._opening)):
                connection.close()
                continue
            opening = self._loop.create_task(self._open(connection))
            self._opening.add(opening)
            opening.add_done_callback(self._opened)
        return True

    def _open(self, connection: socket.socket) -> Coroutine[Any, Any, object]:
        if self._certificate is None:
            return self._loop.connect_accepted_socket(self._protocol_factory, connection)
        return self._loop.connect_accepted_socket(
            self._protocol_factory,
            connection,
            ssl=self._certificate.context,
            ssl_handshake_timeout=HANDSHAKE_SECONDS,
            ssl_shutdown_timeout=SHUTDOWN_SECONDS,
        )

    def _opened(self, opening: asyncio.Task[object]) -> None:
        self._opening.discard(opening)
        if not opening.cancelled() and (error := opening.exception()) is not None:
            if self._certificate is None:
                log.warning("an accepted connection was lost: %s", error)
            else:  # not logged, because a client can cause any number of them
                self._certificate.count("handshake_failed")

    def _pause(self, error: OSError) -> None:
        log.error("cannot accept connections, will retry: %s", error)
        if not self._closed:
            self._loop.remove_reader(self._socket)
            self._retry = self._loop.call_later(RETRY_SECONDS, self._resume)

    def _resume(self) -> None:
        self._retry = None
        self._loop.add_reader(self._socket, self._accept_batch)
