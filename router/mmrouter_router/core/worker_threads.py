"""Threads for work that grows with what a client sends, so that the event loop serves the others meanwhile.

Tenants take turns, so that one with many large requests does not keep another one waiting. Work of a request whose
client has left is skipped where it has not begun.
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

INLINE_BYTES: Final = 32 * 1024
"""Bytes of input up to which work runs in the event loop: less than 1 ms for every stage, where a thread costs 0.1."""
THREADS: Final = 2  # Python runs one at a time; what they gain is that tokenizing, hashing and decoding run beside it

T = TypeVar("T")


class WorkerThreads:
    """Runs functions in ``threads`` threads. May be created before the event loop runs."""

    def __init__(self, threads: int = THREADS) -> None:
        self._executor = ThreadPoolExecutor(threads, "worker")
        self._free = threads
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()  # tenant -> its turns

    async def run(self, tenant: str, size: int, work: Callable[..., T], *arguments: Any) -> T:
        """Return ``work(*arguments)``, which takes ``size`` bytes of a tenant's input. Raises what it raises."""
        if size <= INLINE_BYTES:
            return work(*arguments)
        await self._take_turn(tenant)
        job = asyncio.get_running_loop().run_in_executor(self._executor, work, *arguments)
        job.add_done_callback(lambda _: self._release())
        return await asyncio.shield(job)  # a thread cannot be interrupted, so it counts until it ends

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def _take_turn(self, tenant: str) -> None:
        if self._free:
            self._free -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # the turn came in the same step of the loop as the cancellation
                self._release()
            raise

    def _release(self) -> None:
        while self._waiting:
            tenant, turns = self._waiting.popitem(last=False)
            turn = turns.popleft()
            if turns:
                self._waiting[tenant] = turns  # behind the other tenants
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1
