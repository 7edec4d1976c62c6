"""A listening socket that accepts connections in small batches.

asyncio's own server accepts one connection per turn of the event loop, and each turn also serves all requests that are
ready. In a burst of connections the last one would wait for the requests of all others, over and over.
"""

import asyncio
import errno
import logging
import socket
from collections.abc import Callable
from typing import Final

log = logging.getLogger("mmrouter.http")

BATCH: Final = 8
"""Connections accepted per turn. Accepting a whole burst at once would leave engines idle until the last is accepted,
and then flood them.
"""
RETRY_SECONDS: Final = 1.0
"""Pause after the process ran out of file descriptors; connections wait in the kernel's queue meanwhile."""
_EXHAUSTED: Final = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))


class Listener:
    """Replaces ``asyncio.Server`` in a uvicorn server, for one address."""

    def __init__(self, protocol_factory: Callable[[], asyncio.Protocol], host: str, port: int, backlog: int) -> None:
        """Raises ``OSError`` where the address cannot be bound."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family, backlog=backlog)
        self._socket.setblocking(False)
        self._protocol_factory = protocol_factory
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
            opening = self._loop.create_task(self._loop.connect_accepted_socket(self._protocol_factory, connection))
            self._opening.add(opening)
            opening.add_done_callback(self._opened)
        return True

    def _opened(self, opening: asyncio.Task[object]) -> None:
        self._opening.discard(opening)
        if not opening.cancelled() and (error := opening.exception()) is not None:
            log.warning("an accepted connection was lost: %s", error)

    def _pause(self, error: OSError) -> None:
        log.error("cannot accept connections, will retry: %s", error)
        if not self._closed:
            self._loop.remove_reader(self._socket)
            self._retry = self._loop.call_later(RETRY_SECONDS, self._resume)

    def _resume(self) -> None:
        self._retry = None
        self._loop.add_reader(self._socket, self._accept_batch)
