"""Time for leases: seconds that also count while the machine sleeps."""

import time


def boot_time() -> float:
    """Return seconds of a clock that nobody sets and that does not stop in a suspended machine."""
    if hasattr(time, "CLOCK_BOOTTIME"):
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.monotonic()
