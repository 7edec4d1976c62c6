"""How long a client may keep its connection waiting: for a request's head, for its body, for room to answer.

A connection costs memory, a body that was announced holds room that others are refused for, and an answer that nobody
takes holds an engine. Every connection is looked at about once a second, which costs a request nothing.
"""

import fcntl
import sys
import termios
from asyncio import Transport
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Patience:
    """``head_seconds`` for a head, from the connection's begin or its first byte; ``stalled_seconds`` without a byte
    for a body, and ``rate`` bytes a second on the whole; ``taking_seconds`` without a byte for an answer.
    """

    head_seconds: float = 75.0  # as long as an idle connection is kept
    stalled_seconds: float = 30.0
    rate: int = 16 * 1024
    taking_seconds: float = 60.0

    def body_seconds(self, came: int) -> float:
        """Return how long a body may take of which so many bytes came."""
        return self.stalled_seconds + came / self.rate


PATIENCE: Final = Patience()
LONGEST_SECONDS: Final = 2.0
"""Between two looks of a process that is at work."""


class Clock:
    """Seconds in which the process was at work: while it stands still, or is short of CPU, no client is late."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._at: float | None = None

    def at(self, now: float) -> float:
        """Return what it shows; ``now``: seconds of a clock that never stops."""
        if self._at is not None:
            self._seconds += min(now - self._at, LONGEST_SECONDS)
        self._at = now
        return self._seconds


class Watch:
    """What a connection waits for, and since when."""

    def __init__(self) -> None:
        self._what: Hashable = None
        self._since = 0.0

    def over(self, what: Hashable, seconds: float, now: float) -> bool:
        """Whether ``what`` has been waited for longer than that; ``None``: nothing is."""
        if what != self._what:
            self._what, self._since = what, now
        return what is not None and now - self._since > seconds


def untaken(transport: Transport) -> int:
    """Return how many written bytes the other side has not taken: ours, and those of the system."""
    number = transport.get_extra_info("socket").fileno()
    queued = fcntl.ioctl(number, termios.TIOCOUTQ, bytes(4))
    return transport.get_write_buffer_size() + int.from_bytes(queued, sys.byteorder)
