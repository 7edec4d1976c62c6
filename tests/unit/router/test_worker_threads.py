"""Worker threads: the event loop goes on, tenants take turns, and cancelled work does not begin."""

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest

from mmrouter_router.core.worker_threads import INLINE_BYTES, WorkerThreads

LARGE = INLINE_BYTES + 1


@pytest.fixture
async def one() -> AsyncIterator[WorkerThreads]:
    threads = WorkerThreads(1)
    yield threads
    threads.close()


class Gate:
    """Holds the only thread until it is opened."""

    def __init__(self, threads: WorkerThreads) -> None:
        self.opened = threading.Event()
        self.task = asyncio.create_task(threads.run("holder", LARGE, self.opened.wait, 60))

    async def open(self) -> None:
        self.opened.set()
        await self.task


async def test_small_work_runs_in_the_loop_and_large_work_beside_it(one: WorkerThreads) -> None:
    here = threading.get_ident()
    assert await one.run("a", INLINE_BYTES, threading.get_ident) == here
    assert await one.run("a", LARGE, threading.get_ident) != here


async def test_errors_reach_the_caller_and_free_the_thread(one: WorkerThreads) -> None:
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            await one.run("a", LARGE, divmod, 1, 0)
    assert await one.run("a", LARGE, divmod, 7, 2) == (3, 1)


async def test_tenants_take_turns(one: WorkerThreads) -> None:
    gate, order = Gate(one), list[str]()
    await asyncio.sleep(0)
    tasks = [asyncio.create_task(one.run(name, LARGE, order.append, name)) for name in "aaaabbc"]
    await asyncio.sleep(0)
    await gate.open()
    await asyncio.gather(*tasks)
    assert "".join(order) == "abcabaa"


async def test_cancelled_work_never_begins_and_passes_its_turn_on(one: WorkerThreads) -> None:
    gate, done = Gate(one), list[str]()
    await asyncio.sleep(0)
    tasks = [asyncio.create_task(one.run(name, LARGE, done.append, name)) for name in "abc"]
    await asyncio.sleep(0)
    tasks[0].cancel()
    await gate.open()
    tasks[1].cancel()  # at the same time as its turn comes
    await asyncio.gather(*tasks, return_exceptions=True)
    assert done[-1] == "c"
    assert "a" not in done
    assert await one.run("a", LARGE, divmod, 7, 2) == (3, 1)


async def test_a_thread_that_cannot_be_interrupted_counts_until_it_ends(one: WorkerThreads) -> None:
    gate = Gate(one)
    await asyncio.sleep(0)
    gate.task.cancel()
    waiting = asyncio.create_task(one.run("a", LARGE, divmod, 7, 2))
    for _ in range(3):
        await asyncio.sleep(0)
    assert not waiting.done()
    gate.opened.set()
    assert await waiting == (3, 1)
