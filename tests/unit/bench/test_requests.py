"""Rows of larger requests, and the picture that they carry."""

import asyncio

import pytest

from bench.serving import load_client as loadgen
from bench.serving.large_requests import KV, Measured, picture, rows
from bench.serving.plain_engine import Engine
from bench.serving.proxy_overhead import DIRECT, OURS
from mmrouter_lib.image_size import probe
from mmrouter_router.media.data_uri import decode

SMG = "smg 1.13.0"


def seen(**peers: Measured) -> dict[str, Measured]:
    def one(us: float, cpu: float) -> Measured:
        return Measured([us] * 100, short_cpu=cpu, long_cpu=cpu, tokens=1_000_000, image_cpu=cpu, images=1000)

    return {DIRECT: one(100, 0), OURS: one(300, 20), KV: one(300, 25), **peers}


def test_a_picture_is_as_large_as_it_is_asked_to_be_and_one_that_readers_take():
    data = decode(picture(1_000_000), 2_000_000)
    assert abs(len(data) - 1_000_000) < 1000
    size = probe(data, max_pixels=10_000, exif=True)
    assert (size.width, size.height) == (56, 56)


def test_figures_of_kv_are_ratios_to_round_robin_and_to_the_peer():
    found = {item.name: item for item in rows(seen(**{SMG: Measured([200.0] * 100, image_cpu=5, images=1000)}), [])}
    assert found["proxy, paced 10 ms, 64 connections: CPU per token, policy kv, 1k-token prompt, over roundRobin"].met
    over = found["proxy, 1.4 MB image, 4 connections: CPU per request, policy kv, over smg"]
    assert (over.value, over.met) == (5.0, False)
    plain = found["proxy, 1.4 MB image, 4 connections: CPU per request, policy roundRobin, over smg"]
    assert (plain.value, plain.goal) == (4.0, "<= 1.0")
    added = found["proxy, plain JSON, 64 connections: added p50, over the better Rust router"]
    assert (added.value, added.met) == (2.0, False)


def test_without_the_peer_there_is_no_ratio_but_a_reason():
    found = rows(seen(), ["no index"])
    assert [item.peer for item in found if item.value is None] == ["not run: no index"] * 4


@pytest.fixture
async def engine():
    server = await asyncio.get_running_loop().create_server(Engine, "127.0.0.1", 0)
    yield server.sockets[0].getsockname()
    server.close()


async def test_answers_to_requests_at_once_are_timed_one_by_one(engine):
    asked = await loadgen.plains(*engine, connections=3, count=4, image=picture(100_000))
    assert len(asked["us"]) == 12


async def test_a_body_in_chunks_is_read_to_its_end(engine):
    reader, writer = await asyncio.open_connection(*engine)
    writer.write(b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nbody\r\n")
    await asyncio.sleep(0.01)
    writer.write(b"0\r\n\r\n")
    assert await reader.readuntil(b"lazy dog")
    writer.close()
