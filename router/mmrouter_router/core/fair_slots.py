"""Slots that tenants take in turns, so that one with many requests does not keep another one waiting."""

import asyncio
from collections import Counter, OrderedDict, deque


class FairSlots:
    """``count`` slots, of which one tenant holds at most ``per_tenant``. May be created before the event loop runs.

    The empty name stands for a router without tenants, which may use all slots.
    """

    def __init__(self, count: int, per_tenant: int | None = None) -> None:
        self._free, self._count, self._per_tenant = count, count, per_tenant or count
        self._held: Counter[str] = Counter()
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()  # tenant -> its turns

    async def take(self, tenant: str) -> None:
        """Wait for a slot; give it back with :meth:`release`."""
        if self._free and self._may_take(tenant):
            self._take(tenant)
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # the turn came in the same step of the loop as the cancellation
                self.release(tenant)
            raise

    def release(self, tenant: str) -> None:
        self._free += 1
        self._held[tenant] -= 1
        if not self._held[tenant]:
            del self._held[tenant]
        for name in [name for name in self._waiting if self._may_take(name)]:
            turns = self._waiting.pop(name)
            while turns and (turn := turns.popleft()).done():
                pass  # cancelled meanwhile
            if turns:
                self._waiting[name] = turns  # behind the other tenants
            if not turn.done():
                self._take(name)
                turn.set_result(None)
                return

    def _may_take(self, tenant: str) -> bool:
        return self._held[tenant] < (self._per_tenant if tenant else self._count)

    def _take(self, tenant: str) -> None:
        self._free -= 1
        self._held[tenant] += 1
