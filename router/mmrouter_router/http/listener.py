"""A listening socket: connections that come together are taken together.

The loop's own server takes one connection a turn, and a turn serves whatever is there already. So of many connections
that come at once the last would wait for the requests of all others, again and again.
"""

import asyncio
import errno
import logging
import socket
from collections.abc import Callable
from typing import Final

log = logging.getLogger("mmrouter.listener")

TOGETHER: Final = 8
"""Connections that are taken in one turn. With all of a crowd in one turn everybody would wait for everybody: engines
would have nothing to do until the last one is taken, and then all at once.
"""
RETRY_SECONDS: Final = 1.0
"""Until the next try where there is no file left for a connection: it waits in the system's queue meanwhile."""
_FULL: Final = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))


class Listener:
    """What asyncio's server is to a uvicorn server, for one address."""

    def __init__(self, connected: Callable[[], asyncio.Protocol], host: str, port: int, backlog: int) -> None:
        """``connected`` makes the protocol of a connection. Raises ``OSError`` where the address cannot be had."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family, backlog=backlog)
        self._socket.setblocking(False)
        self._connected = connected
        self._rounds = backlog // TOGETHER + 1  # until the system's queue is empty
        self._loop = asyncio.get_running_loop()
        self._opening: set[asyncio.Task[object]] = set()  # taken, and not yet the server's
        self._retry: asyncio.TimerHandle | None = None
        self._closed = False
        self._loop.add_reader(self._socket, self._take)
        log.info("listening on %s, port %d", host, port)

    def close(self) -> None:
        """Take no connection any more, but for those that the system has accepted for us: they would be reset."""
        if self._closed:
            return
        self._closed = True
        if self._retry is not None:
            self._retry.cancel()
        else:
            self._loop.remove_reader(self._socket)
        for _ in range(self._rounds):
            if not self._take():
                break
        self._socket.close()

    async def wait_closed(self) -> None:
        """Return once every connection that was taken is the server's."""
        await asyncio.gather(*self._opening, return_exceptions=True)

    def _take(self) -> bool:
        """Take who is there. Returns whether there may be more."""
        for _ in range(TOGETHER):
            try:
                connection, _ = self._socket.accept()
            except BlockingIOError:
                return False
            except ConnectionAbortedError:  # gone before it was taken
                continue
            except OSError as error:
                if error.errno in _FULL:
                    self._pause(error)
                    return False
                raise
            opening = self._loop.create_task(self._loop.connect_accepted_socket(self._connected, connection))
            self._opening.add(opening)
            opening.add_done_callback(self._opened)
        return True

    def _opened(self, opening: asyncio.Task[object]) -> None:
        self._opening.discard(opening)
        if not opening.cancelled() and (error := opening.exception()) is not None:
            log.warning("a connection is lost before it begins: %s", error)

    def _pause(self, error: OSError) -> None:
        log.error("connections wait, because none can be taken: %s", error)
        if not self._closed:
            self._loop.remove_reader(self._socket)
            self._retry = self._loop.call_later(RETRY_SECONDS, self._resume)

    def _resume(self) -> None:
        self._retry = None
        self._loop.add_reader(self._socket, self._take)
