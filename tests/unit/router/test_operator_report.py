"""Reports to the operator: routable and verified of every pod by role (docs/architecture.md), with causes."""

import asyncio
from dataclasses import replace

import pytest
from unit.router.engine import Engine
from unit.router.rig import Rig, prepared

from mmrouter_lib import feed
from mmrouter_router.api.control import state_of
from mmrouter_router.api.operator_report import Reporter
from mmrouter_router.encoding.encoder_probes import EncoderProbes
from mmrouter_router.explain.decisions import DecisionCounts
from mmrouter_router.fleet.workers import Member
from mmrouter_router.http.upstream import Upstream
from mmrouter_router.request.renderer_client import Renderer
from mmrouter_router.scheduling.placer import NoWorkerError
from mmrouter_router.telemetry.metrics import Metrics


class Reports(Rig):
    """A rig whose router reports."""

    def __init__(self, engine: str = "vllm", **verification) -> None:
        super().__init__(**verification)
        self.upstream = Upstream(connect_seconds=10)
        self.probes = EncoderProbes(self.fleet, self.upstream, engine, "secret", "m")
        self.renderer = Renderer(self.upstream, "secret", "m", Metrics())
        self.counts, self.possible, self.ready = DecisionCounts(), True, True
        self.degraded: tuple[str, ...] = ()
        self.reporter = Reporter(
            router_id="r",
            engine=engine,
            fleet=self.fleet,
            renderer=self.renderer,
            probes=self.probes,
            counts=self.counts,
            ready=lambda: self.ready,
            possible=lambda: self.possible,
            degraded=lambda: self.degraded,
        )

    def row(self, worker) -> tuple:
        row = self.reporter.report()["workers"][worker.member.uid]
        return row["routable"], row["verified"], row["cause"]

    def of_role(self, role: str, name: str = "a", ip: str = "127.0.0.1", **beat):
        """Add a pod of a role with a heartbeat and a snapshot."""
        worker = self.worker(name, **beat)
        worker.member = replace(worker.member, role=role, ip=ip)
        return worker


@pytest.mark.parametrize("role", ["worker", "prefill", "decode"])
def test_synced_worker_is_routable_and_verified_by_its_canary(role):
    rig = Reports()
    assert rig.row(rig.of_role(role, "a")) == (True, "True", "")
    assert rig.row(rig.of_role(role, "b", canary="")) == (True, "Unknown", "pending")
    failed = rig.of_role(role, "c", canary="False")
    assert rig.row(failed)[:2] == (True, "False")


def test_each_unroutable_state_has_its_cause():
    rig = Reports()
    assert rig.row(rig.fleet.join(Member("uid-new", "new", "127.0.0.1", "worker", "worker")))[::2] == (
        False,
        "not_heard",
    )
    assert rig.row(rig.worker("a", engine_state="starting"))[::2] == (False, "engine_starting")
    assert rig.row(rig.worker("b", engine_state="down"))[::2] == (False, "engine_down")
    assert rig.row(rig.worker("c", draining=True))[::2] == (False, "draining")
    unsynced = rig.worker("d")
    rig.fleet.mark_stale(unsynced)
    assert rig.row(unsynced)[::2] == (False, "no_snapshot")


def test_silent_sidecar_is_not_heard():
    rig = Reports()
    worker = rig.worker("a")
    rig.clock.now += 1.9
    assert rig.row(worker)[0]
    rig.clock.now += 0.2
    assert rig.row(worker) == (False, "True", "not_heard")


def test_unpredictable_model_is_reported_as_not_modelled():
    rig = Reports()
    rig.possible = False
    assert rig.row(rig.worker("a", canary="")) == (True, "Unknown", "not_modelled")


def test_both_engines_of_a_pair_wait_for_their_canary():
    rig = Reports("sglang")
    assert rig.row(rig.of_role("prefill", "p", canary="")) == (True, "Unknown", "pending")
    assert rig.row(rig.of_role("decode", "d", canary="")) == (True, "Unknown", "pending")
    assert rig.row(rig.of_role("decode", "e")) == (True, "True", "")


async def probing(rig, condition, seconds: float = 15.0) -> None:
    """Run the probes until ``condition`` holds."""
    running = asyncio.create_task(rig.probes.run())
    try:
        async with asyncio.timeout(seconds):
            while not condition():
                await asyncio.sleep(0.01)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        rig.upstream.close()


async def test_encoder_is_routable_when_healthy_and_verified_when_it_encoded_an_image():
    async with Engine(encodes=True) as engine:
        rig = Reports()
        worker = rig.of_role("encoder", ip=engine.ip)
        assert rig.row(worker) == (False, "Unknown", "not_answered")
        await probing(rig, lambda: rig.row(worker) == (True, "True", ""))
    (health, _, _), (path, body, key) = engine.seen
    assert (health, path, key) == ("/health", "/v1/chat/completions", "Bearer secret")
    assert (body["max_tokens"], len(body["messages"][0]["content"])) == (1, 1)


async def test_encoder_without_embedding_location_is_not_verified():
    async with Engine() as engine:
        rig = Reports()
        worker = rig.of_role("encoder", ip=engine.ip)
        await probing(rig, lambda: rig.row(worker) == (True, "False", "encoding"))
    assert "does not have image" in rig.reporter.report()["workers"][worker.member.uid]["message"]


async def test_restarted_encoder_is_unverified():
    async with Engine(encodes=True) as engine:
        rig = Reports()
        worker = rig.of_role("encoder", ip=engine.ip)
        await probing(rig, lambda: rig.row(worker)[1] == "True")
        rig.beat(worker, epoch=2)
        assert rig.row(worker) == (False, "Unknown", "not_answered")


async def test_sglang_encoder_is_never_verified():
    async with Engine() as engine:
        rig = Reports("sglang")
        worker = rig.of_role("encoder", ip=engine.ip)
        await probing(rig, lambda: rig.row(worker) == (True, "Unknown", "not_probed"))
    assert {path for path, _, _ in engine.seen} == {"/health"}


@pytest.mark.parametrize("role", ["encoder", "decode", "prefill", "renderer"])
def test_client_requests_go_to_workers_only(role):
    rig = Reports()
    rig.of_role(role)
    with pytest.raises(NoWorkerError):
        rig.placer.place(prepared())


def test_renderers_are_reported_beside_workers():
    rig = Reports()
    rig.renderer.roster([Member("uid-r", "r", "127.0.0.1", "render", "renderer", ready=False)])
    row = rig.reporter.report()["workers"]["uid-r"]
    assert row == {
        "uid": "uid-r",
        "pool": "render",
        "role": "renderer",
        "routable": False,
        "verified": "Unknown",
        "cause": "not_answered",
        "message": "it has not answered yet",
        "draining": False,
    }


def test_report_ignores_heartbeats_loads_and_the_clock():
    rig = Reports()
    worker = rig.worker("a")
    before = rig.reporter.report()
    for _ in range(3):
        rig.clock.now += 0.5
        rig.beat(worker)
        rig.fleet.usage(worker, 0).queue(rig.clock.now)
    assert rig.reporter.report() == before


def test_shared_directory_is_reported_only_when_it_crosses_its_mark():
    rig = Reports()
    worker = rig.worker("a")
    assert "shared" not in rig.reporter.report()["workers"]["uid-a"]
    assert state_of(rig.reporter.report(), rig.fleet, rig.placer)["workers"][0]["shared"] is None
    changes: list[int] = []
    told = []
    rig.fleet.on_change(lambda: changes.append(1))
    for taken in (1, 2, 900, 901, 3):
        rig.beat(worker, shared=feed.SharedDirectory(taken, 1000, 5000, 9000, taken >= 900))
        row = rig.reporter.report()["workers"]["uid-a"]["shared"]
        assert row == {"above": taken >= 900, "limit": 1000}
        told.append(len(changes))
    assert told == [1, 1, 2, 2, 3]
    assert state_of(rig.reporter.report(), rig.fleet, rig.placer)["workers"][0]["shared"] == {
        "taken": 3,
        "limit": 1000,
        "available": 5000,
        "capacity": 9000,
        "above": False,
    }


def test_counts_only_grow():
    rig = Reports()
    rig.counts.add(exact=True, prompt_blocks=10, hit_blocks=4)
    rig.counts.add(exact=False, prompt_blocks=5, hit_blocks=5)
    report = rig.reporter.report()
    assert [report[n] for n in ("decisions", "exact_decisions", "prompt_blocks", "hit_blocks")] == [2, 1, 15, 9]


def test_missing_stages_are_in_every_report():
    rig = Reports()
    assert rig.reporter.report()["degraded"] == []
    rig.degraded = ("no_encoder", "no_prefill")
    assert rig.reporter.report()["degraded"] == ["no_encoder", "no_prefill"]
