"""Benchmarks of router processes: the load generator, the minimal engine, and rows with ratios to the better peer."""

import asyncio
import base64
import itertools
import json

import pytest

from bench.peer_routers import DYNAMO_FRONTEND
from bench.placing.workload import padded_png
from bench.serving import (
    gateway_overhead,
    load_generator,
    picker_overhead,
    proxy_overhead,
    resource_usage,
    stalls,
    tracing_cost,
    whole_job,
)
from bench.serving.load_generator import LoadGenerator
from bench.serving.minimal_engine import TOKENS, EngineConnection
from bench.serving.proxy_overhead import DIRECT, KV, OURS, TargetFigures
from bench.serving.resource_usage import RouterUsage
from bench.serving.router_processes import CpuCost
from bench.serving.stall_clients import StallClients
from mmrouter_lib.image_size import probe

SMG = "smg 1.13.0"


@pytest.fixture
async def engine():
    server = await asyncio.get_running_loop().create_server(EngineConnection, "127.0.0.1", 0)
    yield server.sockets[0].getsockname()
    server.close()


@pytest.mark.parametrize("pause_ms", [None, 1])
async def test_every_token_of_every_stream_arrives(engine, pause_ms):
    answer = await LoadGenerator().streams(*engine, connections=3, count=2, pause_ms=pause_ms)
    assert answer["tokens"] == 3 * 2 * TOKENS
    assert pause_ms is None or answer["seconds"] >= 2 * TOKENS * 0.001


@pytest.mark.parametrize(("connections", "image"), [(1, b""), (3, padded_png(100_000))])
async def test_plain_answers_are_timed_one_by_one(engine, connections, image):
    answer = await LoadGenerator().plain(*engine, count=4, connections=connections, image=image.hex())
    assert len(answer["us"]) == 4 * connections


@pytest.mark.parametrize(("kind", "requests"), [("1k", 1), ("8k", 1), ("conversation", 20), ("image", 1)])
async def test_requests_of_every_kind_differ_between_clients(engine, kind, requests):
    first, second = load_generator.new_bodies(kind, 1), load_generator.new_bodies(kind, 2)
    assert len(first) == load_generator.requests_of(kind) == requests
    assert len({*first, *second}) == 2 * requests
    answer = await LoadGenerator().new(*engine, kind=kind, connections=2, count=3)
    assert len(answer["us"]) == 2 * 3 * requests


def test_a_conversation_repeats_what_was_said():
    turns = [json.loads(body)["messages"] for body in load_generator.new_bodies("conversation", 1)]
    assert [len(messages) for messages in turns] == list(range(1, 40, 2))
    assert all(later[: len(earlier)] == earlier for earlier, later in itertools.pairwise(turns))


def test_a_new_image_can_be_read():
    (body,) = load_generator.new_bodies("image", 12)
    url = json.loads(body)["messages"][0]["content"][0]["image_url"]["url"]
    data = base64.b64decode(url.partition(",")[2], validate=True)
    size = probe(data, max_pixels=10_000, exif=True)
    assert (len(data), size.width, size.height) == (load_generator.IMAGE_BYTES, 56, 56)


async def test_a_stream_that_lacks_tokens_is_an_error(engine, monkeypatch):
    monkeypatch.setattr(load_generator, "TOKENS", TOKENS + 1)
    with pytest.raises(ValueError, match=f"{TOKENS} tokens of {TOKENS + 1} arrived"):
        await LoadGenerator().streams(*engine, connections=1, count=1, pause_ms=None)


async def test_idle_streams_begin_and_stay_open(engine):
    await LoadGenerator().idle(*engine, connections=3)


async def test_an_engine_reads_a_chunked_body_to_its_end(engine):
    reader, writer = await asyncio.open_connection(*engine)
    writer.write(b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nbody\r\n")
    await asyncio.sleep(0.01)
    writer.write(b"0\r\n\r\n")
    assert await reader.readuntil(b"lazy dog")
    writer.close()


def by_name(rows):
    return {item.name: item for item in rows}


def target_figures(us: float, cpu: float) -> TargetFigures:
    counts = {"paced": 1_000_000, "short": 1_000_000, "long": 1_000_000, "new": 10_000, "images": 1000}
    return TargetFigures([us] * 100, {kind: CpuCost(cpu, count) for kind, count in counts.items()})


def test_overhead_ratios_are_to_the_better_of_the_peers():
    figures = {DIRECT: target_figures(100, 1), OURS: target_figures(200, 10)}
    figures |= {"a": target_figures(300, 8), "b": target_figures(600, 20)}
    rows = by_name(proxy_overhead.rows(figures, []))
    assert rows["proxy, plain JSON, 1 connection: added p50"].value == 100
    added = rows["proxy, plain JSON, 1 connection: added p50, over the better Rust router"]
    assert (added.value, added.met, added.peer) == (0.5, True, "a: 200 us; b: 500 us")
    token = rows["proxy, paced 10 ms, 64 connections: CPU per token, over the better Rust router"]
    assert (token.value, token.met) == (1.25, False)


def test_the_cost_of_spans_is_a_ratio_to_none_and_only_the_operators_share_has_a_goal():
    us = dict(zip(tracing_cost.SHARES, (400, 480, 1200), strict=True))
    rows = by_name(tracing_cost.rows({name: CpuCost(each / 1e6, 1) for name, each in us.items()}))
    share, everything = (rows[f"tracing {name}: CPU, over none"] for name in (tracing_cost.SHARE, tracing_cost.ALL))
    assert (share.value, share.met, everything.value, everything.met) == (1.2, True, 3.0, None)


def test_the_figures_of_a_gateway_are_ratios_to_each_other_way():
    us = {(gateway_overhead.OURS, "short chat"): 100.0, (gateway_overhead.DECIDED, "short chat"): 400.0}
    rows = by_name(gateway_overhead.rows("p50", us, "no Envoy"))
    assert rows["gateway, short chat: p50"].value == 100
    assert rows[f"gateway, short chat: p50, over {gateway_overhead.DECIDED}"].value == 0.25
    missing = rows[f"gateway, short chat: p50, over {gateway_overhead.ENVOY}"]
    assert (missing.value, missing.peer) == (None, "not run: no Envoy")


def costs(**peers: TargetFigures) -> dict[str, TargetFigures]:
    return {DIRECT: target_figures(100, 0), OURS: target_figures(300, 20), KV: target_figures(300, 25), **peers}


def test_costs_of_kv_are_ratios_to_round_robin_and_to_the_peer():
    rows = by_name(proxy_overhead.large_rows(costs(**{SMG: target_figures(200, 5)}), []))
    assert rows["proxy, paced 10 ms, 64 connections: CPU per token, policy kv, 1k-token prompt, over roundRobin"].met
    over = rows["proxy, 1.4 MB image, 4 connections: CPU per request, policy kv, over smg"]
    assert (over.value, over.met) == (5.0, False)
    plain = rows["proxy, 1.4 MB image, 4 connections: CPU per request, policy roundRobin, over smg"]
    assert (plain.value, plain.goal) == (4.0, "<= 1.0")
    added = rows["proxy, plain JSON, 64 connections: added p50, over the better Rust router"]
    assert (added.value, added.met) == (2.0, False)
    rate = rows["proxy, new 1k-token prompts, 64 connections: requests per second and core, policy kv"]
    assert (rate.value, rate.unit) == (400, "1/s")


def test_without_peers_ratios_are_not_run_and_give_the_reason():
    figures = {DIRECT: target_figures(100, 1), OURS: target_figures(200, 10)}
    rows = [
        *proxy_overhead.rows(figures, ["no index"]),
        *proxy_overhead.large_rows(costs(), ["no index"]),
        *resource_usage.connection_rows({"mmrouter": RouterUsage(mib=15)}, ["no index"]),
    ]
    missing = [(item.value, item.met, item.peer) for item in rows if item.value is None]
    assert missing == [(None, None, "not run: no index")] * (3 + 4 + 1)


def job_figures(us: float, cpu: float) -> TargetFigures:
    figures = TargetFigures([us] * 100)
    figures.cpu["8k"] = CpuCost(cpu, 1000)
    return figures


def test_the_whole_job_is_compared_in_cpu_and_in_added_latency():
    figures = {DIRECT: job_figures(100, 9), OURS: job_figures(200, 4), SMG: job_figures(150, 1)}
    figures[str(DYNAMO_FRONTEND)] = job_figures(300, 5)
    rows = by_name(whole_job.rows("8k", 64, figures, []))
    name = "job, 8k new tokens, 64 connections"
    over = [rows[f"{name}: {each}, over Dynamo's frontend"] for each in ("CPU per request", "added p99")]
    assert [(item.value, item.met) for item in over] == [(0.8, True), (0.5, True)]
    rate = rows[f"{name}: requests per second and core"]
    assert (rate.value, rate.peer) == (250, f"{SMG}: 1000; {DYNAMO_FRONTEND}: 200")


def test_the_whole_job_without_a_peer_has_figures_but_no_ratios():
    rows = whole_job.rows("8k", 1, {DIRECT: job_figures(100, 9), OURS: job_figures(200, 4)}, ["no index"])
    assert [item.value for item in rows] == [4000, None, 100, None, 100, None, 250]
    assert {item.peer for item in rows if item.value is None} == {"not run: no index"}


def test_a_ratio_to_a_peer_that_adds_nothing_is_not_run():
    figures = {DIRECT: job_figures(100, 9), OURS: job_figures(200, 4), str(DYNAMO_FRONTEND): job_figures(90, 0)}
    reasons = [item.peer for item in whole_job.rows("8k", 1, figures, []) if item.value is None]
    assert reasons == ["not run: the peer's figure is 0 us"] + ["not run: the peer's figure is -10 us"] * 2


def picked(us: float, **cpu: float) -> picker_overhead.Figures:
    figures = picker_overhead.Figures([us] * 100)
    figures.cpu |= {part: CpuCost(seconds, 1_000_000) for part, seconds in cpu.items()}
    return figures


def test_a_picker_is_compared_with_the_frontend_of_the_same_run():
    found = {
        DIRECT: picked(100),
        "frontend": picked(200, router=40),
        "endpointPicker": picked(400, router=50, Envoy=30),
        "frontendPicker": picked(500, router=90, Envoy=30),
    }
    rows = by_name(picker_overhead.rows({("2 kB", 64): found}))
    name = "picker, 2 kB, 64 connections, endpointPicker"
    assert [rows[f"{name}: {each}"].value for each in ("added p50", "added p99, over the frontend")] == [300, 3]
    assert [rows[f"{name}: CPU per request, {part}"].value for part in ("router", "Envoy")] == [50, 30]
    both = rows[f"{name}: CPU per request of both, over the frontend"]
    assert (both.value, both.peer) == (2.0, "the frontend: 40 us")


def test_a_ratio_to_a_frontend_that_adds_nothing_is_not_run():
    found = dict.fromkeys((DIRECT, "frontend", "endpointPicker", "frontendPicker"), picked(100, router=1))
    rows = by_name(picker_overhead.rows({("2 kB", 1): found}))
    over = rows["picker, 2 kB, 1 connection, endpointPicker: added p50, over the frontend"]
    assert (over.value, over.peer) == (None, "not run: the frontend's figure is 0 us")


def test_a_padded_picture_has_its_size_and_can_be_read():
    data = padded_png(1_000_000)
    assert len(data) == 1_000_000
    size = probe(data, max_pixels=10_000, exif=True)
    assert (size.width, size.height) == (56, 56)


def test_an_error_of_ours_is_the_only_row():
    (only,) = resource_usage.connection_rows({"mmrouter": RouterUsage(error="closed"), "smg": RouterUsage(mib=10)}, [])
    assert (only.value, only.met, only.peer) == (1.0, False, "closed")


def test_a_peer_with_an_error_is_named_and_not_compared():
    smg, sglang = RouterUsage(mib=5, error="reset"), RouterUsage(mib=10)
    usages = {"mmrouter": RouterUsage(mib=15), "smg": smg, "sglang-router": sglang}
    ratio = resource_usage.connection_rows(usages, [])[-1]
    assert (ratio.value, ratio.met) == (1.5, True)
    assert ratio.peer == "smg: reset; sglang-router: 10 MiB"


def test_cpu_of_two_replicas_is_compared_with_one_process():
    rows = resource_usage.replica_rows(CpuCost(1.0, 1000), CpuCost(1.2, 1000))
    assert [(item.value, item.met) for item in rows] == [(1200.0, None), (1.2, False)]


@pytest.mark.parametrize("kind", stalls.NEIGHBOURS)
async def test_gaps_are_measured_beside_every_kind_of_neighbour(engine, kind):
    clients = StallClients()
    timed, neighbour = await asyncio.gather(
        clients.gaps(*engine, streams=2, pause_ms=1, seconds=0.2), clients.disturb(*engine, kind=kind, seconds=0.2)
    )
    assert len(timed["gap"]) >= 2 * (TOKENS - 1)
    assert timed["chat"]
    assert timed["health"]
    assert bool(neighbour["us"]) == (kind != "none")


def test_an_added_gap_is_to_the_engine_and_the_ratio_to_the_better_peer():
    times = {DIRECT: 12_000, OURS: 15_000, "a": 20_000, "b": 10_000}
    measured = {name: {measure: [us] * 100 for measure in stalls.MEASURES} for name, us in times.items()}
    rows = by_name(stalls.rows("no neighbour", measured, []))
    added = rows["stall, no neighbour: token gap, p99, added"]
    assert (added.value, added.met) == (3.0, False)
    assert rows["stall, no neighbour: token gap, p99, over the better Rust router"].value == 1.5
    assert rows["stall, no neighbour: short chat, p99, over the engine's own"].value == 1.25


async def test_an_engine_reads_a_large_body_in_many_pieces(engine):
    reader, writer = await asyncio.open_connection(*engine)
    for _ in range(2):
        body = load_generator.body_of("x" * 3_000_000, stream=True)
        writer.write(load_generator.message("engine", 1, body))
        assert await reader.readuntil(b"[DONE]\n\n\r\n0\r\n\r\n")
    writer.close()
