"""Wait for a condition, with a bound that only ends a hang."""

import time
from collections.abc import Callable
from typing import Any

PATIENCE = 5
"""How many times longer than expected a test waits: a busy machine is slow, and that is no failure."""


def wait_for(condition: Callable[[], Any], seconds: float, what: str, *, every: float = 0.02) -> Any:
    """Poll until ``condition`` returns something true and return it. Raises ``TimeoutError`` that names ``what``.

    ``seconds``: more than it takes on an idle machine; the bound is :data:`PATIENCE` times that.
    """
    deadline = time.monotonic() + PATIENCE * seconds
    while True:
        if value := condition():
            return value
        if time.monotonic() >= deadline:
            raise TimeoutError(f"not within {PATIENCE * seconds:g} s: {what}")
        time.sleep(every)
