"""Return freed memory to the system after work on large inputs.

glibc keeps freed memory in its arenas: after tokenizing megabytes of text a router held hundreds of unused megabytes.
Trimming a gigabyte takes a second, so it runs in a thread, and once for many requests.
"""

import asyncio
import ctypes
from collections.abc import Callable
from typing import Final

TRIM_BYTES: Final = 1024 * 1024  # size of an input from which on its work leaves enough freed memory for a trim
TRIM_SECONDS: Final = 10.0  # between the end of such work and the trim


def malloc_trim() -> Callable[[int], int] | None:
    """Return glibc's ``malloc_trim``; ``None`` with another C library."""
    try:
        return ctypes.CDLL(None).malloc_trim
    except AttributeError:
        return None


class HeapTrimmer:
    """Trims the heap some seconds after large work, at most once in that time."""

    def __init__(self, trim: Callable[[int], int] | None, seconds: float = TRIM_SECONDS) -> None:
        self._trim, self._seconds = trim, seconds
        self._timer: asyncio.TimerHandle | None = None

    def after(self, size: int) -> None:
        """Note that work on ``size`` bytes of input has ended. Call it in the event loop."""
        if size >= TRIM_BYTES and self._trim is not None and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._seconds, self._start, self._trim)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _start(self, trim: Callable[[int], int]) -> None:
        self._timer = None
        asyncio.get_running_loop().run_in_executor(None, trim, 0)
