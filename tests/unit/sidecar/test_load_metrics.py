"""Load metrics for autoscalers: one value per pod, and none while the engine is down."""

import asyncio
from collections.abc import Callable
from typing import Any

import aiohttp
from prometheus_client import CollectorRegistry, generate_latest

from mmrouter_lib.engines.base.metrics import RankLoad
from mmrouter_sidecar.metrics import BUSY_SAMPLES, EngineLoad

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


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(15):
        while not condition():
            await asyncio.sleep(0.002)


def test_the_ranks_of_an_engine_are_one_value() -> None:
    load = EngineLoad()
    load.update("", {0: RankLoad(3, 2, 0.25), 1: RankLoad(0, 5, 0.75)})
    assert gauges(load) == {
        "mmrouter_sidecar_kv_usage_ratio": 0.5,
        "mmrouter_sidecar_queue_depth": 7.0,
        "mmrouter_sidecar_busy_ratio": 1.0,
    }


def test_the_busy_ratio_is_that_of_the_last_minute() -> None:
    load = EngineLoad()
    for number in range(BUSY_SAMPLES):
        load.update("", BUSY if number % 4 == 0 else IDLE)
    assert gauges(load)["mmrouter_sidecar_busy_ratio"] == 0.25
    for _ in range(BUSY_SAMPLES):
        load.update("", IDLE)
    assert gauges(load)["mmrouter_sidecar_busy_ratio"] == 0.0


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
