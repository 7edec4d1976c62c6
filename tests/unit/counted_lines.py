"""Count lines of Python that run in this thread: work that does not depend on the machine's speed."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any


@dataclass
class CountedLines:
    lines: int = 0


@contextmanager
def counted_lines() -> Iterator[CountedLines]:
    """Count the lines of functions that are called in the block."""
    counted = CountedLines()

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        counted.lines += event == "line"
        return trace

    sys.settrace(trace)
    try:
        yield counted
    finally:
        sys.settrace(None)
