"""The HTTP servers of one process, and their shutdown without losing a request.

A frontend shuts down in two steps. *Draining* begins when its pod is deleted, or with the signal at the latest: it is
no longer Ready, still serves what arrives, and sends ``connection: close`` with every answer so that clients reconnect
elsewhere. *Stopping* begins with SIGTERM or SIGINT: no connection is accepted any more, idle ones have a moment for a
request that is already on its way, and answers in progress have the drain time. Control and metrics are served until
the clients' server has ended.
"""

import asyncio
import contextlib
import logging
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import uvicorn
from uvicorn.config import STARTUP_FAILURE

from mmrouter_router.http.client_channel import Message, Send
from mmrouter_router.http.client_timeouts import CLIENT_TIMEOUTS, ProcessClock
from mmrouter_router.http.connection import ClientConnection
from mmrouter_router.http.listener import Listener

log = logging.getLogger("mmrouter.http")

SIGNALS = (signal.SIGTERM, signal.SIGINT)
LINGER_SECONDS = 1.0
"""How long an idle connection may still send a request once the listener is closed."""
STEP_SECONDS = 0.02
TIMEOUT_CHECK_TICKS = 10
"""Ticks of uvicorn's clock, ten a second, between two checks of client timeouts."""
ADMIN_DRAIN_SECONDS = 1.0
"""Drain time of the servers for control and metrics."""


class Shutdown:
    """State of the process's end. ``draining``: not Ready, connections close after each answer; ``stopping``: set once
    nothing new is accepted.
    """

    def __init__(self) -> None:
        self.draining = False
        self.stopping = asyncio.Event()

    def drain(self, why: str) -> None:
        """Send clients elsewhere from now on."""
        if not self.draining:
            self.draining = True
            log.info("draining: %s", why)

    def stop(self, why: str) -> None:
        """Drain, and accept no new connection."""
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

    def __init__(self, app: Any, host: str, port: int, *, drain_seconds: float) -> None:
        """``drain_seconds``: how long answers in progress may take once the server is to exit."""
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
            listener = Listener(factory, self.config.host, self.config.port, self.config.backlog)
        except OSError as error:
            log.error("cannot listen on %s, port %d: %s", self.config.host, self.config.port, error)
            sys.exit(STARTUP_FAILURE)
        self.servers = [listener]  # type: ignore[list-item] # implements what uvicorn uses of a server

    async def on_tick(self, counter: int) -> bool:
        if counter % TIMEOUT_CHECK_TICKS == 0:
            now = self._clock.advance(asyncio.get_running_loop().time())
            for connection in tuple(self.server_state.connections):
                if isinstance(connection, ClientConnection):
                    connection.check_timeouts(CLIENT_TIMEOUTS, now)
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


async def serve(clients: Server, others: list[Server], shutdown: Shutdown) -> None:
    """Run all servers until a signal or ``shutdown.stop``; return when clients are answered or out of time."""
    loop = asyncio.get_running_loop()
    clients.linger = LINGER_SECONDS

    def handle_signal(name: str) -> None:
        if shutdown.stopping.is_set():
            clients.force_exit = True  # the second signal skips the drain
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
