"""A rate limit as a bucket that refills evenly: the generic cell rate algorithm of ITU-T I.371, appendix I.

The state is one number, the time at which the bucket is full again, so a tenant whose bucket is full needs no state.
"""

import math
from typing import Final, NamedTuple

PERIOD: Final = 60.0  # seconds in which an empty bucket fills


class RateDecision(NamedTuple):
    """``full_at``: the next state. ``wait``: seconds until the request would be admitted, 0 where it is.

    ``remaining``: further requests that would be admitted now.
    """

    full_at: float
    wait: float
    remaining: int


def decide(per_minute: float, full_at: float, now: float) -> RateDecision:
    """Decide on one request, with times in seconds. A bucket holds ``per_minute`` requests, at least one."""
    interval = PERIOD / per_minute
    full_at = max(full_at, now)
    room = max(PERIOD, interval) - (full_at - now)
    # A full bucket is a sum of as many parts as it holds, and each sum is rounded to a value of the clock.
    rounding = (1 + per_minute) * math.ulp(full_at + PERIOD)
    after = room - interval + rounding
    if after < 0:
        return RateDecision(full_at, interval - room, 0)
    return RateDecision(full_at + interval, 0.0, int(after / interval))
