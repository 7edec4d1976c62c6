"""A clock for leases: seconds that also count while the machine sleeps."""

import time


def boot_time() -> float:
    """Return seconds of a clock that is never set and does not stop while the machine is suspended."""
    if hasattr(time, "CLOCK_BOOTTIME"):
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.monotonic()
