"""Requests that wait while all engines are full, with turns between tenants by their weights.

Turns follow self-clocked fair queueing (S. J. Golestani, 1994) with requests of size 1: of two tenants that always have
requests waiting, one of weight 4 gets four turns for each turn of one of weight 1. Requests that only some engines may
answer, such as those that have an adapter, take turns among themselves: they keep no other request from a free engine.
"""

import asyncio
import heapq
import itertools
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from typing import TypeVar

from mmrouter_router.scheduling.placer import QueueFullError

T = TypeVar("T")


class WaitingLine:
    """A line with places for ``limit`` requests, each for at most ``seconds``. ``weight``: tenant -> its weight.

    A tenant may have as many requests waiting as places are free, so a place always remains for another tenant.
    """

    def __init__(self, limit: int, seconds: float, weight: Callable[[str], int]) -> None:
        self._limit, self._seconds, self._weight = limit, seconds, weight
        self._turns: dict[Hashable, _Turns] = {}  # by the engines that may answer
        self._held: Counter[str] = Counter()  # tenant -> its places
        self.waiting = 0

    async def place(self, tenant: str, attempt: Callable[[], T], engines: Hashable = None) -> T:
        """Return ``attempt()``, tried at once or in turn until it does not raise ``QueueFullError``.

        ``engines``: equal for requests that the same engines may answer. Raises ``QueueFullError`` where no place is
        free or the time is over, and what ``attempt`` raises.
        """
        if (turns := self._turns.get(engines)) is None:
            try:
                return attempt()
            except QueueFullError as error:
                full = error
        else:
            full = QueueFullError("other requests wait, too")
        if self._held[tenant] >= self._limit - self.waiting:
            raise full
        if turns is None:
            turns = self._turns[engines] = _Turns()
        self.waiting += 1
        self._held[tenant] += 1
        request = turns.enter(tenant, self._weight)
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
            self.waiting -= 1
            self._held[tenant] -= 1
            if not self._held[tenant]:
                del self._held[tenant]
            if not turns.leave(tenant, request):
                del self._turns[engines]

    def wake(self) -> None:
        """Let the next requests try, because an engine may have a place."""
        for turns in self._turns.values():
            turns.wake()


class _Tenant:
    """A tenant's waiting requests, oldest first. It stays in the heap until its turn comes without one."""

    __slots__ = ("requests", "weight")

    def __init__(self, weight: int) -> None:
        self.weight = weight
        self.requests: OrderedDict[asyncio.Event, None] = OrderedDict()  # an event is set when its request may try


class _Turns:
    """The turns of requests that the same engines may answer."""

    def __init__(self) -> None:
        self._tenants: dict[str, _Tenant] = {}
        self._heap: list[tuple[float, int, str]] = []  # virtual time of the next turn, order of arrival, tenant
        self._numbers = itertools.count()
        self._virtual = 0.0
        self._first: asyncio.Event | None = None  # the request whose turn it is
        self._waiting = 0

    def enter(self, tenant: str, weight: Callable[[str], int]) -> asyncio.Event:
        queue = self._tenants.get(tenant)
        if queue is None:
            queue = self._tenants[tenant] = _Tenant(weight(tenant))
            self._push(tenant, queue)
        request = asyncio.Event()
        queue.requests[request] = None
        self._waiting += 1
        return request

    def leave(self, tenant: str, request: asyncio.Event) -> int:
        """Remove a request; return how many still wait."""
        self._waiting -= 1
        if request is self._first:
            self._first = None
        else:
            del self._tenants[tenant].requests[request]
        if self._waiting and self._first is None:
            self.wake()  # several engines' places may be free, or this request left without taking one
        return self._waiting

    def wake(self) -> None:
        if self._first is None:
            self._first = self._next()
        if self._first is not None:
            self._first.set()

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
