"""The line of requests while all engines are full: fair, bounded, and never idle beside a free place."""

import asyncio
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.router.rig import cancelled
from waiting import until

from mmrouter_router.dispatch.waiting_line import WaitingLine
from mmrouter_router.scheduling.placer import QueueFullError

WEIGHTS = {"high": 16, "standard": 4, "low": 1}


def weight(tenant: str) -> int:
    return WEIGHTS[tenant.partition("-")[0]]


class Engines:
    """Engines with some free places, and the line before them. ``placed``: tenants in the order of their turns."""

    def __init__(self, limit: int = 1000, seconds: float = 600.0, free: int = 0) -> None:
        self.line = WaitingLine(limit, seconds, weight)
        self.free, self.placed = free, list[str]()

    async def ask(self, tenant: str) -> None:
        def attempt() -> None:
            if not self.free:
                raise QueueFullError("full")
            self.free -= 1
            self.placed.append(tenant)

        await self.line.place(tenant, attempt)

    def arrive(self, tenant: str, count: int = 1) -> list["asyncio.Task[None]"]:
        return [asyncio.create_task(self.ask(tenant)) for _ in range(count)]

    async def release(self, count: int = 1) -> None:
        """Free places, and wait until they are taken."""
        before = len(self.placed)
        self.free += count
        self.line.wake()
        await until(lambda: len(self.placed) == before + count)


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


@settings(deadline=None, max_examples=10)
@given(st.lists(st.sampled_from(["high-1", "high-2", "standard-1", "low-1", "low-2"]), min_size=2, unique=True))
def test_tenants_with_waiting_requests_get_turns_by_their_weights(tenants: list[str]) -> None:
    async def run() -> None:
        engines, turns = Engines(), 60
        tasks = [task for tenant in tenants for task in engines.arrive(tenant, turns)]
        await settle()
        for _ in range(turns):
            await engines.release()
            served = {name: engines.placed.count(name) / weight(name) for name in tenants}
            bound = {name: 1 / weight(name) for name in tenants}
            for one in tenants:
                for other in tenants:
                    assert served[one] - served[other] <= bound[one] + bound[other] + 1e-9
        await cancelled(*tasks)
        assert engines.line.waiting == 0

    asyncio.run(run())


async def test_a_new_tenants_first_request_waits_for_few_turns_whatever_waits_before_it() -> None:
    engines = Engines()
    tasks = engines.arrive("low-old", 400) + engines.arrive("high-old", 400)
    await settle()
    for _ in range(100):
        await engines.release()
    for tenant, turns in (("high-new", 3), ("standard-new", 7), ("low-new", 20)):
        before = len(engines.placed)
        tasks += engines.arrive(tenant)
        await settle()
        await engines.release(turns)
        assert tenant in engines.placed[before:]
    await cancelled(*tasks)


async def test_a_tenants_own_requests_keep_their_order() -> None:
    engines, order = Engines(), list[int]()

    async def ask(number: int) -> None:
        await engines.ask("low")
        order.append(number)

    tasks = [asyncio.create_task(ask(number)) for number in range(20)]
    await settle()
    await engines.release(20)
    await asyncio.gather(*tasks)
    assert order == list(range(20))


@pytest.mark.parametrize("limit", [1, 2, 7, 100])
async def test_a_tenant_leaves_places_for_others_however_many_requests_it_sends(limit: int) -> None:
    engines, tasks = Engines(limit), list[asyncio.Task[None]]()
    most = limit
    for number in range(8):
        new = engines.arrive(f"low-{number}", limit + 1)
        await settle()
        refused = [task for task in new if task.done()]
        assert all(isinstance(task.exception(), QueueFullError) for task in refused)
        entered = len(new) - len(refused)
        assert entered <= (most + 1) // 2
        assert entered >= 1 or engines.line.waiting == limit
        most, tasks = most - entered, tasks + new
    assert engines.line.waiting <= limit
    await cancelled(*tasks)
    assert engines.line.waiting == 0


async def test_no_newcomer_overtakes_requests_that_wait() -> None:
    engines = Engines()
    first = engines.arrive("low-1")
    await settle()
    engines.free += 1  # of which the line has not heard yet
    second = engines.arrive("low-2")
    await settle()
    assert engines.placed == []
    engines.line.wake()
    await asyncio.gather(*first)
    assert engines.placed == ["low-1"]
    await engines.release()
    await asyncio.gather(*second)


async def test_a_request_whose_time_is_over_is_refused_and_leaves_its_turn_to_the_next() -> None:
    engines = Engines(seconds=0.01)
    (task,) = engines.arrive("low")
    with pytest.raises(QueueFullError):
        await task
    assert engines.line.waiting == 0
    engines.free = 1
    await engines.ask("low")


async def test_other_errors_end_the_wait_of_their_request_only() -> None:
    engines = Engines()

    def fails() -> None:
        if not engines.free:
            raise QueueFullError("full")
        raise ZeroDivisionError

    bad = asyncio.create_task(engines.line.place("low", fails))
    await settle()
    tasks = engines.arrive("low")
    await settle()
    await engines.release()
    with pytest.raises(ZeroDivisionError):
        await bad
    await asyncio.gather(*tasks)


async def test_requests_for_other_engines_neither_wait_behind_each_other_nor_take_more_places() -> None:
    engines = Engines(limit=3)

    def full() -> None:
        raise QueueFullError("the adapter's engine is full")

    tasks = [asyncio.create_task(engines.line.place("low-1", full, "adapter")) for _ in range(2)]
    await settle()
    engines.free = 1
    await engines.ask("high-1")
    assert engines.placed == ["high-1"]
    tasks += engines.arrive("high-1")
    await settle()
    assert engines.line.waiting == 3
    with pytest.raises(QueueFullError):
        await engines.ask("standard-1")
    await engines.release()
    await cancelled(*tasks)
    assert engines.line.waiting == 0


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["arrive", "cancel", "free", "settle"]), st.integers(0, 50), st.sampled_from(sorted(WEIGHTS))
    ),
    max_size=60,
)


@settings(deadline=None, max_examples=200)
@given(STEPS)
def test_no_request_waits_beside_a_free_place_and_none_is_forgotten(steps: list[tuple[str, int, str]]) -> None:
    async def run() -> None:
        engines, tasks, arrived = Engines(), list[asyncio.Task[None]](), Counter[str]()
        for what, number, tenant in steps:
            if what == "arrive":
                tasks += engines.arrive(tenant)
                arrived[tenant] += 1
            elif what == "cancel" and tasks:
                tasks[number % len(tasks)].cancel()
            elif what == "free":
                engines.free += 1 + number % 3
                engines.line.wake()
            else:
                await settle()
        await settle()
        open_tasks = [task for task in tasks if not task.done()]
        assert engines.line.waiting == len(open_tasks)
        assert not open_tasks or not engines.free
        engines.free += len(open_tasks)
        engines.line.wake()
        async with asyncio.timeout(60):
            await asyncio.gather(*open_tasks)
        assert engines.line.waiting == 0
        assert Counter(engines.placed) <= arrived

    asyncio.run(run())
