"""The queue of keys: its decisions under a controlled clock, and its workers on a real event loop."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from waiting import until

from mmrouter_operator.cluster.work_queue import (
    FIRST_BACKOFF,
    LAST_BACKOFF,
    RESYNC,
    RESYNC_SPREAD,
    KeyQueue,
    ObjectDeleted,
    Retry,
    Workers,
    backoff,
)
from mmrouter_operator.metrics import Metrics
from mmrouter_operator.model.snapshot import Key

A, B, C = ("n", "a"), ("n", "b"), ("n", "c")


def queue() -> KeyQueue:
    return KeyQueue(random.Random(7))


def running(failures: int = 0) -> KeyQueue:
    """Return a queue whose key A runs, after so many failures in a row."""
    q = queue()
    for _ in range(failures):
        q.add(A, 0.0)
        q.pop(0.0)
        q.failed(A, 0.0)
    q.add(A, 0.0)
    q.pop(0.0)
    return q


def test_an_edit_during_a_run_that_fails_does_not_wait_for_the_backoff_of_what_it_replaces() -> None:
    q = running(failures=12)
    q.add(A, 0.5)
    assert q.failed(A, 1.0, reset=True) <= 2 * FIRST_BACKOFF
    q.pop(2.0)
    assert q.failed(A, 2.0, at_least=9.0, reset=True) >= 9.0, "a server that asks for a pause gets it all the same"


def test_success_ends_the_backoff_and_schedules_the_resync() -> None:
    q = running(failures=6)
    q.succeeded(A, 0.0)
    assert q.failures[A] == 0
    wake = q.wake_at(0.0)
    assert wake is not None
    assert RESYNC * (1 - RESYNC_SPREAD) <= wake <= RESYNC * (1 + RESYNC_SPREAD)


@given(failures=st.integers(1, 100_000), seed=st.integers())
def test_the_backoff_grows_from_a_moment_to_minutes_and_stays_between_its_bounds(failures: int, seed: int) -> None:
    rng = random.Random(seed)
    assert FIRST_BACKOFF <= backoff(failures, rng) <= LAST_BACKOFF
    assert backoff(1, rng) <= FIRST_BACKOFF * 1.01
    assert backoff(30, rng) >= LAST_BACKOFF / 2


class Schedule(RuleBasedStateMachine):
    """Against a model of one line per key: when it is due, and whether it runs.

    Adds before a run are one run, the earliest of them counts, those during a run cause one more, and keys run in the
    order in which they are due.
    """

    def __init__(self) -> None:
        super().__init__()
        self.queue = queue()
        self.now = 0.0
        self.due: dict[Key, float] = {}
        self.running: set[Key] = set()

    @rule(key=st.sampled_from([A, B, C]), delay=st.sampled_from([0.0, 0.1, 5.0, 50.0]))
    def add(self, key: Key, delay: float) -> None:
        self.queue.add(key, self.now, delay)
        self.due[key] = min(self.due.get(key, float("inf")), self.now + delay)

    @rule(seconds=st.sampled_from([0.05, 1.0, 10.0, 400.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def pop(self) -> None:
        may_run = {key: due for key, due in self.due.items() if due <= self.now and key not in self.running}
        entry = self.queue.pop(self.now)
        if not may_run:
            assert entry is None
            return
        assert entry is not None
        key, waited = entry
        assert may_run[key] == min(may_run.values())
        assert waited == pytest.approx(self.now - self.due.pop(key))
        self.running.add(key)

    @rule(data=st.data(), outcome=st.sampled_from(["well", "again", "failed", "gone"]))
    def end(self, data: st.DataObject, outcome: str) -> None:
        if not self.running:
            return
        key = data.draw(st.sampled_from(sorted(self.running)))
        self.running.discard(key)
        if outcome == "gone":
            self.queue.forget(key)
        elif outcome == "failed":
            delay = self.queue.failed(key, self.now)
            self.due[key] = self.now + delay
        else:
            self.queue.succeeded(key, self.now, 2.0 if outcome == "again" else None)
            latest = self.now + (2.0 if outcome == "again" else RESYNC * (1 + RESYNC_SPREAD))
            known = self.due.pop(key, float("inf"))
            wake = self._due_of(key)
            assert wake <= min(known, latest)
            self.due[key] = wake

    def _due_of(self, key: Key) -> float:
        return self.queue.due[key]

    @invariant()
    def the_queue_wakes_up_exactly_when_something_may_run(self) -> None:
        waiting = [due for key, due in self.due.items() if key not in self.running]
        expected = max(self.now, min(waiting)) if waiting else None
        assert self.queue.wake_at(self.now) == (pytest.approx(expected) if expected is not None else None)
        assert self.queue.running == self.running


TestSchedule = Schedule.TestCase


def results(metrics: Metrics) -> dict[str, float]:
    """Return by result how many runs have ended."""
    (family,) = metrics.reconciles.collect()
    return {s.labels["result"]: s.value for s in family.samples if s.name.endswith("_total")}


@asynccontextmanager
async def started(workers: Workers, *keys: Key) -> AsyncIterator[None]:
    """Run workers after these keys were added, until the end of the block."""
    for key in keys:
        workers.add(key)
    task = asyncio.create_task(workers.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_no_more_keys_run_at_a_time_than_allowed_and_none_twice() -> None:
    running: Counter[Key] = Counter()
    most = 0
    done: Counter[Key] = Counter()

    async def work(key: Key) -> None:
        nonlocal most
        running[key] += 1
        assert running[key] == 1
        most = max(most, sum(running.values()))
        await asyncio.sleep(0.01)
        running[key] -= 1
        done[key] += 1

    workers = Workers(work, Metrics(), concurrency=3)
    keys = [("n", str(number)) for number in range(20)]
    async with started(workers, *keys):
        await until(lambda: all(done[key] for key in keys))
        for key in keys:
            workers.add(key)
        await until(lambda: all(done[key] == 2 for key in keys))
    assert most == 3


async def test_a_failure_of_one_key_keeps_no_other_from_running_and_is_tried_again() -> None:
    runs: Counter[Key] = Counter()
    metrics = Metrics()

    async def work(key: Key) -> None:
        runs[key] += 1
        if key == A and runs[A] == 1:
            raise RuntimeError("broken")
        if key == B and runs[B] == 1:
            raise Retry("not yet")
        if key == C:
            raise ObjectDeleted

    async with started(Workers(work, metrics), A, B, C):
        await until(lambda: runs[A] == 2 and runs[B] == 2 and results(metrics).get("success") == 2)
    assert runs[C] == 1
    assert results(metrics) == {"success": 2, "error": 1, "retry": 1, "gone": 1}


async def test_a_run_that_hangs_ends_at_its_deadline() -> None:
    metrics = Metrics()

    async def work(_: Key) -> None:
        await asyncio.Event().wait()

    async with started(Workers(work, metrics, deadline=0.05), A):
        await until(lambda: results(metrics).get("timeout", 0) >= 2)


async def test_a_resource_that_is_edited_while_its_run_fails_is_tried_again_at_once() -> None:
    version, runs = 0, 0
    done = asyncio.Event()

    async def work(_: Key) -> None:
        nonlocal version, runs
        runs += 1
        if runs == 10:
            done.set()
        else:
            version += 1  # an edit
            workers.add(A)
            raise Retry("what it was before is of no use")

    workers = Workers(work, Metrics(), version=lambda _: version)
    # Without the edits the pauses would double, to a minute and more in all.
    async with started(workers, A), asyncio.timeout(30.0):
        await done.wait()


async def test_runs_that_fail_and_get_further_each_time_do_not_wait_ever_longer() -> None:
    failures = [Retry("one call failed", reset=True) for _ in range(11)]
    done = asyncio.Event()

    async def work(_: Key) -> None:
        if failures:
            raise failures.pop()
        done.set()

    workers = Workers(work, Metrics())
    # With pauses that double, the last of them alone would last minutes.
    async with started(workers, A), asyncio.timeout(30.0):
        await done.wait()
        await until(lambda: workers.queue.failures[A] == 0)


async def test_a_run_may_ask_to_be_called_again() -> None:
    runs = 0

    async def work(_: Key) -> float:
        nonlocal runs
        runs += 1
        return 0.01

    async with started(Workers(work, Metrics()), A):
        await until(lambda: runs >= 3)


async def test_when_the_workers_end_nothing_runs_and_nothing_waits() -> None:
    entered, left = asyncio.Event(), asyncio.Event()

    async def work(_: Key) -> None:
        entered.set()
        try:
            await asyncio.Event().wait()
        finally:
            left.set()

    workers = Workers(work, Metrics(), concurrency=1)
    async with started(workers, A, B):
        await entered.wait()
    assert left.is_set()
    assert not workers.queue.due
    assert not workers.queue.running


async def test_draining_lets_what_runs_finish_and_starts_nothing_more() -> None:
    began: list[Key] = []
    finished: list[Key] = []
    go = asyncio.Event()

    async def work(key: Key) -> None:
        began.append(key)
        await go.wait()
        finished.append(key)

    workers = Workers(work, Metrics(), concurrency=1)
    async with started(workers, A, B):
        await until(lambda: bool(began))
        drained = asyncio.create_task(workers.drain(5.0))
        await asyncio.sleep(0)
        go.set()
        await drained
        await asyncio.sleep(0.05)
    assert began == finished == [A]
