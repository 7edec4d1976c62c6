"""The HTTP servers of one process, and how they end without a request being lost.

A frontend leaves in two steps. *Leaving* begins when its pod is being deleted, or with the signal at the latest: it is
not Ready any more, takes whatever still comes, and says ``connection: close`` with every answer, so that clients who
keep connections go elsewhere. *Stopping* begins with SIGTERM or SIGINT: no connection is accepted any more, those that
are idle have a moment for a request that is already on its way, and answers that are under way have the drain time to
finish. Control and metrics are served until the clients are gone.
"""

import asyncio
import contextlib
import logging
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import uvicorn
from uvicorn.config import STARTUP_FAILURE

from mmrouter_router.http.client_timeouts import PATIENCE, Clock
from mmrouter_router.http.connection import Tapped
from mmrouter_router.http.listener import Listener

log = logging.getLogger("mmrouter.serving")

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]

SIGNALS = (signal.SIGTERM, signal.SIGINT)
LINGER_SECONDS = 1.0
"""How long an idle connection may still bring a request once the listener is closed."""
STEP_SECONDS = 0.02
LOOK_TICKS = 10
"""Of the server's clock, which ticks ten times a second."""
OTHERS_SECONDS = 1.0
"""Time for control and metrics to finish their answers; streams end by themselves."""


class Leaving:
    """How far the end is. ``begun``: not Ready, connections are closed after each answer; ``stopping``: it is set once
    nothing new is accepted.
    """

    def __init__(self) -> None:
        self.begun = False
        self.stopping = asyncio.Event()

    def begin(self, why: str) -> None:
        """The pod is being deleted: whoever asks is sent elsewhere from here on."""
        if not self.begun:
            self.begun = True
            log.info("leaving: %s", why)

    def stop(self, why: str) -> None:
        """Accept nothing new."""
        self.begin(why)
        self.stopping.set()

    def closing(self, send: Send) -> Send:
        """Return ``send`` with ``connection: close`` in the answer's headers."""

        async def sends(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
            await send(message)

        return sends


class Server(uvicorn.Server):
    """One port. Its end is asked for by ``should_exit``; signals are taken in one place, by :func:`serve`."""

    def __init__(self, app: Any, host: str, port: int, *, drain_seconds: float) -> None:
        """``drain_seconds``: how long answers under way may take once the end is asked for."""
        super().__init__(
            uvicorn.Config(
                app,
                host=host,
                port=port,
                http=Tapped,
                loop="uvloop",
                lifespan="off",
                interface="asgi3",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,  # nobody looks at a client's address
                timeout_keep_alive=75,
                timeout_graceful_shutdown=max(1, round(drain_seconds)),
            )
        )
        self.linger = 0.0
        self._clock = Clock()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals alone."""
        yield

    async def startup(self, sockets: Any = None) -> None:
        """Listen, by a listener of our own."""
        await super().startup(sockets=[])
        made = partial(Tapped, config=self.config, server_state=self.server_state, app_state=self.lifespan.state)
        try:
            listener = Listener(made, self.config.host, self.config.port, self.config.backlog)
        except OSError as error:
            log.error("cannot listen on %s, port %d: %s", self.config.host, self.config.port, error)
            sys.exit(STARTUP_FAILURE)
        self.servers = [listener]  # type: ignore[list-item] # what uvicorn asks of a server it has

    async def on_tick(self, counter: int) -> bool:
        """See whether a client keeps us waiting for too long. Returns whether the server should end."""
        if counter % LOOK_TICKS == 0:
            now = self._clock.at(asyncio.get_running_loop().time())
            for connection in tuple(self.server_state.connections):
                if isinstance(connection, Tapped):
                    connection.look(PATIENCE, now)
        return await super().on_tick(counter)

    async def shutdown(self, sockets: Any = None) -> None:
        """Stop listening, let idle connections bring what is on its way, then drain as uvicorn does."""
        for server in self.servers:
            server.close()
            await server.wait_closed()
        for _ in range(round(self.linger / STEP_SECONDS)):
            if not self.server_state.connections:
                break
            await asyncio.sleep(STEP_SECONDS)
        await super().shutdown(sockets)


async def serve(clients: Server, others: list[Server], leaving: Leaving) -> None:
    """Run all servers until a signal or ``leaving.stop``; return once the clients' answers are out or out of time."""
    loop = asyncio.get_running_loop()
    clients.linger = LINGER_SECONDS

    def signalled(name: str) -> None:
        if leaving.stopping.is_set():
            clients.force_exit = True  # asked twice: now
        leaving.stop(name)

    async def stop() -> None:
        await leaving.stopping.wait()
        clients.should_exit = True

    for number in SIGNALS:
        with contextlib.suppress(ValueError, RuntimeError):  # not the main thread: whoever runs us stops us
            loop.add_signal_handler(number, signalled, number.name)
    running = [asyncio.create_task(server.serve()) for server in others]
    stopper = asyncio.create_task(stop())
    try:
        await clients.serve()
    finally:
        leaving.stop("the clients' server has ended")
        stopper.cancel()
        for server in others:
            server.should_exit = True
        await asyncio.gather(*running)
        for number in SIGNALS:
            with contextlib.suppress(ValueError, RuntimeError):
                loop.remove_signal_handler(number)
