"""The simulated SGLang against what a real 0.5.23 published, and its HTTP side over loopback."""

import hashlib
import json
from array import array
from pathlib import Path

import msgspec
import pytest
from unit.conftest import shared_folder
from unit.engines.sglang_pages import page_hashes
from unit.sim.conftest import CHAT, LONG, cached_tokens, chat_body, image, png, text
from unit.sim.test_events import ask

from mmrouter_lib.engines.base.adapter import RankLoad
from mmrouter_lib.engines.base.events import Cleared
from mmrouter_lib.engines.sglang.adapter import parse_info, parse_load
from mmrouter_lib.engines.sglang.events import decode_batch
from mmrouter_lib.engines.sglang.identity import Fingerprint, artifact_hash_of, run_ids, sentinels
from mmrouter_sim.core.events import encode_events
from mmrouter_sim.core.requests import Request
from mmrouter_sim.core.scheduler import Limits, Scheduler
from mmrouter_sim.core.step_cost import Cost
from mmrouter_sim.sglang.flags import parse
from mmrouter_sim.sglang.pages import (
    PROCESSOR,
    TRANSFORMERS,
    WRAPPERS,
    SglangDialect,
    by_bytes,
    fingerprint,
    padded,
    page,
    published,
    root,
)
from mmrouter_sim.sglang.pages import sentinels as sentinels_of

U64 = (1 << 64) - 1


@pytest.fixture(scope="module")
def captures() -> Path:
    return shared_folder("MMROUTER_CAPTURES", "captures/sglang")


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def wire(row):
    return [event for frame in row["frames"] if isinstance(frame["decoded"], list) for event in frame["decoded"][1]]


@pytest.mark.parametrize(("name", "count"), [("qwen2_vl.page1.jsonl", 5933), ("qwen3_vl.page4.jsonl", 1459)])
def test_every_published_hash_of_a_capture_is_rebuilt(captures, name, count):
    digests, rebuilt = {}, 0
    for row in rows(captures / name):
        for event in wire(row):
            if event["type"] != "BlockStored":
                continue
            parent, size = event["parent_block_hash"], event["block_size"]
            digest = root(event.get("cache_salt")) if parent is None else digests[parent]
            for number, expected in enumerate(event["block_hashes"]):
                digest = page(digest, array("Q", event["token_ids"][number * size : (number + 1) * size]))
                assert published(digest) == expected
                digests[expected] = digest
                rebuilt += 1
    assert rebuilt == count


def test_items_salts_and_padding_are_the_engines(captures):
    for line in rows(captures / "offline.jsonl"):
        match line:
            case {"kind": "feature_hash", "item_hash_hex": item, "pad_values": values}:
                assert list(sentinels_of(int(item, 16))) == values
            case {"kind": "padding", "input_ids": ids, "padded": out}:
                assert padded(ids, [(0xAA, 3, 6), (0xBB, 12, 3)]).tolist() == out


def test_the_core_publishes_the_captured_events(captures):
    """Five requests in a row: the same events, and the same tokens from the cache."""
    captured = {row["case"]: row for row in rows(captures / "qwen3_vl.page4.jsonl")}
    answer = captured["chat_A"]["reply"]["body"]
    ids = answer["choices"][0]["prompt_token_ids"]
    a, b = ([token for token in _tokens(captured[case]) if token >= 1_000_000][:4] for case in ("chat_A", "chat_B"))
    start, length = ids.index(403), ids.count(403)

    def filled(values):
        return [*ids[:start], *(values * length)[:length], *ids[start + length :]]

    both = [*filled(a)[:16], *_tokens(captured["chat_A_B"]), 5, 6]
    scheduler = Scheduler(
        Limits(blocks=1025, block_size=4, max_model_len=2048), cost=Cost(speed=1e6), dialect=SglangDialect(4)
    )
    for case, prompt in (
        ("text_ids", list(range(100, 122))),
        ("text_ids_salt", list(range(100, 122))),
        ("chat_A", filled(a)),
        ("chat_A_again", filled(a)),
        ("chat_B", filled(b)),
        ("chat_A_B", both),
    ):
        request = Request(case, array("Q", prompt), lambda _: 7, 2, salt="tenant-a" if case.endswith("salt") else None)
        scheduler.add(request)
        events = _run(scheduler)
        ours = [{**event, "session_id": None} for event in msgspec.msgpack.decode(encode_events(0, events, 0))[1]]
        assert ours == [{**event, "session_id": None} for event in wire(captured[case])], case
        body = captured[case]["reply"]["body"]
        details = body["usage"]["prompt_tokens_details"] if "usage" in body else body["meta_info"]
        assert request.cached_tokens == details["cached_tokens"], case


def _tokens(row):
    return [token for event in wire(row) for token in event.get("token_ids", ())]


def _run(scheduler):
    events = []
    while not scheduler.idle:
        events += scheduler.complete(scheduler.schedule())[1]
    return events + scheduler.news()


def test_a_page_is_held_once_and_answers_are_found_when_they_end():
    scheduler = Scheduler(Limits(blocks=65, block_size=4, max_model_len=200), dialect=SglangDialect(4))
    twins = [Request(str(n), array("Q", range(1, 9)), lambda _: 9, 9) for n in range(2)]
    for twin in twins:
        scheduler.add(twin)
    events = _run(scheduler)
    hashes = [number for event in events for number in event.block_hashes]
    assert len(hashes) == len(set(hashes)) == 4  # two of the prompt, two of the answer, of two equal requests
    assert hashes == [
        number - (1 << 64) if number >> 63 else number for number in page_hashes([*range(1, 9), *[9] * 8], 4)
    ]
    assert all(copies == 1 for copies in scheduler.pool.contents().values())


def test_two_implementations_of_the_artifact_path_agree():
    theirs = Fingerprint(
        transformers=TRANSFORMERS,
        processor_class=PROCESSOR,
        wrapper_class=WRAPPERS["qwen3_vl"],
        model_type="qwen3_vl",
        architectures=("Qwen3VLForConditionalGeneration",),
        revision="main",
        mm_process_config={"image": {"max_pixels": 7}},
    )
    own = fingerprint("qwen3_vl", ["Qwen3VLForConditionalGeneration"], "main", {"image": {"max_pixels": 7}})
    assert own == theirs.digest()
    for options in ({}, {"detail": "high", "max_dynamic_patch": 3}):
        assert by_bytes(b"some bytes", own, options) == artifact_hash_of(
            hashlib.sha256(b"some bytes").hexdigest(), theirs, options
        )


async def test_an_answer_has_the_engines_fields_and_honest_usage(serve_sglang):
    client = await serve_sglang()
    content = [text(LONG), image(png())]
    status, reply = await client.chat(content, return_prompt_token_ids=True)
    assert status == 200
    choice, usage = reply["choices"][0], reply["usage"]
    assert (choice["finish_reason"], choice["matched_stop"]) == ("length", None)
    assert usage["prompt_tokens"] == len(choice["prompt_token_ids"])
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0, "image_tokens": 12}
    chunks = await client.stream(CHAT, chat_body(content, stream_options={"include_usage": True}))
    streamed = "".join(chunk["choices"][0]["delta"]["content"] or "" for chunk in chunks if chunk["choices"])
    assert streamed == choice["message"]["content"]
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    cached = (usage["prompt_tokens"] - 1) // 16 * 16
    assert chunks[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": cached, "image_tokens": 12}


@pytest.mark.parametrize(("flags", "same"), [((), True), (("--mm-preprocess-cache-size-mb", "64"), False)])
async def test_the_flag_decides_whether_bytes_or_pixels_name_an_image(serve_sglang, flags, same):
    client = await serve_sglang(*flags)
    for data in (png(), png(kind="BMP"), png("blue")):
        _, reply = await client.chat([image(data), text(LONG)])
        cached = cached_tokens(reply)
        assert cached == (0 if data[:2] != b"BM" or not same else (reply["usage"]["prompt_tokens"] - 1) // 16 * 16)


async def replayed(context, endpoint):
    """Return all the events that an engine still has, as the sidecar reads them."""
    messages = await ask(context, endpoint)
    return [event for message in messages[:-1] for event in decode_batch(message[-1]).events]


async def test_events_hold_sentinels_that_the_router_can_compute(serve_sglang, context, unused_port):
    port = unused_port(2)
    replay = f"tcp://127.0.0.1:{port + 1}"
    config = {"publisher": "zmq", "endpoint": f"tcp://127.0.0.1:{port}", "replay_endpoint": replay}
    client = await serve_sglang("--kv-events-config", json.dumps(config), "--mm-preprocess-cache-size-mb", "64")
    status, info = await client.get("/server_info")
    assert (status, info["kv_events"]["block_size"], info["kv_events"]["endpoint_port_base"]) == (200, 16, port)
    _, model = await client.get("/model_info")
    parsed = parse_info([info, model])
    assert parsed is not None
    facts = parsed.facts
    assert (facts["version"], facts["model_type"]) == ("0.5.23", "qwen2_vl")
    data = png()
    _, reply = await client.chat(
        [text(LONG), image(data)], return_prompt_token_ids=True, cache_salt="tenant", max_tokens=1
    )
    ids = array("Q", reply["choices"][0]["prompt_token_ids"])
    pad = client.engine.model.family.placeholder_id
    start, length = ids.index(pad), ids.count(pad)
    item = artifact_hash_of(hashlib.sha256(data).hexdigest(), client.engine.fingerprint, {})
    ids[start : start + length] = run_ids(sentinels(item, legacy=False), length)
    empty, event = await replayed(context, replay)
    assert empty == Cleared()
    assert event.salt == "tenant"
    assert event.ids == ids[: len(event.ids)]
    assert list(event.hashes) == page_hashes(ids, 16, cache_salt="tenant").tolist()


async def test_probes_and_metrics_are_open_and_the_rest_wants_the_key(serve_sglang):
    client = await serve_sglang("--api-key", "k", "--dp", "2")
    for path in ("/ready", "/health", "/metrics"):
        assert (await client.get(path))[0] == 200
    for path in ("/server_info", "/v1/models"):
        assert await client.get(path) == (401, {"error": "Unauthorized"})
        assert (await client.get(path, headers={"authorization": "Bearer k"}))[0] == 200
    _, page = await client.get("/metrics")
    assert parse_load(page) == {0: RankLoad(), 1: RankLoad()}
    client.engine.draining = True
    assert (await client.get("/ready"))[0] == 503
    assert (await client.post(CHAT, chat_body("hi"), headers={"authorization": "Bearer k"}))[0] == 200


async def test_errors_have_the_engines_shape(serve_sglang):
    client = await serve_sglang("--mm-preprocess-cache-size-mb", "64", "--limit-mm-data-per-request", '{"image":1}')
    other = image(png(), content_hash="sha256:" + "0" * 64)
    for images, message in (
        ([other], "content hash mismatch for media_data[0]: expected sha256:0000"),
        ([image(png()), image(png())], "Image count 2 exceeds limit 1 per request."),
        ([image(b"no image")], "Could not decode image"),
    ):
        status, wrong = await client.chat(images)
        assert (status, wrong["object"], wrong["type"], wrong["param"]) == (400, "error", "BadRequestError", None)
        assert wrong["message"].startswith(message)
    status, same = await client.chat("hi", mm_hashes=["00"])
    assert status == 200
    assert same["choices"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--no-such-flag"], "unrecognized arguments"),
        (["--kv-events-config", '{"publisher": "zmq", "steps": 1}'], "steps"),
        (["--kv-events-config", '{"format": "dynamo"}'], "dynamo"),
        (["--dp", "0"], "at least 1"),
    ],
)
def test_a_wrong_flag_ends_the_command(tiny, capsys, flags, message):
    with pytest.raises(SystemExit) as caught:
        parse(["serve", "--model-path", str(tiny), *flags])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err
