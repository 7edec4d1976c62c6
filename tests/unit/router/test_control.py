"""The control port: access by token, the stream of reports, and what they say of every pod (docs/architecture.md)."""

import asyncio
import json

import httpx
import pytest
from unit.router.frontend import PORT, Frontend, Reports
from unit.router.rig import Engine, counts, prepared, running
from waiting import until

from mmrouter_lib import feed
from mmrouter_router.api.control_port import state_of
from mmrouter_router.api.operator_report import KEEPALIVE, events
from mmrouter_router.fleet.workers import Member
from mmrouter_router.request.prepared import CHAT
from mmrouter_router.scheduling.candidates import NoWorkerError

PATHS = ("/control/state", "/control/stream", "/control/decisions", "/control/workers/x/keys")


@pytest.fixture
def rig():
    return Reports()


@pytest.mark.parametrize("path", PATHS)
async def test_control_port_requires_the_token_and_counts_refusals_by_reason(path):
    frontend = await Frontend(token="right").start()
    try:
        async with httpx.AsyncClient(base_url=f"http://{frontend.ip}:{PORT}", trust_env=False) as client:
            for number, value in enumerate(("Bearer wrong", "right", "Bearer"), 1):
                answer = await client.get(path, headers={"authorization": value})
                assert answer.status_code == 401
                assert "token" in answer.json()["detail"]
                assert counts(frontend.refusals, "reason") == {"wrong": number}
            assert (await client.get(path)).status_code == 401
            assert counts(frontend.refusals, "reason") == {"wrong": 3, "missing": 1}
            state = await client.get("/control/state", headers={"authorization": "Bearer right"})
            assert state.status_code == 200
            assert counts(frontend.refusals, "reason") == {"wrong": 3, "missing": 1}
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

    async def end(self) -> None:
        self.stopping.set()
        await asyncio.wait_for(self.task, 5)


async def listening(rig: Reports, **options) -> Listener:
    """Listen, and wait for the first report."""
    listener = Listener(rig, **options)
    await until(lambda: listener.reports)
    return listener


async def test_unchanged_heartbeats_cause_only_keepalives(rig):
    worker = rig.worker("a")
    listener = await listening(rig, keepalive_seconds=0.1)
    while listener.keepalives < 3:
        rig.beat(worker)
        await asyncio.sleep(0.05)
    assert len(listener.reports) == 1
    await listener.end()


async def test_first_event_is_the_whole_report_and_simultaneous_changes_are_one(rig):
    rig.worker("a")
    listener = await listening(rig)
    assert listener.reports == [rig.reporter.report()]
    for name in "bcdefg":
        rig.worker(name)
    await until(lambda: len(listener.reports) > 1)
    assert len(listener.reports[1]["workers"]) == 7
    await listener.end()
    assert len(listener.reports) == 2


async def test_changes_by_time_alone_are_events(rig):
    rig.worker("a")
    listener = await listening(rig)
    rig.clock.now += 10  # the sidecar falls silent without any call
    await until(lambda: len(listener.reports) > 1)
    assert [row["cause"] for row in listener.reports[1]["workers"].values()] == ["not_heard"]
    await listener.end()


async def test_counts_are_sent_at_most_once_per_interval(rig):
    listener = await listening(rig, counts_seconds=0.8)
    began = asyncio.get_running_loop().time()
    while len(listener.reports) < 3:
        rig.counts.update(decisions=1, exact_decisions=1, prompt_blocks=1, hit_blocks=1)
        await asyncio.sleep(0.01)
    assert asyncio.get_running_loop().time() - began >= 1.6
    assert listener.reports[2]["decisions"] > listener.reports[1]["decisions"] > 0
    await listener.end()


async def test_stopping_router_sends_a_last_event(rig):
    listener = await listening(rig)
    rig.ready = False
    await listener.end()
    assert [event["ready"] for event in listener.reports] == [True, False]


async def test_closed_stream_unregisters_its_listener(rig):
    stream = events(rig.reporter.report, rig.fleet, asyncio.Event())
    await anext(stream)
    await stream.aclose()
    assert rig.fleet.change_listeners == []


@pytest.mark.parametrize("role", ["worker", "prefill", "decode"])
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_synced_worker_is_routable_and_verified_by_its_canary(engine, role):
    rig = Reports(engine)
    assert rig.row(rig.of_role(role, "a")) == (True, "True", "")
    assert rig.row(rig.of_role(role, "b", canary="")) == (True, "Unknown", "pending")
    failed = rig.of_role(role, "c", canary="False")
    assert rig.row(failed)[:2] == (True, "False")


def test_each_unroutable_state_has_its_cause(rig):
    workers = {
        "not_heard": rig.fleet.join(Member("uid-new", "new", "127.0.0.1", "worker", "worker")),
        "engine_starting": rig.worker("a", engine_state="starting"),
        "engine_down": rig.worker("b", engine_state="down"),
        "draining": rig.worker("c", draining=True),
        "no_snapshot": rig.worker("d"),
    }
    rig.fleet.mark_stale(workers["no_snapshot"])
    assert {cause: rig.row(worker)[::2] for cause, worker in workers.items()} == {c: (False, c) for c in workers}


def test_silent_sidecar_is_not_heard(rig):
    worker = rig.worker("a")
    rig.clock.now += 1.9
    assert rig.row(worker)[0]
    rig.clock.now += 0.2
    assert rig.row(worker) == (False, "True", "not_heard")


def test_unpredictable_model_is_reported_as_not_modelled(rig):
    rig.possible = False
    assert rig.row(rig.worker("a", canary="")) == (True, "Unknown", "not_modelled")


def test_an_engine_that_makes_other_prompts_is_reported_as_not_modelled(rig):
    one, other = (rig.worker(name, canary="") for name in "ab")
    rig.others.append(other)
    assert rig.row(one) == (True, "Unknown", "pending")
    assert rig.row(other) == (True, "Unknown", "not_modelled")


@pytest.mark.parametrize(
    ("type_", "encodes", "row", "message"),
    [
        ("vllm", True, (True, "True", ""), ""),
        ("vllm", False, (True, "False", "encoding"), "does not have image"),
        ("sglang", False, (True, "Unknown", "not_probed"), "answers no plain request"),
    ],
    ids=["verified when it encoded an image", "without an embedding's location", "SGLang's is never verified"],
)
async def test_encoder_is_routable_when_healthy_until_it_restarts(type_, encodes, row, message):
    async with Engine(encodes=encodes) as engine:
        rig = Reports(type_)
        worker = rig.of_role("encoder", ip=engine.ip)
        assert rig.row(worker) == (False, "Unknown", "not_answered")
        async with running(rig.probes.run()):
            await until(lambda: rig.row(worker) == row)
        rig.upstream.close()
        assert message in rig.reporter.report()["workers"][worker.member.uid]["message"]
        rig.beat(worker, epoch=2)
        assert rig.row(worker) == (False, "Unknown", "not_answered")
    asked = {path: (body, key) for path, body, key in engine.seen}
    assert asked.keys() == {"/health", CHAT} if type_ == "vllm" else {"/health"}
    if CHAT in asked:
        body, key = asked[CHAT]
        assert (body["max_tokens"], len(body["messages"][0]["content"]), key) == (1, 1, "Bearer secret")


@pytest.mark.parametrize("role", ["encoder", "decode", "prefill", "renderer"])
def test_client_requests_go_to_workers_only(rig, role):
    rig.of_role(role)
    with pytest.raises(NoWorkerError):
        rig.placer.place(prepared())


def test_renderers_are_reported_beside_workers(rig):
    rig.renderer.roster([Member("uid-r", "r", "127.0.0.1", "render", "renderer", ready=False)])
    row = rig.reporter.report()["workers"]["uid-r"]
    assert row == dict(
        **{"uid": "uid-r", "pool": "render", "role": "renderer", "routable": False, "verified": "Unknown"},
        **{"cause": "not_answered", "message": "it has not answered yet", "draining": False},
    )


def test_report_ignores_heartbeats_loads_and_the_clock(rig):
    worker = rig.worker("a")
    before = rig.reporter.report()
    for _ in range(3):
        rig.clock.now += 0.5
        rig.beat(worker)
        rig.fleet.usage(worker, 0).queue(rig.clock.now)
    assert rig.reporter.report() == before


def test_shared_directory_is_reported_only_when_it_crosses_its_mark(rig):
    worker = rig.worker("a")
    assert "shared" not in rig.reporter.report()["workers"]["uid-a"]
    assert state_of(rig.reporter.report(), rig.fleet, rig.placer)["workers"][0]["shared"] is None
    changes: list[int] = []
    received = []
    rig.fleet.change_listeners.append(lambda: changes.append(1))
    for taken in (1, 2, 900, 901, 3):
        rig.beat(worker, shared=feed.SharedDirectory(taken, 1000, 5000, 9000, taken >= 900))
        row = rig.reporter.report()["workers"]["uid-a"]["shared"]
        assert row == {"above": taken >= 900, "limit": 1000}
        received.append(len(changes))
    assert received == [1, 1, 2, 2, 3]
    shared = state_of(rig.reporter.report(), rig.fleet, rig.placer)["workers"][0]["shared"]
    assert shared == {"taken": 3, "limit": 1000, "available": 5000, "capacity": 9000, "above": False}


def test_an_engine_on_another_device_is_reported_as_it_says_and_a_silent_one_as_unknown(rig):
    worker = rig.worker("a")
    rig.beat(worker, requested_device="cuda")
    assert "device" not in rig.reporter.report()["workers"]["uid-a"]
    assert state_of(rig.reporter.report(), rig.fleet, rig.placer)["workers"][0]["device"] == "unknown"
    rig.beat(worker, device="cpu", devices=1, requested_device="cuda")
    assert rig.reporter.report()["workers"]["uid-a"]["device"] == {"actual": "cpu", "requested": "cuda"}
    shown = state_of(rig.reporter.report(), rig.fleet, rig.placer)["workers"][0]
    assert [shown[name] for name in ("device", "devices", "requested_device")] == ["cpu", 1, "cuda"]


def test_counts_and_missing_stages_are_in_every_report(rig):
    assert rig.reporter.report()["degraded"] == []
    rig.degraded = ("no_encoder", "no_prefill")
    rig.counts.update(decisions=2, exact_decisions=1, prompt_blocks=15, hit_blocks=9)
    report = rig.reporter.report()
    assert [report[n] for n in ("decisions", "exact_decisions", "prompt_blocks", "hit_blocks")] == [2, 1, 15, 9]
    assert report["degraded"] == ["no_encoder", "no_prefill"]
