"""The client's end of an answer: what an engine sends goes there in the moment it comes, with no task in between.

Through ASGI a token of a stream wakes the request's task, passes a generator and is awaited by the server; here it is
one call from one connection to the other. The server stays uvicorn's: it parses requests, begins and ends answers,
keeps connections alive and drains them. Only the middle of a body does not pass through it.
"""

from collections.abc import Callable, MutableMapping
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

EXTENSION: Final = "mmrouter.tap"
"""Key of the tap among an ASGI scope's extensions."""


class Tapped(HttpToolsProtocol):
    """A connection of a client; each request's scope has a tap among its extensions."""

    on_room: Callable[[], None] | None = None
    """Called when the client has taken enough of what was written to it, or is gone."""

    def on_headers_complete(self) -> None:
        """Begin a request."""
        before = self.cycle
        super().on_headers_complete()
        if (cycle := self.cycle) is not None and cycle is not before:
            # Nobody has seen the scope: its task was created in this step of the loop, or waits for the one before.
            scope: MutableMapping[str, Any] = cycle.scope  # type: ignore[assignment] # a TypedDict
            scope["extensions"] = {**(scope.get("extensions") or {}), EXTENSION: Tap(self, cycle)}

    def resume_writing(self) -> None:
        """The client has taken what was written."""
        super().resume_writing()
        self._tell()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone."""
        super().connection_lost(exc)
        self._tell()

    def _tell(self) -> None:
        if self.on_room is not None:
            self.on_room()


class Tap:
    """Writes pieces of one answer's body, between its head and its end, which the application sends."""

    def __init__(self, connection: Tapped, cycle: RequestResponseCycle) -> None:
        self._connection, self._cycle = connection, cycle

    @property
    def full(self) -> bool:
        """Whether the client is behind, so that nothing more should be written now."""
        return self._cycle.flow.write_paused

    def when_room(self, then: Callable[[], None] | None) -> None:
        """Have a function called whenever the client has caught up, or is gone; ``None`` ends that."""
        self._connection.on_room = then

    def write(self, piece: bytes) -> None:
        """Write a piece, which is not empty. A client that is gone gets nothing; the server tells the application.

        Raises ``ValueError`` for bytes beyond the length that the answer's head has told.
        """
        cycle = self._cycle
        if cycle.disconnected or cycle.response_complete:
            return
        if cycle.chunked_encoding:
            cycle.transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            return
        if len(piece) > cycle.expected_content_length:
            raise ValueError("an answer is longer than its head says")
        cycle.expected_content_length -= len(piece)
        cycle.transport.write(piece)


def tap_of(scope: MutableMapping[str, Any]) -> Tap | None:
    """Return the tap of a request, ``None`` where another server took it."""
    found: Tap | None = (scope.get("extensions") or {}).get(EXTENSION)
    return found
