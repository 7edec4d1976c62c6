"""The control port: access by token, and the stream of reports."""

import asyncio
import json

import httpx
import pytest
from unit.router.frontend import PORT, Frontend
from unit.router.test_operator_report import Reports

from mmrouter_router.api.control_stream import KEEPALIVE, events

PATHS = ("/control/state", "/control/stream", "/control/decisions", "/control/workers/x/keys")


def counted(frontend: Frontend) -> dict[str, float]:
    (family,) = frontend.refusals.collect()
    return {sample.labels["reason"]: sample.value for sample in family.samples if sample.name.endswith("_total")}


@pytest.mark.parametrize("path", PATHS)
async def test_control_port_requires_the_token_and_counts_refusals_by_reason(path):
    frontend = await Frontend(token="right").start()
    try:
        async with httpx.AsyncClient(base_url=f"http://{frontend.ip}:{PORT}", trust_env=False) as client:
            for number, value in enumerate(("Bearer wrong", "right", "Bearer"), 1):
                answer = await client.get(path, headers={"authorization": value})
                assert answer.status_code == 401
                assert "token" in answer.json()["detail"]
                assert counted(frontend) == {"wrong": number}
            assert (await client.get(path)).status_code == 401
            assert counted(frontend) == {"wrong": 3, "missing": 1}
            state = await client.get("/control/state", headers={"authorization": "Bearer right"})
            assert state.status_code == 200
            assert counted(frontend) == {"wrong": 3, "missing": 1}
    finally:
        await frontend.stop()


class Listener:
    """Reads a stream in the background: ``reports``, and the number of ``keepalives``."""

    def __init__(self, rig: Reports, **options) -> None:
        self.reports: list[dict] = []
        self.keepalives = 0
        self.stopping = asyncio.Event()
        self.task = asyncio.create_task(self._read(events(rig.reporter.report, rig.fleet, self.stopping, **options)))

    async def _read(self, stream) -> None:
        async for piece in stream:
            if piece == KEEPALIVE:
                self.keepalives += 1
            else:
                assert piece.startswith(b"data: ")
                assert piece.endswith(b"\n\n")
                self.reports.append(json.loads(piece[6:]))

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
    await listener.until(lambda: listener.reports)
    assert listener.reports == [rig.reporter.report()]
    await listener.end()


async def test_unchanged_heartbeats_cause_only_keepalives():
    rig = Reports()
    worker = rig.worker("a")
    listener = Listener(rig, keepalive_seconds=0.1)
    await listener.until(lambda: listener.reports)
    while listener.keepalives < 3:
        rig.beat(worker)
        await asyncio.sleep(0.05)
    assert len(listener.reports) == 1
    await listener.end()


async def test_simultaneous_changes_are_one_event():
    rig = Reports()
    listener = Listener(rig)
    await listener.until(lambda: listener.reports)
    for name in "abcdef":
        rig.worker(name)
    await listener.until(lambda: len(listener.reports) > 1)
    assert len(listener.reports[1]["workers"]) == 6
    await listener.end()
    assert len(listener.reports) == 2


async def test_changes_by_time_alone_are_events():
    rig = Reports()
    rig.worker("a")
    listener = Listener(rig)
    await listener.until(lambda: listener.reports)
    rig.clock.now += 10  # the sidecar falls silent without any call
    await listener.until(lambda: len(listener.reports) > 1)
    assert [row["cause"] for row in listener.reports[1]["workers"].values()] == ["not_heard"]
    await listener.end()


async def test_counts_are_sent_at_most_once_per_interval():
    rig = Reports()
    listener = Listener(rig, counts_seconds=0.8)
    await listener.until(lambda: listener.reports)
    began = asyncio.get_running_loop().time()
    while len(listener.reports) < 3:
        rig.counts.add(exact=True, prompt_blocks=1, hit_blocks=1)
        await asyncio.sleep(0.01)
    assert asyncio.get_running_loop().time() - began >= 1.6
    assert listener.reports[2]["decisions"] > listener.reports[1]["decisions"] > 0
    await listener.end()


async def test_stopping_router_sends_a_last_event():
    rig = Reports()
    listener = Listener(rig)
    await listener.until(lambda: listener.reports)
    rig.ready = False
    await listener.end()
    assert [event["ready"] for event in listener.reports] == [True, False]


async def test_closed_stream_unregisters_its_listener():
    rig = Reports()
    stream = events(rig.reporter.report, rig.fleet, asyncio.Event())
    await anext(stream)
    await stream.aclose()
    assert rig.fleet.change_listeners == []
