"""Threads for work that grows with what a client sends, so that the event loop serves the others meanwhile.

Tenants take turns, so that one with many large requests does not keep another one waiting. Work of a request whose
client has left is skipped where it has not begun.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

from mmrouter_router.core.fair_slots import FairSlots
from mmrouter_router.core.memory_trim import HeapTrimmer, malloc_trim

INLINE_BYTES: Final = 32 * 1024
"""Bytes of input up to which work runs in the event loop: less than 1 ms for every stage, where a thread costs 0.1."""
THREADS: Final = 2  # Python runs one at a time; what they gain is that tokenizing, hashing and decoding run beside it

T = TypeVar("T")


class WorkerThreads:
    """Runs functions in ``threads`` threads. May be created before the event loop runs."""

    def __init__(self, threads: int = THREADS) -> None:
        self._executor = ThreadPoolExecutor(threads, "worker")
        self._slots = FairSlots(threads)
        self._heap = HeapTrimmer(malloc_trim())

    async def run(self, tenant: str, size: int, work: Callable[..., T], *arguments: Any) -> T:
        """Return ``work(*arguments)``, which takes ``size`` bytes of a tenant's input. Raises what it raises."""
        if size <= INLINE_BYTES:
            return work(*arguments)
        await self._slots.take(tenant)
        job = asyncio.get_running_loop().run_in_executor(self._executor, work, *arguments)
        job.add_done_callback(lambda _: self._ended(tenant, size))
        return await asyncio.shield(job)  # a thread cannot be interrupted, so it counts until it ends

    def _ended(self, tenant: str, size: int) -> None:
        self._slots.release(tenant)
        self._heap.after(size)

    def close(self) -> None:
        self._heap.close()
        self._executor.shutdown(wait=False, cancel_futures=True)
