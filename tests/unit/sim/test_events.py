"""The event sockets of the simulated vLLM: real ZMQ, as a sidecar sees it."""

import asyncio

import msgspec
import pytest
import zmq
import zmq.asyncio

from mmrouter_sim.core.events import AllBlocksCleared, EventBatch
from mmrouter_sim.publisher import EventsConfig, Publisher, binds, offset_port

END = b"\xff" * 8


@pytest.fixture
def context():
    with zmq.asyncio.Context() as context:
        yield context
        context.destroy(linger=0)


async def receive(socket):
    async with asyncio.timeout(60):
        return await socket.recv_multipart()


async def ask(context, endpoint, *frames):
    """Send a replay request and return the answer's messages up to the end mark."""
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.RCVHWM, 0)  # the engine's socket drops what its reader does not take
    dealer.connect(endpoint)
    await dealer.send_multipart(list(frames))
    found = []
    while not found or found[-1][-2] != END:
        found.append(await receive(dealer))
    dealer.close(linger=0)
    return found


def subscriber(context, *, bind=None, connect=None):
    socket = context.socket(zmq.SUB)
    socket.subscribe(b"")
    if bind:
        port = socket.bind_to_random_port(bind)
        return socket, f"{bind}:{port}"
    socket.connect(connect)
    return socket, connect


async def publisher(config, rank=0):
    made = Publisher(config, rank, clock=lambda: 12.5)
    made.start()
    return made


def config(**fields):
    return EventsConfig(enable_kv_cache_events=True, **fields)


async def test_a_concrete_address_connects_and_an_earlier_subscriber_misses_nothing(context):
    sub, endpoint = subscriber(context, bind="tcp://127.0.0.1")
    made = await publisher(config(endpoint=endpoint, topic="kv"), rank=0)
    try:
        # The subscription travels after the connection; what is sent before is for the replay.
        while not await sub.poll(5):
            made.publish([AllBlocksCleared()])
        topic, sequence, payload = await receive(sub)
    finally:
        made.close()
    assert topic == b"kv"
    assert len(sequence) == 8
    assert payload == msgspec.msgpack.encode([12.5, [{"type": "AllBlocksCleared"}], 0])


async def test_replay_gives_batches_from_a_number_on_and_an_end_mark_always_in_four_frames(context, tmp_path):
    replay = f"ipc://{tmp_path}/replay"
    made = await publisher(config(endpoint=f"ipc://{tmp_path}/pub", replay_endpoint=replay, buffer_steps=3, topic="t"))
    try:
        for _ in range(5):
            made.publish([AllBlocksCleared()])
        whole = await ask(context, replay, b"", (0).to_bytes(8, "big"))
        tail = await ask(context, replay, b"", (4).to_bytes(8, "big"))
        none = await ask(context, replay, b"", (10**6).to_bytes(8, "big"))
    finally:
        made.close()
    assert {len(message) for message in whole} == {4}
    assert [int.from_bytes(message[2], "big") for message in whole[:-1]] == [2, 3, 4]  # the buffer held three
    assert [int.from_bytes(message[2], "big") for message in tail[:-1]] == [4]
    assert whole[0][:2] == [b"", b"t"]
    assert whole[-1] == none[0] == [b"", b"", END, b""]


async def test_malformed_replay_requests_are_dropped_and_the_next_is_served(context, tmp_path, caplog):
    replay = f"ipc://{tmp_path}/replay"
    made = await publisher(config(endpoint=f"ipc://{tmp_path}/pub", replay_endpoint=replay))
    try:
        dealer = context.socket(zmq.DEALER)
        dealer.connect(replay)
        for frames in ([b"\0" * 8], [b"", b"\0" * 8, b""], [b"x", b"\0" * 8], [b"", b"\0" * 7]):
            await dealer.send_multipart(frames)
        await dealer.send_multipart([b"", b"\0" * 8])
        assert await receive(dealer) == [b"", b"", END, b""]
        dealer.close(linger=0)
    finally:
        made.close()
    assert caplog.text.count("invalid replay request") == 4


async def test_a_replay_below_the_high_water_mark_is_whole_and_a_long_one_to_a_stalled_reader_is_cut(context, tmp_path):
    replay = f"ipc://{tmp_path}/replay"
    made = await publisher(config(endpoint=f"ipc://{tmp_path}/pub", replay_endpoint=replay))
    try:
        for _ in range(900):
            made.publish([AllBlocksCleared()])
        answer = await ask(context, replay, b"", (0).to_bytes(8, "big"))
        assert [int.from_bytes(message[2], "big") for message in answer[:-1]] == list(range(900))
        for _ in range(9000):
            made.publish([AllBlocksCleared()])
        # This reader shares a thread with the publisher, so it reads nothing while the replay is being sent.
        stalled = context.socket(zmq.DEALER)
        stalled.setsockopt(zmq.RCVHWM, 1)
        stalled.connect(replay)
        await stalled.send_multipart([b"", (0).to_bytes(8, "big")])
        got = [await receive(stalled)]
        while await stalled.poll(200):
            got.append(await receive(stalled))
        stalled.close(linger=0)
    finally:
        made.close()
    numbers = [int.from_bytes(message[2], "big") for message in got]
    assert numbers == sorted(set(numbers))
    assert len(numbers) < 9901  # the engine's socket silently drops messages beyond its mark


async def test_each_rank_has_its_own_ports_and_numbers(serve, context, unused_port):
    port = unused_port(4)
    events = {
        "enable_kv_cache_events": True,
        "endpoint": f"tcp://*:{port}",
        "replay_endpoint": f"tcp://127.0.0.1:{port + 2}",
    }
    client = await serve("--data-parallel-size", "2", "--kv-events-config", msgspec.json.encode(events).decode())
    _, sources = await client.get("/kv_event_sources")
    assert sources["1"] == {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{port + 1}",
        "replay_endpoint": f"tcp://127.0.0.1:{port + 3}",
        "buffer_steps": 10000,
        "hwm": 100000,
        "max_queue_size": 100000,
        "topic": "",
    }
    body = {"messages": [{"role": "user", "content": "word " * 60}], "max_tokens": 20}
    for rank in ("1", "0", "1"):
        await client.post("/v1/chat/completions", body, headers={"X-data-parallel-rank": rank})
    for rank in (0, 1):
        batches = await ask(context, f"tcp://127.0.0.1:{port + 2 + rank}", b"", (0).to_bytes(8, "big"))
        decoded = [msgspec.msgpack.decode(message[3], type=EventBatch) for message in batches[:-1]]
        assert [int.from_bytes(message[2], "big") for message in batches[:-1]] == list(range(len(decoded)))
        assert {batch.data_parallel_rank for batch in decoded} == {rank}
        assert all(batch.events for batch in decoded)
        # One message for the prompt's blocks, then one for each block that the answer filled.
        assert decoded[0].events[0].parent_block_hash is None
        assert decoded[1].events[0].parent_block_hash == decoded[0].events[-1].block_hashes[-1]
        holds = client.engine.runners[rank].scheduler.pool.contents()
        assert sum(len(event.block_hashes) for batch in decoded for event in batch.events) == sum(holds.values())


async def test_hashes_are_whole_digests_when_the_environment_says_so(serve, context, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")
    replay = f"ipc://{tmp_path}/replay"
    events = {"enable_kv_cache_events": True, "endpoint": f"ipc://{tmp_path}/pub", "replay_endpoint": replay}
    client = await serve("--kv-events-config", msgspec.json.encode(events).decode())
    await client.chat("word " * 60)
    first, *_ = await ask(context, replay, b"", (0).to_bytes(8, "big"))
    (stored,) = msgspec.msgpack.decode(first[3])[1]
    assert stored["block_hashes"] == list(client.engine.runners[0].scheduler.pool.contents())
    assert {len(digest) for digest in stored["block_hashes"]} == {32}


async def test_without_events_there_are_no_sources(serve):
    client = await serve()
    assert await client.get("/kv_event_sources") == (200, {})


@pytest.mark.parametrize(
    ("endpoint", "rank", "expected"),
    [
        ("tcp://*:5557", 1, "tcp://*:5558"),
        ("tcp://127.0.0.1:0", 3, "tcp://127.0.0.1:0"),
        ("tcp://[::1]:10", 2, "tcp://[::1]:12"),
        ("inproc://a", 1, "inproc://a_dp1"),
        ("ipc:///x", 0, "ipc:///x"),
    ],
)
def test_ranks_move_tcp_ports_and_name_inproc_endpoints(endpoint, rank, expected):
    assert offset_port(endpoint, rank) == expected


@pytest.mark.parametrize("endpoint", ["ipc:///x", "tcp://host"])
def test_endpoints_that_ranks_would_share_are_refused(endpoint):
    with pytest.raises(ValueError, match="ranks"):
        offset_port(endpoint, 1)


def test_wildcards_bind_and_concrete_addresses_connect():
    assert all(map(binds, ["tcp://*:5557", "tcp://[::]:5557", "ipc:///x", "inproc://x"]))
    assert not any(map(binds, ["tcp://127.0.0.1:5557", "tcp://0.0.0.0:5557", "tcp://host:1"]))
