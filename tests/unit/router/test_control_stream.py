"""The control stream: silence while nothing changes, one event for what comes together, counts in a trickle."""

import asyncio
import json

from unit.router.test_operator_report import Reports

from mmrouter_router.api.control_stream import KEEPALIVE, events


class Listener:
    """Reads a stream in the background; ``told`` has its reports, ``comments`` counts the rest."""

    def __init__(self, rig: Reports, **options) -> None:
        self.told: list[dict] = []
        self.comments = 0
        self.stopping = asyncio.Event()
        self.task = asyncio.create_task(self._read(events(rig.reporter.report, rig.fleet, self.stopping, **options)))

    async def _read(self, stream) -> None:
        async for piece in stream:
            if piece == KEEPALIVE:
                self.comments += 1
            else:
                assert piece.startswith(b"data: ")
                assert piece.endswith(b"\n\n")
                self.told.append(json.loads(piece[6:]))

    async def until(self, condition, seconds: float = 15.0) -> None:
        async with asyncio.timeout(seconds):
            while not condition():
                await asyncio.sleep(0.005)

    async def end(self) -> None:
        self.stopping.set()
        await asyncio.wait_for(self.task, 5)


async def test_first_event_is_the_whole_report():
    rig = Reports()
    rig.worker("a")
    listener = Listener(rig)
    await listener.until(lambda: listener.told)
    assert listener.told == [rig.reporter.report()]
    await listener.end()


async def test_unchanged_heartbeats_cause_only_keepalives():
    rig = Reports()
    worker = rig.worker("a")
    listener = Listener(rig, keepalive_seconds=0.1)
    await listener.until(lambda: listener.told)
    while listener.comments < 3:
        rig.beat(worker)
        await asyncio.sleep(0.05)
    assert len(listener.told) == 1
    await listener.end()


async def test_simultaneous_changes_are_one_event():
    rig = Reports()
    listener = Listener(rig)
    await listener.until(lambda: listener.told)
    for name in "abcdef":
        rig.worker(name)
    await listener.until(lambda: len(listener.told) > 1)
    assert len(listener.told[1]["workers"]) == 6
    await listener.end()
    assert len(listener.told) == 2


async def test_changes_by_time_alone_are_events():
    rig = Reports()
    rig.worker("a")
    listener = Listener(rig)
    await listener.until(lambda: listener.told)
    rig.clock.now += 10  # nobody calls: the sidecar has just fallen silent
    await listener.until(lambda: len(listener.told) > 1)
    assert [row["cause"] for row in listener.told[1]["workers"].values()] == ["not_heard"]
    await listener.end()


async def test_counts_are_sent_at_most_once_per_interval():
    rig = Reports()
    listener = Listener(rig, counts_seconds=0.8)
    await listener.until(lambda: listener.told)
    began = asyncio.get_running_loop().time()
    while len(listener.told) < 3:
        rig.counts.add(exact=True, prompt_blocks=1, hit_blocks=1)
        await asyncio.sleep(0.01)
    assert asyncio.get_running_loop().time() - began >= 1.6
    assert listener.told[2]["decisions"] > listener.told[1]["decisions"] > 0
    await listener.end()


async def test_stopping_router_sends_a_last_event():
    rig = Reports()
    listener = Listener(rig)
    await listener.until(lambda: listener.told)
    rig.ready = False
    await listener.end()
    assert [event["ready"] for event in listener.told] == [True, False]


async def test_closed_stream_unregisters_its_listener():
    rig = Reports()
    stream = events(rig.reporter.report, rig.fleet, asyncio.Event())
    await anext(stream)
    await stream.aclose()
    assert rig.fleet._listeners == []
