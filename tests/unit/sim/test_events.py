"""The event sockets of the simulated vLLM: real ZMQ, as a sidecar sees it."""

import asyncio
import json
from array import array
from contextlib import ExitStack

import msgspec
import pytest
import zmq
import zmq.asyncio
from e2e.equality import difference, keys_of
from unit.sim.conftest import CHAT, LONG, chat_body, image, png, text

from mmrouter_lib.block_keys import Span, block_keys, namespace_seed
from mmrouter_lib.media_identity import foreign_identity, to_wire
from mmrouter_sim.core.events import AllBlocksCleared, BlockStored
from mmrouter_sim.rank_runner import EventsConfig, Publisher, offset_port

END = b"\xff" * 8


async def receive(socket):
    async with asyncio.timeout(60):
        return await socket.recv_multipart()


async def ask(context, endpoint, start=0):
    """Request a replay from a number on and return the answer's messages up to the end mark."""
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.RCVHWM, 0)  # the engine's socket drops what its reader does not take
    dealer.connect(endpoint)
    await dealer.send_multipart([b"", start.to_bytes(8, "big")])
    messages = []
    while not messages or messages[-1][-2] != END:
        messages.append(await receive(dealer))
    dealer.close(linger=0)
    return messages


def subscriber(context, *, bind=None, connect=None):
    socket = context.socket(zmq.SUB)
    socket.subscribe(b"")
    if bind:
        port = socket.bind_to_random_port(bind)
        return socket, f"{bind}:{port}"
    socket.connect(connect)
    return socket, connect


@pytest.fixture
async def publisher():
    """Start publishers; all are closed at the end of the test."""
    with ExitStack() as stack:

        async def start(config):
            made = Publisher(config, 0, clock=lambda: 12.5)
            stack.callback(made.close)
            made.start()
            return made

        yield start


def config(**fields):
    return EventsConfig(enable_kv_cache_events=True, **fields)


async def test_a_concrete_address_connects_and_an_earlier_subscriber_misses_nothing(context, publisher):
    sub, endpoint = subscriber(context, bind="tcp://127.0.0.1")
    made = await publisher(config(endpoint=endpoint, topic="kv"))
    # The subscription travels after the connection; what is sent before is for the replay.
    while not await sub.poll(5):
        made.publish([AllBlocksCleared()])
    topic, sequence, payload = await receive(sub)
    assert topic == b"kv"
    assert len(sequence) == 8
    assert payload == msgspec.msgpack.encode([12.5, [{"type": "AllBlocksCleared"}], 0])


async def test_replay_gives_batches_from_a_number_on_and_an_end_mark_always_in_four_frames(
    context, publisher, tmp_path
):
    replay = f"ipc://{tmp_path}/replay"
    made = await publisher(config(endpoint=f"ipc://{tmp_path}/pub", replay_endpoint=replay, buffer_steps=3, topic="t"))
    for _ in range(5):
        made.publish([AllBlocksCleared()])
    whole = await ask(context, replay)
    tail = await ask(context, replay, 4)
    none = await ask(context, replay, 10**6)
    assert {len(message) for message in whole} == {4}
    assert [int.from_bytes(message[2], "big") for message in whole[:-1]] == [2, 3, 4]  # the buffer held three
    assert [int.from_bytes(message[2], "big") for message in tail[:-1]] == [4]
    assert whole[0][:2] == [b"", b"t"]
    assert whole[-1] == none[0] == [b"", b"", END, b""]


async def test_malformed_replay_requests_are_dropped_and_the_next_is_served(context, publisher, tmp_path, caplog):
    replay = f"ipc://{tmp_path}/replay"
    await publisher(config(endpoint=f"ipc://{tmp_path}/pub", replay_endpoint=replay))
    dealer = context.socket(zmq.DEALER)
    dealer.connect(replay)
    for frames in ([b"\0" * 8], [b"", b"\0" * 8, b""], [b"x", b"\0" * 8], [b"", b"\0" * 7]):
        await dealer.send_multipart(frames)
    await dealer.send_multipart([b"", b"\0" * 8])
    assert await receive(dealer) == [b"", b"", END, b""]
    dealer.close(linger=0)
    assert caplog.text.count("invalid replay request") == 4


async def test_a_replay_below_the_high_water_mark_is_whole_and_a_long_one_to_a_stalled_reader_is_cut(
    context, publisher, tmp_path
):
    replay = f"ipc://{tmp_path}/replay"
    made = await publisher(config(endpoint=f"ipc://{tmp_path}/pub", replay_endpoint=replay))
    for _ in range(900):
        made.publish([AllBlocksCleared()])
    answer = await ask(context, replay)
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
    numbers = [int.from_bytes(message[2], "big") for message in got]
    assert numbers == sorted(set(numbers))
    assert len(numbers) < 9901  # the engine's socket silently drops messages beyond its mark


def events(endpoint, replay):
    """Return the flags of an engine that publishes its events."""
    fields = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint, "replay_endpoint": replay}
    return "--kv-events-config", json.dumps(fields)


async def test_each_rank_has_its_own_ports_and_numbers(serve, context, unused_port):
    port = unused_port(4)
    client = await serve("--data-parallel-size", "2", *events(f"tcp://*:{port}", f"tcp://127.0.0.1:{port + 2}"))
    for rank in ("1", "0", "1"):
        await client.post(CHAT, chat_body("word " * 60, max_tokens=20), headers={"X-data-parallel-rank": rank})
    for rank in (0, 1):
        batches = await ask(context, f"tcp://127.0.0.1:{port + 2 + rank}")
        kind = tuple[float, list[BlockStored], int]
        decoded = [msgspec.msgpack.decode(message[3], type=kind) for message in batches[:-1]]
        assert [int.from_bytes(message[2], "big") for message in batches[:-1]] == list(range(len(decoded)))
        assert {place for *_, place in decoded} == {rank}
        stored = [batch for _, batch, _ in decoded]
        assert all(stored)
        # One message for the prompt's blocks, then one for each block that the answer filled.
        assert stored[0][0].parent_block_hash is None
        assert stored[1][0].parent_block_hash == stored[0][-1].block_hashes[-1]
        holds = client.engine.runners[rank].scheduler.pool.contents()
        assert sum(len(event.block_hashes) for batch in stored for event in batch) == sum(holds.values())


async def test_hashes_are_whole_digests_when_the_environment_says_so(serve, context, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")
    replay = f"ipc://{tmp_path}/replay"
    client = await serve(*events(f"ipc://{tmp_path}/pub", replay))
    await client.chat("word " * 60)
    first, *_ = await ask(context, replay)
    (stored,) = msgspec.msgpack.decode(first[3])[1]
    assert stored["block_hashes"] == list(client.engine.runners[0].scheduler.pool.contents())
    assert {len(digest) for digest in stored["block_hashes"]} == {32}


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
    for endpoint in ("tcp://*:5557", "tcp://[::]:5557", "ipc:///x", "inproc://x"):
        assert EventsConfig(endpoint=endpoint).binds, endpoint
    for endpoint in ("tcp://127.0.0.1:5557", "tcp://0.0.0.0:5557", "tcp://host:1"):
        assert not EventsConfig(endpoint=endpoint).binds, endpoint


OURS = bytes(range(32))
IMAGE_TOKEN = 1029  # of the tiny model


def seed(lora, salt):
    return namespace_seed(bytes(32), model="m", lora=lora, salt=salt)


async def test_the_keys_of_a_cache_are_those_of_the_prompts_and_answers_in_it(serve):
    client = await serve("--block-size", "16", "--sim-blocks", "2050")
    expected = set()
    for content, identity, salt in (
        ([text(LONG)], None, None),
        ([text(LONG), image(png(), to_wire(OURS)), text(LONG)], OURS, None),
        ([text(LONG), image(png("blue"), "u-1"), text(LONG)], foreign_identity("u-1"), None),
        ([text(LONG), image(png(), to_wire(OURS))], OURS, "tenant"),
    ):
        fields = {"cache_salt": salt} if salt else {}
        _, reply = await client.chat(content, max_tokens=40, ignore_eos=True, return_token_ids=True, **fields)
        prompt = reply["prompt_token_ids"]
        pads = [place for place, token in enumerate(prompt) if token == IMAGE_TOKEN]
        spans = [Span(pads[0], len(pads), identity)] if identity else []
        ids = array("I", prompt + reply["choices"][0]["token_ids"][:-1])  # the last token is sampled, never computed
        expected |= set(block_keys(ids, 16, spans, seed(None, salt)))
    _, state = await client.get("/sim/cache")
    assert keys_of(state, seed) == {"0": expected}


async def test_evicted_blocks_are_listed_only_as_ancestors(serve):
    client = await serve("--block-size", "16", "--max-model-len", "640", "--sim-blocks", "42")
    for number in range(6):
        await client.chat(f"{number} {LONG}", max_tokens=40, ignore_eos=True)
    _, state = await client.get("/sim/cache")
    held = client.engine.runners[0].scheduler.pool.contents()
    blocks = state["ranks"]["0"]
    assert {bytes.fromhex(block["digest"]) for block in blocks if block["held"]} == set(held)
    assert len(keys_of(state, seed)["0"]) == len(held)
    hung_on = {block["parent"] for block in blocks}
    assert all(block["held"] or place in hung_on for place, block in enumerate(blocks))


async def test_ranks_are_listed_separately(serve):
    client = await serve("--data-parallel-size", "2")
    await client.post(CHAT, chat_body(LONG), headers={"x-data-parallel-rank": "1"})
    _, state = await client.get("/sim/cache")
    held = keys_of(state, seed)
    assert (len(held["0"]), bool(held["1"])) == (0, True)


@pytest.mark.parametrize(
    ("before", "believed", "after", "says"),
    [
        ({1, 2}, {1, 2}, {1, 2}, ""),
        ({1}, {1, 2}, {1, 2}, ""),  # stored meanwhile
        ({1, 2}, {1, 2}, {1}, ""),  # given up meanwhile
        ({1, 2}, {1}, {1, 2}, "rank 0: 1 of 2 held are not known, 0 are not held"),
        ({1}, {1, 2}, {1}, "rank 0: 0 of 1 held are not known, 1 are not held"),
        ({1}, {2}, {1}, "rank 0: 1 of 1 held are not known, 1 are not held"),
        (set(), None, set(), ""),  # a rank that is not in the belief
        ({1}, None, {1}, "rank 0: 1 of 1 held are not known, 0 are not held"),
    ],
)
def test_a_belief_differs_where_it_was_wrong_the_whole_time(before, believed, after, says):
    assert difference({"0": before}, {"0": believed} if believed is not None else {}, {"0": after}) == says
