"""How late threads of this machine run, by which bounds on times are extended: a busy machine breaks no promise."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from waiting import repeating

PAUSE_SECONDS = 0.05


@dataclass
class Delay:
    longest: float = 0.0  # seconds that a thread waited for a CPU


@contextmanager
def measured() -> Iterator[Delay]:
    """Measure until the block ends."""
    delay, last = Delay(), time.monotonic()

    def sample() -> None:
        nonlocal last
        now = time.monotonic()
        delay.longest, last = max(delay.longest, now - last - PAUSE_SECONDS), now

    with repeating(sample, PAUSE_SECONDS):
        yield delay
