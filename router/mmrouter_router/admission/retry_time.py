"""Estimates when a tenant at its limit may try again, from the durations of its requests.

By Little's law (J. D. C. Little, 1961) ``running`` requests of mean duration ``d`` end at a rate of ``running / d``.
Only the tenant's own requests count, so that the time reveals nothing about other tenants.
"""

import math
from typing import Final

MIN_SECONDS, MAX_SECONDS = 1, 30
SHARE: Final = 1 / 8  # of the newest request in the mean


def mean_after(mean: float | None, seconds: float) -> float:
    """Return the exponential mean of durations after one more; ``None``: there was none."""
    return seconds if mean is None else mean + SHARE * (seconds - mean)


def retry_seconds(mean: float | None, running: int) -> int:
    """Return the expected whole seconds until one of the running requests ends, at least 1 and at most 30."""
    if mean is None:
        return MIN_SECONDS
    return min(MAX_SECONDS, max(MIN_SECONDS, math.ceil(mean / max(1, running))))
