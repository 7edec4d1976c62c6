"""Rate and concurrency limits per tenant (``frontend.tenants``): which requests are admitted, and the headers for them.

Every router applies its part of a limit, which is the limit divided by the number of routers (docs/tenants.md).
"""

import math
import time
from collections.abc import Callable
from typing import Final

from mmrouter_lib.api import TenantLimits, Tenants
from mmrouter_router.admission.rate_limit import decide
from mmrouter_router.core.errors import RequestError

WEIGHTS: Final = {"high": 16, "standard": 4, "low": 1}  # turns of a tenant by its priority
SWEEP_ABOVE: Final = 1024  # tenants; above this, and above twice the number in use, idle ones are dropped
SHORTEST_RETRY, LONGEST_RETRY = 1, 30  # seconds
NEWEST_SHARE: Final = 1 / 8  # of the newest request in the mean
Headers = list[tuple[bytes, bytes]]


def mean_after(mean: float | None, seconds: float) -> float:
    """Return the exponential mean of durations after one more; ``None``: there was none."""
    return seconds if mean is None else mean + NEWEST_SHARE * (seconds - mean)


def retry_seconds(mean: float | None, running: int) -> int:
    """Return the expected whole seconds until one of a tenant's running requests ends, at least 1 and at most 30.

    By Little's law (J. D. C. Little, 1961) ``running`` requests of mean duration ``d`` end at a rate of
    ``running / d``. Only the tenant's own requests count, so that the time reveals nothing about other tenants.
    """
    if mean is None:
        return SHORTEST_RETRY
    return min(LONGEST_RETRY, max(SHORTEST_RETRY, math.ceil(mean / max(1, running))))


class _Usage:
    """``running``: requests under way. ``mean``: seconds that answered ones took. ``full_at``: the state of
    :func:`.rate_limit.decide`.
    """

    __slots__ = ("full_at", "mean", "running")

    def __init__(self) -> None:
        self.running, self.full_at = 0, 0.0
        self.mean: float | None = None


class Permit:
    """An admitted request, until the block ends. ``headers``: the headers about the rate limit in its answer."""

    __slots__ = ("_began", "_usage", "headers")

    def __init__(self, usage: _Usage, headers: Headers, began: float) -> None:
        self._usage, self.headers, self._began = usage, headers, began

    @property
    def retry_seconds(self) -> int:
        """Seconds after which the tenant may try again where all engines are full."""
        return retry_seconds(self._usage.mean, self._usage.running - 1)

    def answered(self, now: float) -> None:
        """Count the time of a request that has its whole answer."""
        self._usage.mean = mean_after(self._usage.mean, now - self._began)

    def __enter__(self) -> "Permit":
        self._usage.running += 1
        return self

    def __exit__(self, *_: object) -> None:
        self._usage.running -= 1


class TenantAdmission:
    """Admits requests by the limits of their tenants. ``routers``: how many routers share the limits now."""

    def __init__(
        self, tenants: Tenants | None, routers: Callable[[], int], clock: Callable[[], float] = time.monotonic
    ) -> None:
        tenants = tenants or Tenants()
        self._default, self._named = tenants.default, {each.name: each for each in tenants.named}
        self._routers, self.now = routers, clock
        self._used: dict[str, _Usage] = {}
        self._sweep_above = SWEEP_ABOVE

    def weight(self, tenant: str) -> int:
        return WEIGHTS[self._limits(tenant).priority]

    def is_concurrency_limited(self, tenant: str) -> bool:
        return self._limits(tenant).concurrency is not None

    def admit(self, tenant: str) -> Permit:
        """Charge one request to a tenant. Raises :class:`RequestError` (429), which charges nothing."""
        limits = self._limits(tenant)
        now, routers = self.now(), self._routers()
        usage = self._usage(tenant, now)
        if limits.concurrency is not None and usage.running >= (most := max(1, limits.concurrency // routers)):
            raise RequestError.concurrency_limited(most, retry_seconds(usage.mean, usage.running))
        if limits.requests_per_minute is None:
            return Permit(usage, [], now)
        share = limits.requests_per_minute / routers
        decision = decide(share, usage.full_at, now)
        headers = _headers(max(1, int(share)), decision.remaining, decision.full_at - now)
        if decision.wait:
            raise RequestError.rate_limited(math.ceil(decision.wait), headers)
        usage.full_at = decision.full_at
        return Permit(usage, [(name.encode(), value.encode()) for name, value in headers.items()], now)

    def _limits(self, tenant: str) -> TenantLimits:
        return self._named.get(tenant, self._default)

    def _usage(self, tenant: str, now: float) -> _Usage:
        usage = self._used.get(tenant)
        if usage is None:
            if len(self._used) >= self._sweep_above:
                self._used = {name: each for name, each in self._used.items() if each.running or each.full_at > now}
                self._sweep_above = max(SWEEP_ABOVE, 2 * len(self._used))
            usage = self._used[tenant] = _Usage()
        return usage


def _headers(limit: int, remaining: int, seconds: float) -> dict[str, str]:
    """Return OpenAI's headers about requests; the limit is full again after ``seconds``."""
    return {
        "x-ratelimit-limit-requests": str(limit),
        "x-ratelimit-remaining-requests": str(remaining),
        "x-ratelimit-reset-requests": f"{math.ceil(seconds)}s",
    }
