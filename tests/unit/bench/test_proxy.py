"""The client reads what servers write, the engine writes what clients read, and ratios are to the better peer."""

import asyncio

import pytest

from bench.serving import load_client as loadgen
from bench.serving import proxy_overhead
from bench.serving.plain_engine import TOKENS, Engine


@pytest.fixture
async def engine():
    server = await asyncio.get_running_loop().create_server(Engine, "127.0.0.1", 0)
    yield server.sockets[0].getsockname()
    server.close()


@pytest.mark.parametrize("pause_ms", [None, 1])
async def test_every_token_of_every_stream_arrives(engine, pause_ms):
    answer = await loadgen.streams(*engine, connections=3, count=2, pause_ms=pause_ms)
    assert answer["tokens"] == 3 * 2 * TOKENS
    assert pause_ms is None or answer["seconds"] >= 2 * TOKENS * 0.001


async def test_plain_answers_are_timed_one_by_one(engine):
    answer = await asyncio.to_thread(loadgen.plain, *engine, 5)
    assert len(answer["us"]) == 5


async def test_a_stream_that_lacks_tokens_is_an_error(engine, monkeypatch):
    monkeypatch.setattr(loadgen, "TOKENS", TOKENS + 1)
    with pytest.raises(ValueError, match="tokens came of"):
        await loadgen.streams(*engine, connections=1, count=1, pause_ms=None)


def test_answers_are_whole_or_not_there_yet():
    plain = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"
    chunked = b"HTTP/1.1 503 x\r\ntransfer-encoding: chunked\r\n\r\n3\r\nhel\r\n2\r\nlo\r\n0\r\n\r\n"
    assert loadgen.split(plain) == (200, b"hello")
    assert loadgen.split(chunked) == (503, b"hello")
    for data in (plain, chunked):
        assert all(loadgen.split(data[:cut]) is None for cut in range(len(data)))


def measured(us: float, cpu: float) -> proxy_overhead.Measured:
    return proxy_overhead.Measured(
        [us] * 100, paced_cpu=cpu, paced_tokens=1_000_000, burst_cpu=cpu, burst_tokens=1_000_000
    )


def test_ratios_are_to_the_better_of_the_peers():
    seen = {
        proxy_overhead.DIRECT: measured(100, 1),
        proxy_overhead.OURS: measured(200, 10),
        "a": measured(300, 8),
        "b": measured(600, 20),
    }
    found = {item.name: item for item in proxy_overhead.rows(seen, [])}
    assert found["proxy, plain JSON, 1 connection: added p50"].value == 100
    added = found["proxy, plain JSON, 1 connection: added p50, over the better Rust router"]
    assert (added.value, added.met, added.peer) == (0.5, True, "a: 200 us; b: 500 us")
    token = found["proxy, paced 10 ms, 64 connections: CPU per token, over the better Rust router"]
    assert (token.value, token.met) == (1.25, False)


def test_without_any_peer_the_ratio_is_not_run():
    seen = {proxy_overhead.DIRECT: measured(100, 1), proxy_overhead.OURS: measured(200, 10)}
    ratios = [item for item in proxy_overhead.rows(seen, ["no index"]) if "over" in item.name]
    assert len(ratios) == 4
    assert all(item.value is None and item.met is None and item.peer == "not run: no index" for item in ratios)
