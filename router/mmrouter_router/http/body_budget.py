"""Budget in bytes for the request bodies that a router holds in memory; a body beyond it is refused with 429."""

from mmrouter_router.core.errors import RequestError


class BodyBudget:
    """``limit`` bytes for the bodies of all requests together."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0


class BodyReservation:
    """One request's share of the budget. Call ``release`` in every case."""

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self.size = 0

    def grow(self, size: int) -> None:
        """Reserve ``size`` bytes in all. Raises :class:`RequestError` (429) where other requests leave too little.

        The only request is always admitted: the size of a single body has a limit of its own.
        """
        budget, more = self._budget, size - self.size
        if more <= 0:
            return
        if budget.used > self.size and budget.used + more > budget.limit:
            raise RequestError.router_full(budget.used, budget.limit)
        budget.used += more
        self.size = size

    def release(self) -> None:
        """Return the bytes to the budget; idempotent."""
        self._budget.used -= self.size
        self.size = 0
