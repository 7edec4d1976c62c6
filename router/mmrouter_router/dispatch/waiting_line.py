"""Requests that wait while all engines are full, with turns between tenants by their weights.

Turns follow self-clocked fair queueing (S. J. Golestani, 1994) with requests of size 1: of two tenants that always have
requests waiting, one of weight 4 gets four turns for each turn of one of weight 1.
"""

import asyncio
import heapq
import itertools
from collections import OrderedDict
from collections.abc import Callable
from typing import TypeVar

from mmrouter_router.scheduling.placer import QueueFullError

T = TypeVar("T")


class _Tenant:
    """A tenant's waiting requests, oldest first. It stays in the heap until its turn comes without one."""

    __slots__ = ("requests", "weight")

    def __init__(self, weight: int) -> None:
        self.weight = weight
        self.requests: OrderedDict[asyncio.Event, None] = OrderedDict()  # an event is set when its request may try


class WaitingLine:
    """A line with places for ``limit`` requests, each for at most ``seconds``. ``weight``: tenant -> its weight.

    A tenant may have as many requests waiting as places are free, so a place always remains for another tenant.
    """

    def __init__(self, limit: int, seconds: float, weight: Callable[[str], int]) -> None:
        self._limit, self._seconds, self._weight = limit, seconds, weight
        self._tenants: dict[str, _Tenant] = {}
        self._heap: list[tuple[float, int, str]] = []  # virtual time of the next turn, order of arrival, tenant
        self._numbers = itertools.count()
        self._virtual = 0.0
        self._first: asyncio.Event | None = None  # the request whose turn it is
        self.waiting = 0

    async def place(self, tenant: str, attempt: Callable[[], T]) -> T:
        """Return ``attempt()``, tried at once or in turn until it does not raise ``QueueFullError``.

        Raises ``QueueFullError`` where no place is free or the time is over, and what ``attempt`` raises.
        """
        if not self.waiting:
            try:
                return attempt()
            except QueueFullError as error:
                full = error
        else:
            full = QueueFullError("other requests wait, too")
        request = self._enter(tenant, full)
        try:
            async with asyncio.timeout(self._seconds):
                while True:
                    await request.wait()
                    request.clear()
                    try:
                        return attempt()
                    except QueueFullError as error:
                        full = error
        except TimeoutError:
            raise full from None
        finally:
            self._leave(tenant, request)

    def wake(self) -> None:
        """Let the next request try, because an engine may have a place."""
        if self._first is None:
            self._first = self._next()
        if self._first is not None:
            self._first.set()

    def _enter(self, tenant: str, full: QueueFullError) -> asyncio.Event:
        queue = self._tenants.get(tenant)
        if (len(queue.requests) if queue is not None else 0) >= self._limit - self.waiting:
            raise full
        if queue is None:
            queue = self._tenants[tenant] = _Tenant(self._weight(tenant))
            self._push(tenant, queue)
        request = asyncio.Event()
        queue.requests[request] = None
        self.waiting += 1
        return request

    def _leave(self, tenant: str, request: asyncio.Event) -> None:
        self.waiting -= 1
        if request is self._first:
            self._first = None
        else:
            del self._tenants[tenant].requests[request]
        if not self.waiting:
            self._tenants.clear()
            self._heap.clear()
            self._virtual = 0.0
        elif self._first is None:
            self.wake()  # several engines' places may be free, or this request left without taking one

    def _next(self) -> asyncio.Event | None:
        while self._heap:
            self._virtual, _, tenant = heapq.heappop(self._heap)
            queue = self._tenants[tenant]
            if queue.requests:
                self._push(tenant, queue)
                return queue.requests.popitem(last=False)[0]
            del self._tenants[tenant]
        return None

    def _push(self, tenant: str, queue: _Tenant) -> None:
        heapq.heappush(self._heap, (self._virtual + 1 / queue.weight, next(self._numbers), tenant))
