"""A budget in bytes for the bodies that a router holds, shared fairly between tenants.

Bytes are charged as they arrive: a head that announces a large body holds nothing. Where the budget is full, a tenant
within its share is served at the cost of those above theirs, whose slowest incomplete body is refused; above its share,
at the cost of its own stalled bodies only.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Final

from mmrouter_router.core.errors import RequestError

STALLED_SECONDS: Final = 1.0  # without a byte, after which a body gives way to another one of its tenant
Refuse = Callable[[RequestError], None]


class BodyBudget:
    """``limit`` bytes for the bodies of all requests together."""

    def __init__(self, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit, self.clock = limit, clock
        self.used = 0
        self.held: Counter[str] = Counter()  # tenant -> bytes
        self.incomplete: set[BodyReservation] = set()

    def victim(self, tenant: str, more: int) -> "BodyReservation | None":
        """Return the body that gives way to ``more`` bytes of a tenant, ``None`` where none does."""
        now, share = self.clock(), self.limit / len({*self.held, tenant})
        bodies: Iterable[BodyReservation] = self.incomplete
        if self.held[tenant] + more <= share:
            bodies = [body for body in bodies if self.held[body.tenant] > share]
        else:
            bodies = [body for body in bodies if body.tenant == tenant and now - body.progressed >= STALLED_SECONDS]
        return min(bodies, key=lambda body: body.size / (now - body.began + 0.1), default=None)


class BodyReservation:
    """One request's part of the budget. ``refuse``: ends its body with an error. Call ``release`` in every case."""

    tenant = ""  # set once the client has authenticated, before the first byte is charged

    def __init__(self, budget: BodyBudget, refuse: Refuse) -> None:
        self._budget, self._refuse = budget, refuse
        self.size = 0
        self.began = self.progressed = budget.clock()

    def expect(self, size: int) -> None:
        """Raise 429 for an announced body for which there is no space, before it arrives."""
        budget = self._budget
        if self._exceeds(size - self.size) and budget.victim(self.tenant, size - self.size) is None:
            raise RequestError.router_full(budget.limit)

    def grow(self, size: int) -> None:
        """Reserve ``size`` bytes in all, always for the only request. Raises 429 where others leave too little."""
        budget, more = self._budget, size - self.size
        if more <= 0:
            return
        while self._exceeds(more):
            if (victim := budget.victim(self.tenant, more)) is None or victim is self:
                raise RequestError.router_full(budget.limit)
            victim.give_way()
        budget.used += more
        budget.held[self.tenant] += more
        self.size, self.progressed = size, budget.clock()
        budget.incomplete.add(self)

    def complete(self) -> None:
        """Note that the whole body has arrived, after which it does not give way."""
        self._budget.incomplete.discard(self)

    def give_way(self) -> None:
        error = RequestError.router_full(self._budget.limit)
        self.release()
        self._refuse(error)

    def release(self) -> None:
        """Return the bytes to the budget; idempotent."""
        budget = self._budget
        budget.used -= self.size
        budget.held[self.tenant] -= self.size
        if not budget.held[self.tenant]:
            del budget.held[self.tenant]
        self.size = 0
        budget.incomplete.discard(self)

    def _exceeds(self, more: int) -> bool:
        return self._budget.used > self.size and self._budget.used + more > self._budget.limit
