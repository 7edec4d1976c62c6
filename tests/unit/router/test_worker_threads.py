"""Worker threads and slots: the event loop goes on, tenants take turns, and cancelled work does not begin."""

import asyncio
import resource
import threading
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmrouter_router.core import memory_trim
from mmrouter_router.core.fair_slots import FairSlots
from mmrouter_router.core.worker_threads import INLINE_BYTES, LARGE_BYTES, WorkerThreads

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


async def test_work_of_any_size_can_be_kept_out_of_the_loop(one: WorkerThreads) -> None:
    assert await one.run_in_thread("a", 1, threading.get_ident) != threading.get_ident()


async def test_work_on_a_page_does_not_wait_for_work_on_a_large_body(one: WorkerThreads) -> None:
    opened = threading.Event()
    large = asyncio.create_task(one.run("greedy", LARGE_BYTES + 1, opened.wait, 60))
    await asyncio.sleep(0)
    async with asyncio.timeout(30):
        assert await one.run("greedy", LARGE, divmod, 7, 2) == (3, 1)
    assert not large.done()
    opened.set()
    assert await large


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


async def test_a_tenant_leaves_the_others_some_slots() -> None:
    slots = FairSlots(4, per_tenant=2)
    greedy = [asyncio.create_task(slots.take("greedy")) for _ in range(3)]
    await asyncio.sleep(0)
    assert [task.done() for task in greedy] == [True, True, False]
    async with asyncio.timeout(5):
        await slots.take("modest")
        slots.release("greedy")
        await greedy[2]
    for name in ("greedy", "greedy", "modest"):
        slots.release(name)


async def test_a_router_without_tenants_uses_all_slots() -> None:
    slots = FairSlots(4, per_tenant=2)
    async with asyncio.timeout(5):
        for _ in range(4):
            await slots.take("")


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["take", "release", "cancel"])), max_size=60))
def test_slots_are_never_lost_and_never_exceeded(steps: list[tuple[str, str]]) -> None:
    async def run() -> None:
        slots = FairSlots(3, per_tenant=2)
        held, waiting = Counter[str](), list[tuple[str, asyncio.Task[None]]]()
        for tenant, step in steps:
            if step == "take":
                waiting.append((tenant, asyncio.create_task(slots.take(tenant))))
            elif step == "release" and held[tenant]:
                slots.release(tenant)
                held[tenant] -= 1
            elif step == "cancel" and waiting:
                waiting[-1][1].cancel()
            for _ in range(3):
                await asyncio.sleep(0)
            held += Counter(name for name, task in waiting if task.done() and not task.cancelled())
            waiting = [(name, task) for name, task in waiting if not task.done()]
            assert held.total() <= 3
            assert max(held.values(), default=0) <= 2
            assert all(held.total() == 3 or held[name] == 2 for name, _ in waiting), "a slot is free for it"
        for _, task in waiting:
            task.cancel()

    asyncio.run(run())


def resident() -> int:
    """The bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def fragments() -> list[bytes]:
    """Allocate 200 MiB in pieces that glibc keeps when they are freed, because a few between them stay."""
    pieces = [bytes(4000) for _ in range(200 * 256)]
    return pieces[::100]


@pytest.mark.skipif(memory_trim.malloc_trim() is None, reason="not run: the C library is not glibc")
async def test_memory_of_large_work_returns_to_the_system(one: WorkerThreads) -> None:
    before = resident()
    kept = [await one.run("a", memory_trim.TRIM_BYTES, fragments) for _ in range(2)]
    async with asyncio.timeout(60):
        while resident() - before > 100 * 1024**2:
            await asyncio.sleep(0.1)
    assert len(kept) == 2


async def test_the_heap_is_trimmed_once_for_much_large_work_and_not_for_small() -> None:
    trimmed: list[int] = []
    trimmer = memory_trim.HeapTrimmer(lambda pad: trimmed.append(pad) or 1, seconds=0.01)
    trimmer.after(memory_trim.TRIM_BYTES - 1)
    await asyncio.sleep(0.1)
    assert not trimmed
    for _ in range(100):
        trimmer.after(memory_trim.TRIM_BYTES)
    async with asyncio.timeout(60):
        while not trimmed:
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
    assert trimmed == [0]
