"""The events of a stream that its client has, kept unparsed: streams rarely break, and parsing costs CPU per token."""

from dataclasses import dataclass
from typing import Final

import orjson

from mmrouter_router.streams.answer import DONE, END

STREAM_BYTES: Final = 2 << 20  # kept of one stream: about 8,000 tokens in chunks of one
ROUTER_BYTES: Final = 256 << 20  # kept of all streams of a router
STEP: Final = 16 << 10

# Neither occurs within a JSON string, where a quote has a backslash before it.
_ERROR: Final = b'data: {"error"'
_ABORT: Final = b'"finish_reason":"abort"'


@dataclass(slots=True)
class KeptBytes:
    """Bytes kept of all streams."""

    limit: int = ROUTER_BYTES
    used: int = 0


class KeptStream:
    """Splits a stream into whole events and keeps them. Call ``release`` in every case."""

    __slots__ = ("_charged", "_keeps", "_limit", "_pieces", "_shared", "_size", "_tail", "complete", "failed")

    def __init__(self, shared: KeptBytes, limit: int = STREAM_BYTES) -> None:
        """``limit``: bytes to keep, 0 for a stream that cannot be continued."""
        self._shared, self._limit, self._keeps = shared, limit, limit > 0
        self._pieces: list[bytes] = []
        self._size = self._charged = 0
        self._tail = b""  # the incomplete event at the end
        self.complete = False  # the last event is among them
        self.failed = False  # the stream reported a failure of its engine; later bytes are ignored

    def take(self, piece: bytes) -> bytes:
        """Return the whole events that this piece completes."""
        if self._tail or not piece.endswith(END):
            piece = self._tail + piece
            end = piece.rfind(END) + len(END) if END in piece else 0
            self._tail, piece = piece[end:], piece[:end]
        if self.failed or not piece:
            return b""
        if _ERROR in piece or _ABORT in piece:
            piece = self._before_failure(piece)
        if piece.endswith(DONE):
            self.complete = True
        if self._keeps:
            self._pieces.append(piece)
            self._size += len(piece)
            if self._size > self._charged:
                self._charge()
        return piece

    def _charge(self) -> None:
        """Charge the bytes to all streams in steps, because one per token would cost as much as the rest."""
        step = self._size - self._charged + STEP
        self._charged += step
        self._shared.used += step
        if self._size > self._limit or self._shared.used > self._shared.limit:
            self.release()

    def release(self) -> None:
        """Drop the events, and keep no more."""
        self._keeps = False
        self._shared.used -= self._charged
        self._charged = 0
        self._pieces.clear()

    def events(self) -> bytes | None:
        """Return all events, ``None`` where they exceeded a bound."""
        return b"".join(self._pieces) if self._keeps else None

    def _before_failure(self, events: bytes) -> bytes:
        """Return the events before one that reports a failure of the engine, which the client must not get."""
        whole = events.split(END)
        for number, event in enumerate(whole):
            if is_failure(event):
                self.failed = True
                return END.join([*whole[:number], b""])
        return events


def is_failure(event: bytes) -> bool:
    """Return whether an event says that the engine failed, not that the request is at fault."""
    if _ABORT in event:
        return True
    if not event.startswith(_ERROR):
        return False
    try:
        error = orjson.loads(event.removeprefix(b"data: "))["error"]
        return int(error["code"]) >= 500
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError):
        return True
