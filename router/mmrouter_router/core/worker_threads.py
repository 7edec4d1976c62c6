"""Threads for work that grows with what a client sends, so that the event loop serves the others meanwhile.

Tenants take turns, so that one with many large requests does not keep another one waiting, and large work has threads
of its own, so that a prompt of some pages does not wait for a body of 60 MB. Work of a request whose client has left is
skipped where it has not begun.
"""

import asyncio
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

from mmrouter_router.core.fair_slots import FairSlots
from mmrouter_router.core.memory_trim import HeapTrimmer, malloc_trim

INLINE_BYTES: Final = 32 * 1024
"""Bytes of input up to which work runs in the event loop, where a thread costs 0.1 ms. Every stage takes less than 1 ms
for them but tokenizing, whose bound is in :mod:`mmrouter_router.request.prepare`, and work on many small objects, which
:func:`mmrouter_router.intake.json_body.work_size` counts as more bytes."""
LARGE_BYTES: Final = 1024 * 1024  # bytes of input above which work runs in the threads for large work
THREADS: Final = 2
"""Threads for either size. One at a time runs Python; tokenizing, hashing and decoding run beside it."""
SWITCH_SECONDS: Final = 0.0005
"""How long a thread may run Python while the event loop waits to run. It waits so long whenever it wakes beside such a
thread, and with Python's 5 ms that is half of the time between two tokens of an engine."""

T = TypeVar("T")


def switch_threads_often() -> None:
    """Let the event loop run soon after it wakes while another thread runs Python; for the whole process."""
    sys.setswitchinterval(SWITCH_SECONDS)


class _Lane:
    """Threads, and the turns of the tenants at them."""

    def __init__(self, threads: int, name: str) -> None:
        self.executor, self.slots = ThreadPoolExecutor(threads, name), FairSlots(threads)


class WorkerThreads:
    """Runs functions in ``threads`` threads, and large work in as many others. May be created before the event loop."""

    def __init__(self, threads: int = THREADS) -> None:
        self._small, self._large = _Lane(threads, "worker"), _Lane(threads, "large")
        self._heap = HeapTrimmer(malloc_trim())

    async def run(self, tenant: str, size: int, work: Callable[..., T], *arguments: Any) -> T:
        """Return ``work(*arguments)``, which takes ``size`` bytes of a tenant's input. Raises what it raises."""
        if size <= INLINE_BYTES:
            return work(*arguments)
        return await self.run_in_thread(tenant, size, work, *arguments)

    async def run_in_thread(self, tenant: str, size: int, work: Callable[..., T], *arguments: Any) -> T:
        """Do as :meth:`run`, in a thread for any size."""
        lane = self._large if size > LARGE_BYTES else self._small
        await lane.slots.take(tenant)
        job = asyncio.get_running_loop().run_in_executor(lane.executor, work, *arguments)
        job.add_done_callback(lambda _: self._ended(lane, tenant, size))
        return await asyncio.shield(job)  # a thread cannot be interrupted, so it counts until it ends

    def _ended(self, lane: _Lane, tenant: str, size: int) -> None:
        lane.slots.release(tenant)
        self._heap.after(size)

    def close(self) -> None:
        self._heap.close()
        for lane in (self._small, self._large):
            lane.executor.shutdown(wait=False, cancel_futures=True)
