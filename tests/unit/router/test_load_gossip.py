"""Routers that gossip their load: each counts its peers' load as they count it themselves."""

import asyncio
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.router.rig import BLOCK, Clock, resource, synced

from mmrouter_lib import feed
from mmrouter_router.fleet.load_gossip import EXPIRY_SECONDS, REPEAT_SECONDS, LoadGossip
from mmrouter_router.fleet.workers import Fleet, Member, Worker
from mmrouter_router.request.prepared import Prepared
from mmrouter_router.scheduling.placer import Booking, Placer
from mmrouter_router.telemetry.metrics import Metrics

ENGINES = ("a", "b")


class Sidecars:
    """All engines' sidecars: each publishes to every router what one tells it."""

    def __init__(self) -> None:
        self.routers: list[Router] = []
        self.frames: list[tuple[str, feed.Work]] = []
        self.told = asyncio.Event()

    def take(self, uid: str, work: feed.Work) -> None:
        passed = feed.decode_published(feed.encode(feed.decode_request(feed.encode(work))))
        assert isinstance(passed, feed.Work)
        self.frames.append((uid, passed))
        self.told.set()
        for router in self.routers:
            router.fleet.on_published(router.fleet.workers[uid], passed)


class Line:
    """A router's feed of one engine."""

    def __init__(self, sidecars: Sidecars, uid: str) -> None:
        self._sidecars, self._uid = sidecars, uid

    async def send_work(self, work: feed.Work) -> None:
        self._sidecars.take(self._uid, work)


class Router:
    """A router with verified engines of one rank, which hold nothing."""

    def __init__(self, name: str, sidecars: Sidecars, clock: Clock) -> None:
        self.name = name
        self.fleet = Fleet(Metrics(), clock=clock)
        self.alone = False
        self.gossip = LoadGossip(
            name, self.fleet, lambda uid: Line(sidecars, uid), lambda: not self.alone, lambda: None, clock
        )
        self.fleet.on_work(self.gossip.on_work)
        self.placer = Placer(resource(), self.fleet, changed=self.gossip.changed)
        sidecars.routers.append(self)
        for engine in ENGINES:
            synced(self.fleet, Member(f"uid-{engine}", engine, "127.0.0.1", "worker", "worker"))

    def send(self, seed: int) -> tuple[str, Booking]:
        """Place a new prompt; return the engine's name and the booking."""
        ids = array("I", range(1000 * seed, 1000 * seed + 10 * BLOCK))
        decision = self.placer.place(Prepared(None, None, (), ids, (), "exact", (), 5, 77))
        return decision.target.worker.member.name, self.placer.begin(decision)

    def worker(self, engine: str) -> Worker:
        return self.fleet.workers[f"uid-{engine}"]

    def own(self, engine: str) -> tuple[int, float, float]:
        usage = self.worker(engine).usage.get(0)
        return (usage.requests, usage.prefill, usage.active) if usage else (0, 0.0, 0.0)

    def theirs(self, engine: str) -> tuple[int, float, float]:
        usage = self.worker(engine).usage.get(0)
        return (usage.peer_requests, usage.peer_prefill, usage.peer_active) if usage else (0, 0.0, 0.0)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def sidecars() -> Sidecars:
    return Sidecars()


@pytest.fixture
def routers(sidecars: Sidecars, clock: Clock) -> list[Router]:
    return [Router(name, sidecars, clock) for name in ("one", "two")]


async def test_engine_filled_by_a_peer_is_not_idle(routers: list[Router]) -> None:
    one, two = routers
    first, _ = one.send(1)
    assert two.send(1)[0] == first, "it does not know better"
    third, _ = one.send(2)
    assert third != first
    await one.gossip.publish()
    await two.gossip.publish()
    assert (one.theirs(first)[0], two.theirs(first)[0], two.theirs(third)[0]) == (1, 1, 1)
    # One has a request at each, and two's own is at the first: both see that the other engine has less.
    assert [router.send(9 + n)[0] for n, router in enumerate(routers)] == [third, third]


steps = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from(["send", "answered", "end", "tell"]), st.integers(0, 9)), max_size=40
)


@given(steps)
def test_peers_converge_to_equal_loads(steps: list[tuple[int, str, int]]) -> None:
    sidecars, clock = Sidecars(), Clock()
    routers = [Router(name, sidecars, clock) for name in ("one", "two", "three")]
    open_: list[list[Booking]] = [[], [], []]

    async def run() -> None:
        for seed, (number, step, which) in enumerate(steps):
            router, bookings = routers[number], open_[number]
            match step:
                case "send":
                    bookings.append(router.send(seed)[1])
                case "answered" if bookings:
                    bookings[which % len(bookings)].answered()
                case "end" if bookings:
                    bookings.pop(which % len(bookings)).end()
                case "tell":
                    await router.gossip.publish()
        for router in routers:
            await router.gossip.publish()

    asyncio.run(run())
    for router in routers:
        for engine in ENGINES:
            others = [other.own(engine) for other in routers if other is not router]
            assert router.theirs(engine) == pytest.approx(tuple(map(sum, zip(*others, strict=True))))


async def test_changes_are_batched_per_engine(routers: list[Router], sidecars: Sidecars) -> None:
    one = routers[0]
    for seed in range(20):
        one.send(seed)[1].end()
    one.send(99)
    await one.gossip.publish()
    assert sorted(uid for uid, _ in sidecars.frames) == sorted({uid for uid, _ in sidecars.frames})
    sidecars.frames.clear()
    await one.gossip.publish()
    assert sidecars.frames == []


async def test_router_without_peers_sends_nothing(routers: list[Router], sidecars: Sidecars) -> None:
    routers[0].alone = True
    routers[0].send(1)
    assert not routers[0].gossip.wake.is_set(), "nor does it wake up to find that out"
    await routers[0].gossip.publish()
    assert sidecars.frames == []


async def test_load_of_a_silent_router_expires(routers: list[Router], clock: Clock) -> None:
    one, two = routers
    engine, _ = one.send(1)
    await one.gossip.publish()
    clock.now += EXPIRY_SECONDS - 0.1
    two.gossip.expire()
    assert two.theirs(engine)[0] == 1
    clock.now += 0.2
    two.gossip.expire()
    assert two.theirs(engine) == (0, 0.0, 0.0)
    assert REPEAT_SECONDS < EXPIRY_SECONDS / 2, "one frame may be lost"


async def test_unchanged_load_is_repeated(routers: list[Router], sidecars: Sidecars, clock: Clock) -> None:
    one, two = routers
    engine, _ = one.send(1)
    running = asyncio.create_task(one.gossip.run())
    try:
        async with asyncio.timeout(15):
            await sidecars.told.wait()
            while len(sidecars.frames) < 3:  # nothing changed since the first one
                clock.now += REPEAT_SECONDS
                two.worker(engine).usage[0].peers.clear()  # as a router that began anew
                one.gossip.wake.set()
                await asyncio.sleep(0)
    finally:
        running.cancel()
    assert two.worker(engine).usage[0].peers["one"].requests == 1


@pytest.mark.parametrize("rank", [-1, 1, 7])
async def test_unknown_rank_is_ignored(routers: list[Router], rank: int) -> None:
    worker = routers[0].worker("a")
    routers[0].fleet.on_published(worker, feed.Work("stranger", rank, 5, 1.0, 1.0))
    assert rank not in worker.usage


async def test_engine_queue_excludes_gossiped_requests(routers: list[Router]) -> None:
    one, two = routers
    engine, _ = one.send(1)
    await one.gossip.publish()
    two.fleet.on_published(two.worker(engine), feed.LoadReport(0, 1.0, 3.0, 0.5))
    assert two.worker(engine).usage[0].others == 2.0
