"""What the sidecar learns from its engine over HTTP: its end, its health, its load and its settings."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from unit.sidecar.conftest import loopback
from waiting import until

from mmrouter_lib import feed
from mmrouter_lib.engines.base.adapter import RankLoad, TokenCounts
from mmrouter_sidecar.engine import engine_probe
from mmrouter_sidecar.feed.relay import EventRelay
from mmrouter_sidecar.metrics import BUSY_SAMPLES, EngineLoad, Metrics

PORT = 8000


class Engine:
    """A server at an address of its own, which may end and start again."""

    def __init__(self) -> None:
        self.ip = loopback()
        self.taken = 0
        self._server: asyncio.Server | None = None
        self._writers: list[asyncio.StreamWriter] = []

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._connected, self.ip, PORT)

    def hang_up(self) -> None:
        """Close every connection."""
        for writer in self._writers:
            writer.close()
        self._writers.clear()

    def end(self) -> None:
        assert self._server is not None
        self._server.close()
        self.hang_up()

    def _connected(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.taken += 1
        self._writers.append(writer)


@asynccontextmanager
async def watched(engine: Engine) -> AsyncIterator[list[int]]:
    """Watch an engine; gives a list that grows with each end."""
    ends: list[int] = []
    watching = asyncio.create_task(engine_probe.watch_listener(engine.ip, PORT, lambda: ends.append(engine.taken)))
    try:
        yield ends
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


async def test_each_end_is_reported_once_even_after_a_fast_restart(monkeypatch):
    monkeypatch.setattr(engine_probe, "RECONNECT_SECONDS", 0.02)
    engine = Engine()
    async with watched(engine) as ends:
        for count in (1, 2):
            await engine.start()
            await until(lambda wanted=count: engine.taken == wanted)
            engine.end()
            await until(lambda wanted=count: len(ends) == wanted)
    assert ends == [1, 2]


async def test_an_engine_that_never_listened_has_not_ended(monkeypatch):
    monkeypatch.setattr(engine_probe, "RECONNECT_SECONDS", 0.001)
    engine, asked = Engine(), []
    connect = asyncio.open_connection

    async def counted(ip: str, port: int):
        asked.append(ip)
        return await connect(ip, port)

    monkeypatch.setattr(asyncio, "open_connection", counted)
    async with watched(engine) as ends:
        await until(lambda: len(asked) > 3)
    assert ends == []


async def test_a_closed_connection_is_no_end_while_the_engine_listens(monkeypatch):
    monkeypatch.setattr(engine_probe, "RECONNECT_SECONDS", 0.001)
    engine = Engine()
    await engine.start()
    async with watched(engine) as ends:
        for count in (1, 2, 3):
            await until(lambda wanted=count: engine.taken == wanted)
            assert ends == []
            engine.hang_up()
        await until(lambda: engine.taken == 4)
        engine.end()
        await until(lambda: ends)
    assert len(ends) == 1


RANKS = """\
vllm:num_requests_running{engine="0"} 3.0
vllm:num_requests_running{engine="1"} 0.0
vllm:num_requests_waiting{engine="0"} 2.0
vllm:num_requests_waiting{engine="1"} 5.0
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:kv_cache_usage_perc{engine="1"} 0.75
"""
IDLE, BUSY = {0: RankLoad(), 1: RankLoad()}, {0: RankLoad(), 1: RankLoad(running=1.0)}


def gauges(load: EngineLoad) -> dict[str, float]:
    return {sample.name: sample.value for family in load.collect() for sample in family.samples}


def test_the_busy_ratio_is_that_of_the_last_minute() -> None:
    load = EngineLoad()
    for number in range(BUSY_SAMPLES):
        load.update("", BUSY if number % 4 == 0 else IDLE)
    assert gauges(load)["mmrouter_sidecar_busy_ratio"] == 0.25
    for _ in range(BUSY_SAMPLES):
        load.update("", IDLE)
    assert gauges(load)["mmrouter_sidecar_busy_ratio"] == 0.0


def test_tokens_are_the_engines_own_and_go_with_it() -> None:
    load = EngineLoad()
    load.update("", IDLE, TokenCounts(100, 32, 5))
    names = ("prompt", "cached", "generated")
    assert [gauges(load)[f"mmrouter_sidecar_{name}_tokens_total"] for name in names] == [100, 32, 5]
    load.clear()
    assert gauges(load) == {}


def test_an_engine_without_a_sample_has_no_gauge() -> None:
    """A zero would be taken for an idle engine, and scale its pool down."""
    load = EngineLoad()
    assert gauges(load) == {}
    load.update("# an engine that names none of it\n", {})
    registry = CollectorRegistry()
    registry.register(load)
    assert generate_latest(registry) == b""


async def test_metrics_follow_the_engine_and_end_with_it(start: Any, http_engine: Any, settings: Any) -> None:
    http_engine["metrics"] = RANKS
    one = await start()
    value = one.sidecar.metrics.registry.get_sample_value
    await until(lambda: value("mmrouter_sidecar_kv_usage_ratio") == 0.5)
    assert value("mmrouter_sidecar_queue_depth") == 7.0
    url = f"http://{settings.pod_ip}:9090/engine/metrics"
    async with aiohttp.ClientSession() as session:
        async with session.get(url) as answer:
            assert answer.content_type == "text/plain"
            assert await answer.text() == RANKS
        http_engine["health"] = 503
        await until(lambda: value("mmrouter_sidecar_kv_usage_ratio") is None)
        async with session.get(url) as answer:
            assert (answer.status, await answer.text()) == (200, "")


async def sglang_beat(settings, release: str) -> feed.Heartbeat:
    """Return what is said of an SGLang engine of a pool of GPUs that resolved its device to cpu."""
    answers = {
        "/health": {},
        "/ready": {},
        "/metrics": {},
        "/server_info": {"version": release, "device": "cpu", "tp_size": 1, "dp_size": 1},
        "/model_info": {"model_type": "qwen2_vl"},
        "/openapi.json": {"paths": {"/tokenize": {}, "/flush_cache": {}, "/generate": {}}},
        "/v1/models": {"data": [{"id": "m", "max_model_len": 8192}, {"id": "sql", "parent": "m"}]},
    }

    async def answer(request: web.Request) -> web.Response:
        return web.json_response(answers.get(request.path, {}))

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, settings.pod_ip, settings.ports.engine).start()
    frames: list[feed.Published] = []
    settings, metrics = replace(settings, engine="sglang", device="cuda"), Metrics()
    relay = EventRelay(settings, metrics, frames.append)
    probing = asyncio.create_task(engine_probe.EngineProbe(settings, relay, metrics).run())
    try:
        await until(lambda: any(isinstance(frame, feed.Heartbeat) and frame.device for frame in frames))
    finally:
        probing.cancel()
        await asyncio.gather(probing, return_exceptions=True)
        await runner.cleanup()
        relay.close()
    (beat,) = [frame for frame in frames if isinstance(frame, feed.Heartbeat)][-1:]
    return beat


@pytest.mark.parametrize(("release", "adapters"), [("0.5.23", ("sql",)), ("0.5.22", ())])
async def test_adapters_of_a_release_whose_events_do_not_name_them_are_not_reported(settings, release, adapters):
    """Their blocks would count as the model's, and the model's as theirs."""
    assert (await sglang_beat(settings, release)).adapters == adapters


async def test_an_engine_that_fell_back_to_a_cpu_is_reported_by_its_sidecar(settings, caplog):
    beat = await sglang_beat(settings, "0.5.23")
    assert (beat.device, beat.devices, beat.requested_device) == ("cpu", 1, "cuda")
    assert (beat.routes, beat.context_length) == (("/tokenize", "/generate"), 8192)
    assert "computes on cpu, and its pool asks for cuda" in caplog.text


CPU_CACHE = 'vllm:cache_config_info{engine="0",kv_cache_memory_bytes="4294967296"} 1.0\n'


async def test_a_vllm_that_shows_a_cpu_in_its_metrics_is_reported_unless_a_flag_may_have_set_it(
    start: Any, http_engine: Any, settings: Any, caplog: Any
) -> None:
    http_engine["metrics"] = RANKS + CPU_CACHE.replace("4294967296", "None")
    one = await start(replace(settings, device="cuda", metrics_show_cpu=True))
    value = one.sidecar.metrics.registry.get_sample_value
    await until(lambda: value("mmrouter_sidecar_queue_depth") == 7.0)
    assert one.sidecar.relay.facts.device == ""
    http_engine["metrics"] = RANKS + CPU_CACHE
    await until(lambda: one.sidecar.relay.facts.device == "cpu")
    assert "computes on cpu, and its pool asks for cuda" in caplog.text
    await one.stop()
    other = await start(replace(settings, device="cuda"))
    value = other.sidecar.metrics.registry.get_sample_value
    await until(lambda: value("mmrouter_sidecar_queue_depth") == 7.0)
    assert other.sidecar.relay.facts.device == ""


async def test_health_load_and_geometry_come_from_the_engines_http_side(
    start: Any, http_engine: Any, router: Any, settings: Any
) -> None:
    settings.model_dir.mkdir()
    (settings.model_dir / "config.json").write_text("{}")
    (settings.model_dir / "model.safetensors").write_text("weights do not count")
    http_engine["metrics"] = (
        'vllm:num_requests_running{engine="0"} 3.0\nvllm:num_requests_waiting{engine="0"} 1.0\n'
        'vllm:kv_cache_usage_perc{engine="0"} 0.5\nvllm:cache_config_info{block_size="32",engine="0"} 1.0\n'
    )
    one = await start()
    beat = await router.heartbeat(lambda beat: beat.engine_state == "up" and beat.block_size == 32)
    assert beat.engine_version == "0.32.0"
    assert set(beat.digests) == {"config.json"}
    assert len(beat.digests["config.json"]) == 64
    assert (beat.model, beat.revision, beat.engine) == ("org/model", "main", "vllm")
    load = await router.until(lambda: router.of(feed.LoadReport))
    assert load[0] == feed.LoadReport(0, 3.0, 1.0, 0.5)
    http_engine["health"] = 503
    await router.heartbeat(lambda beat: beat.engine_state == "down")
    assert one.metric("probe_failures_total", path="/health") >= 1


async def test_an_engine_without_events_gets_a_new_epoch_when_it_goes_down(
    start: Any, http_engine: Any, router: Any, settings: Any
) -> None:
    """No connection tells that it ended, as an engine's publisher does."""
    await start(replace(settings, publishes=False))
    up = await router.heartbeat(lambda beat: beat.engine_state == "up")
    await router.ask(lambda number: feed.CanaryClaim(number, up.epoch, "r", 5.0))
    await router.ask(lambda number: feed.CanaryResult(number, feed.CanaryReport(up.epoch, "True", router="r")))
    await router.heartbeat(lambda beat: beat.canary is not None)
    http_engine["health"] = 503
    down = await router.heartbeat(lambda beat: beat.engine_state == "down")
    assert (down.canary, down.epoch > up.epoch, down.worker != up.worker) == (None, True, True)


async def test_an_sglang_engine_reports_identity_settings(
    start: Any, http_engine: Any, router: Any, settings: Any
) -> None:
    http_engine["server"] = {
        **{"version": "0.5.23", "kv_events": {"publisher": "zmq", "block_size": 32}},
        **{"revision": None, "mm_preprocess_cache_size_mb": 256, "page_size": 32},
    }
    http_engine["metrics"] = "sglang:num_running_reqs 2.0\nsglang:num_queue_reqs 1.0\nsglang:token_usage 0.25\n"
    await start(replace(settings, engine="sglang"))
    beat = await router.heartbeat(lambda beat: beat.engine_state == "up")
    assert (beat.engine_version, beat.facts) == ("", {})  # no information about its model yet; the request is repeated
    http_engine["model"] = {"model_type": "qwen2_5_vl", "architectures": ["Qwen2_5_VLForConditionalGeneration"]}
    beat = await router.heartbeat(lambda beat: beat.engine_version != "")
    assert (beat.engine, beat.engine_version, beat.block_size) == ("sglang", "0.5.23", 32)
    assert beat.facts == {
        **{"version": "0.5.23", "revision": "null", "mm_preprocess_cache_size_mb": "256", "page_size": "32"},
        **{"model_type": "qwen2_5_vl", "architectures": '["Qwen2_5_VLForConditionalGeneration"]'},
    }
    load = await router.until(lambda: router.of(feed.LoadReport))
    assert load[0] == feed.LoadReport(0, 2.0, 1.0, 0.25)
    http_engine["health"] = 503
    await router.heartbeat(lambda beat: beat.engine_state == "down")


async def test_an_encoder_has_its_own_health_path_and_a_long_period(
    start: Any, http_engine: Any, router: Any, settings: Any
) -> None:
    """Its answer is an encoded image; its load is read as often as any engine's."""
    http_engine["health"] = 503
    http_engine["metrics"] = "sglang:num_running_reqs 1.0\nsglang:num_queue_reqs 1.0\nsglang:token_usage 0.5\n"
    await start(replace(settings, engine="sglang", health_path="/health", health_seconds=30.0))
    await until(lambda: len(http_engine["asked"]) >= 2)  # an encoder that is not up has the usual period
    http_engine["health"] = 200
    await router.heartbeat(lambda beat: beat.engine_state == "up")
    asked = len(http_engine["asked"])
    for waiting in (2, 3, 4):
        http_engine["metrics"] = http_engine["metrics"].replace(
            f"_reqs {waiting - 1}.0\nsglang:t", f"_reqs {waiting}.0\nsglang:t"
        )
        await router.until(lambda waiting=waiting: any(load.waiting == waiting for load in router.of(feed.LoadReport)))
    assert set(http_engine["asked"]) == {"/health"}
    assert len(http_engine["asked"]) == asked
