"""Timeouts of client connections: for a request's head, for its body, for reading the answer.

A slow client holds memory, a share of the body budget or an engine. The server checks every connection about once a
second, so requests pay nothing for it.
"""

import fcntl
import sys
import termios
from asyncio import Transport
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class ClientTimeouts:
    """Limits for one connection, in seconds.

    ``head_seconds``: for a whole head, from the start of the connection or the head's first byte. A body may stall for
    ``body_stall_seconds`` and must average ``body_rate`` bytes per second. The client must read something of its answer
    every ``answer_stall_seconds``.
    """

    head_seconds: float = 75.0  # as long as an idle connection is kept
    body_stall_seconds: float = 30.0
    body_rate: int = 16 * 1024
    answer_stall_seconds: float = 60.0

    def body_seconds(self, received: int) -> float:
        """Return how long a body may take of which ``received`` bytes are there."""
        return self.body_stall_seconds + received / self.body_rate


CLIENT_TIMEOUTS: Final = ClientTimeouts()
MAX_STEP_SECONDS: Final = 2.0
"""The most that :class:`ProcessClock` advances between two checks."""


class ProcessClock:
    """A clock that stands still while the process does, so that a stalled router does not time out its clients."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._at: float | None = None

    def advance(self, now: float) -> float:
        """Return the clock's seconds at ``now``, a time of a clock that never stops."""
        if self._at is not None:
            self._seconds += min(now - self._at, MAX_STEP_SECONDS)
        self._at = now
        return self._seconds


class StallTimer:
    """Measures for how long a connection has waited for the same thing."""

    def __init__(self) -> None:
        self._awaited: Hashable = None
        self._since = 0.0

    def expired(self, awaited: Hashable, seconds: float, now: float) -> bool:
        """Return whether ``awaited`` has been the same for more than ``seconds``; ``None``: nothing is awaited."""
        if awaited != self._awaited:
            self._awaited, self._since = awaited, now
        return awaited is not None and now - self._since > seconds


def unread_bytes(transport: Transport) -> int:
    """Return how many written bytes the peer has not acknowledged, in our buffer and in the kernel's."""
    number = transport.get_extra_info("socket").fileno()
    queued = fcntl.ioctl(number, termios.TIOCOUTQ, bytes(4))
    return transport.get_write_buffer_size() + int.from_bytes(queued, sys.byteorder)
