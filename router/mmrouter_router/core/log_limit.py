"""Bound the log lines that requests can cause: some at once, then one a second from each place in the code."""

import logging
import time
from collections.abc import Callable
from typing import Final

BURST: Final = 20.0  # lines
LINES_PER_SECOND: Final = 1.0


class LogLimit(logging.Filter):
    """A filter for a handler. After omitted lines, the next line from the same place in the code says how many."""

    def __init__(
        self, burst: float = BURST, per_second: float = LINES_PER_SECOND, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__()
        self._burst, self._per_second, self._clock = burst, per_second, clock
        self._places: dict[tuple[str, int], tuple[float, float, int]] = {}  # -> lines left, at that time, left out

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno <= logging.DEBUG:  # off by default, and requested as a line per decision
            return True
        place, now = (record.pathname, record.lineno), self._clock()
        left, at, omitted = self._places.get(place, (self._burst, now, 0))
        left = min(self._burst, left + (now - at) * self._per_second)
        if left < 1:
            self._places[place] = left, now, omitted + 1
            return False
        self._places[place] = left - 1, now, 0
        if omitted:
            record.msg, record.args = f"{record.getMessage()} ({omitted} similar lines were omitted)", None
        return True
