"""Routers that gossip their load: each counts its peers' load as they count it themselves."""

import asyncio
from array import array
from functools import partial
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.router.rig import BLOCK, Clock, prepared, resource, running, synced

from mmrouter_lib import feed
from mmrouter_router.fleet.load_gossip import EXPIRY_SECONDS, REPEAT_SECONDS, LoadGossip
from mmrouter_router.fleet.workers import Fleet, Member, Worker
from mmrouter_router.scheduling.placer import Booking, Placer
from mmrouter_router.telemetry.metrics import Metrics

ENGINES = ("a", "b")


class Sidecars:
    """All engines' sidecars: each publishes to every router what one tells it."""

    def __init__(self) -> None:
        self.routers: list[Router] = []
        self.frames: list[tuple[str, feed.Work]] = []

    def line(self, uid: str) -> SimpleNamespace:
        """A router's feed of one engine."""
        return SimpleNamespace(send_work=partial(self.take, uid))

    async def take(self, uid: str, work: feed.Work) -> None:
        passed = feed.decode_published(feed.encode(feed.decode_request(feed.encode(work))))
        assert isinstance(passed, feed.Work)
        self.frames.append((uid, passed))
        for router in self.routers:
            router.fleet.on_published(router.fleet.workers[uid], passed)


class Router:
    """A router with verified engines of one rank, which hold nothing."""

    def __init__(self, name: str, sidecars: Sidecars, clock: Clock) -> None:
        self.name = name
        self.fleet = Fleet(Metrics(), clock=clock)
        self.alone = False
        self.gossip = LoadGossip(name, self.fleet, sidecars.line, lambda: not self.alone, lambda: None, clock)
        self.fleet.work_listeners.append(self.gossip.on_work)
        self.placer = Placer(resource(), self.fleet, changed=self.gossip.changed)
        sidecars.routers.append(self)
        for engine in ENGINES:
            synced(self.fleet, Member(f"uid-{engine}", engine, "127.0.0.1", "worker", "worker"))

    def send(self, seed: int) -> tuple[str, Booking]:
        """Place a new prompt; return the engine's name and the booking."""
        ids = array("I", range(1000 * seed, 1000 * seed + 10 * BLOCK))
        decision = self.placer.place(prepared(ids=ids))
        return decision.target.worker.member.name, self.placer.begin(decision)

    def worker(self, engine: str) -> Worker:
        return self.fleet.workers[f"uid-{engine}"]

    def own(self, engine: str, prefix: str = "") -> tuple[float, ...]:
        usage = self.worker(engine).usage.get(0)
        return tuple(getattr(usage, prefix + name, 0) for name in ("requests", "prefill", "active"))

    def theirs(self, engine: str) -> tuple[float, ...]:
        return self.own(engine, "peer_")


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def sidecars():
    return Sidecars()


@pytest.fixture
def routers(sidecars, clock):
    return [Router(name, sidecars, clock) for name in ("one", "two")]


async def test_engine_filled_by_a_peer_is_not_idle(routers):
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


STEPS = st.tuples(st.integers(0, 2), st.sampled_from(["send", "answered", "end", "tell"]), st.integers(0, 9))


@given(st.lists(STEPS, max_size=40))
def test_peers_converge_to_equal_loads(steps):
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


async def test_changes_are_batched_per_engine(routers, sidecars):
    one = routers[0]
    for seed in range(20):
        one.send(seed)[1].end()
    one.send(99)
    await one.gossip.publish()
    assert sorted(uid for uid, _ in sidecars.frames) == sorted({uid for uid, _ in sidecars.frames})
    sidecars.frames.clear()
    await one.gossip.publish()
    assert sidecars.frames == []


async def test_router_without_peers_sends_nothing(routers, sidecars):
    routers[0].alone = True
    routers[0].send(1)
    assert not routers[0].gossip.wake.is_set(), "nor does it wake up to find that out"
    await routers[0].gossip.publish()
    assert sidecars.frames == []


async def test_load_of_a_silent_router_expires(routers, clock):
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


async def test_unchanged_load_is_repeated(routers, sidecars, clock):
    one, two = routers
    engine, _ = one.send(1)
    async with running(one.gossip.run()), asyncio.timeout(15):
        while len(sidecars.frames) < 3:  # nothing changed since the first one
            clock.now += REPEAT_SECONDS if sidecars.frames else 0
            two.fleet.usage(two.worker(engine), 0).peers.clear()  # as a router that began anew
            one.gossip.wake.set()
            await asyncio.sleep(0)
    assert two.worker(engine).usage[0].peers["one"].requests == 1


@pytest.mark.parametrize("rank", [-1, 1, 7])
async def test_unknown_rank_is_ignored(routers, rank):
    worker = routers[0].worker("a")
    routers[0].fleet.on_published(worker, feed.Work("stranger", rank, 5, 1.0, 1.0))
    assert rank not in worker.usage


async def test_engine_queue_excludes_gossiped_requests(routers):
    one, two = routers
    engine, _ = one.send(1)
    await one.gossip.publish()
    two.fleet.on_published(two.worker(engine), feed.LoadReport(0, 1.0, 3.0, 0.5))
    assert two.worker(engine).usage[0].others == 2.0
