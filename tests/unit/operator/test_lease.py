"""The lease: who holds it, and until when a holder may write, under clocks that the tests move."""

import asyncio
import copy
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.conftest import examples

from mmrouter_operator.cluster.client import AlreadyExists, Conflict, Object, Unavailable
from mmrouter_operator.cluster.lease import LeaderElection, LeaseTiming
from mmrouter_operator.model.kinds import Ref

TIMING = LeaseTiming()


class Server:
    """One Lease with the API server's rules: creation once, replacement only of the version that was read."""

    def __init__(self) -> None:
        self.lease: Object | None = None
        self.version = 0
        self.down = False
        self.writers: list[str] = []


class Client:
    """What a leader needs of the cluster; ``lag`` runs between a request's arrival and its answer."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.lag: Callable[[], Awaitable[None]] | None = None

    async def get(self, ref: Ref) -> Object | None:
        self._up()
        return copy.deepcopy(self.server.lease)

    async def create(self, obj: Object) -> Object:
        self._up()
        if self.server.lease is not None:
            raise AlreadyExists("exists")
        return await self._store(obj)

    async def replace(self, obj: Object) -> Object:
        self._up()
        if self.server.lease is None or obj["metadata"]["resourceVersion"] != str(self.server.version):
            raise Conflict("changed")
        return await self._store(obj)

    async def _store(self, obj: Object) -> Object:
        self.server.version += 1
        stored = copy.deepcopy(obj)
        stored["metadata"]["resourceVersion"] = str(self.server.version)
        self.server.lease = stored
        self.server.writers.append(stored["spec"]["holderIdentity"])
        if self.lag is not None:
            await self.lag()
        return copy.deepcopy(stored)

    def _up(self) -> None:
        if self.server.down:
            raise Unavailable("down")


class Time:
    """A clock of one machine."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def leader(server: Server, identity: str, clock: Time, client: Client | None = None, **options: Any) -> LeaderElection:
    port: Any = client or Client(server)
    return LeaderElection(port, namespace="n", name="l", identity=identity, timing=TIMING, clock=clock, **options)


def two(offset: float = 0.0) -> tuple[Server, Time, Time, LeaderElection, LeaderElection]:
    """Return a server, and the clocks and replicas of two machines; the second clock is ahead."""
    server, here, there = Server(), Time(), Time(offset)
    return server, here, there, leader(server, "a", here), leader(server, "b", there)


async def deposed() -> tuple[Server, LeaderElection, LeaderElection]:
    """Return a server and two replicas, of which the second took the lease from the first."""
    server, _, there, first, second = two()
    await first.attempt()
    await second.attempt()
    there.now += TIMING.duration + 1
    await second.attempt()
    return server, first, second


async def test_the_first_takes_it_and_the_second_waits_for_the_whole_duration() -> None:
    server, _here, there, first, second = two(1_000_000.0)
    await first.attempt()
    await second.attempt()
    assert first.valid()
    assert not second.valid()
    there.now += TIMING.duration - 0.01
    await second.attempt()
    assert not second.valid()
    there.now += 0.02
    await second.attempt()
    assert second.valid()
    assert server.lease is not None
    assert server.lease["spec"]["leaseTransitions"] == 1


async def test_a_lease_that_is_renewed_is_never_taken() -> None:
    server, here, there, first, second = two(500.0)
    for _ in range(50):
        await first.attempt()
        await second.attempt()
        assert first.valid()
        assert not second.valid()
        here.now += TIMING.retry
        there.now += TIMING.retry
    assert set(server.writers) == {"a"}


async def test_a_renewal_counts_from_before_it_was_sent() -> None:
    server, here = Server(), Time()
    client = Client(server)

    async def slow() -> None:
        here.now += 4.0

    client.lag = slow
    first = leader(server, "a", here, client)
    await first.attempt()
    assert first.left() == pytest.approx(TIMING.deadline - 4.0)


async def test_a_holder_that_was_suspended_is_deposed_by_its_clock_alone() -> None:
    server, here = Server(), Time()
    first = leader(server, "a", here)
    await first.attempt()
    here.now += 3600.0
    assert not first.valid()
    assert first.left() < 0


async def test_a_holder_that_sees_another_holder_is_deposed_at_once() -> None:
    _, first, second = await deposed()
    assert second.valid()
    await first.attempt()
    assert not first.valid()


async def test_a_released_lease_is_taken_at_once_and_the_one_who_released_it_stays_away() -> None:
    _server, _here, _there, first, second = two()
    await first.attempt()
    await first.release()
    assert not first.valid()
    await second.attempt()
    assert second.valid()


async def test_a_lease_that_was_not_renewed_in_time_is_released_too() -> None:
    server, here = Server(), Time()
    one = leader(server, "a", here)
    await one.attempt()
    here.now += TIMING.deadline
    assert not one.valid()
    await one.release()
    assert server.lease is not None
    assert server.lease["spec"]["holderIdentity"] == ""


async def test_a_renewal_under_way_does_not_keep_a_lease_from_being_released() -> None:
    server = Server()
    client = Client(server)
    one = leader(server, "a", Time(), client)
    await one.attempt()
    read = client.get

    async def get(ref: Ref) -> Object | None:
        lease = await read(ref)
        client.get = read  # type: ignore[method-assign]
        await client.replace(copy.deepcopy(lease))  # type: ignore[arg-type] # the server takes a renewal meanwhile
        return lease

    client.get = get  # type: ignore[method-assign]
    await one.release()
    assert server.lease is not None
    assert server.lease["spec"]["holderIdentity"] == ""


async def test_releasing_leaves_the_lease_of_another_holder() -> None:
    server, first, _ = await deposed()
    await first.release()
    assert server.lease is not None
    assert server.lease["spec"]["holderIdentity"] == "b"


async def test_gaining_and_losing_is_reported_once_each() -> None:
    server, here = Server(), Time()
    changes: list[str] = []
    steps = 0

    async def sleep(_: float) -> None:
        nonlocal steps
        steps += 1
        here.now += TIMING.retry
        server.down = steps >= 3
        if steps > 12:
            raise asyncio.CancelledError

    one = leader(server, "a", here, sleep=sleep)
    with pytest.raises(asyncio.CancelledError):
        await one.run(gained=lambda: changes.append("gained"), lost=lambda: changes.append("lost"))
    assert changes == ["gained", "lost"]


@pytest.mark.parametrize(("duration", "deadline", "retry"), [(10, 10, 2), (15, 10, 10), (15, 0, 2), (15.5, 10, 2)])
def test_times_under_which_two_could_write_are_refused(duration: float, deadline: float, retry: float) -> None:
    with pytest.raises(ValueError, match="lease"):
        LeaseTiming(duration, deadline, retry)


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["attempt", "attempt", "attempt", "down", "up", "suspend"]),
        st.integers(0, 2),
        st.floats(0.1, 8.0),
    ),
    max_size=60,
)


@settings(max_examples=examples(200), deadline=None)
@given(events=EVENTS, offsets=st.tuples(*[st.floats(-1e5, 1e5)] * 3))
def test_no_two_replicas_may_ever_write_at_the_same_time(
    events: list[tuple[str, int, float]], offsets: tuple[float, float, float]
) -> None:
    """Any order of attempts, outages and suspensions, with clocks that disagree by any offset."""

    async def play() -> None:
        server = Server()
        clocks = [Time(offset) for offset in offsets]
        replicas = [leader(server, str(number), clock) for number, clock in enumerate(clocks)]
        for event, who, seconds in events:
            for clock in clocks:
                clock.now += seconds
            if event == "attempt":
                await replicas[who].attempt()
            elif event == "suspend":
                for clock in clocks:
                    clock.now += 4 * seconds
            else:
                server.down = event == "down"
            assert sum(replica.valid() for replica in replicas) <= 1

    asyncio.run(play())
