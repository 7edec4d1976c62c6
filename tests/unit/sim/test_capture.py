"""The core against a real vLLM 0.32: the same requests must cause the same hashes, the same events, the same bytes."""

import base64
import json
from array import array
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from mmrouter_sim import model
from mmrouter_sim.core.events import AllBlocksCleared, BlockRemoved, BlockStored, VllmDialect, encode_events
from mmrouter_sim.core.requests import Request, published_int, published_keys
from mmrouter_sim.core.scheduler import Limits, Scheduler
from mmrouter_sim.core.step_cost import Cost
from mmrouter_sim.engine import SimulatedEngine
from mmrouter_sim.vllm import requests
from mmrouter_sim.vllm.completions import prompt_details
from mmrouter_sim.vllm.flags import parse
from mmrouter_sim.vllm.requests import ChatRequest

QWEN_TINY, QWEN, LLAVA, PHI = 364, 151655, 32000, 32044


def request_of(step, number=0):
    ids = array("I", step.prompt)
    return Request(
        id=str(number),
        ids=ids,
        sample=lambda n: step.answer[n],
        max_tokens=len(step.answer),
        media=step.media,
        salt=step.salt,
        lora=step.lora,
        report_hits=step.report_hits,
    )


def test_every_block_of_the_capture_with_an_adapter_and_a_shared_cache_is_rebuilt(recorded: Callable):
    rebuilt = 0
    for step in recorded("qwen2vl_kvshare_lora", QWEN_TINY, "adapters/l1"):
        whole = request_of(step)
        whole.ids.extend(step.answer)
        dialect = VllmDialect(32, hash_seed="vllm-none-hash")
        dialect.extend(whole)
        parents = [None, *whole.digests]
        keys = dialect.stored(whole, 0, len(whole.digests)).extra_keys
        for event in step.events:
            if event["type"] != "BlockStored":
                continue
            as_published = bytes if isinstance(event["block_hashes"][0], bytes) else published_int
            numbers = {as_published(digest): number for number, digest in enumerate(whole.digests)}
            parent = event["parent_block_hash"]
            for position, digest in enumerate(event["block_hashes"]):
                number = numbers[digest]
                before = parents[number]
                assert parent == (None if before is None else as_published(before)), step.label
                tokens = event["token_ids"][position * 32 : (position + 1) * 32]
                assert tokens == list(whole.ids[number * 32 : (number + 1) * 32]), step.label
                assert event["extra_keys"][position] == keys[number], step.label
                parent = digest
                rebuilt += 1
    assert rebuilt == 16


# What each engine was started with beyond the common flags (captures README). The evict and kwargs captures are one
# engine's life, one after the other; the shared-cache capture loads blocks from elsewhere, so its engine B is not
# replayed.
LIVES = [
    (("qwen2vl_core_uuid_clear",), QWEN_TINY, 4096, published_int, 0),
    (("qwen2vl_evict_byteshash", "qwen2vl_kwargs_byteshash"), QWEN_TINY, 24, bytes, 16384),
    (("qwen2vl-real",), QWEN, 4096, published_int, 16384),
    (("qwen3vl-real",), QWEN, 4096, published_int, 16384),
    (("llava15-real",), LLAVA, 4096, published_int, 576),
    (("llavanext-real",), LLAVA, 4096, published_int, 2928),
    (("phi3v-nosw",), PHI, 4096, published_int, 2509),
]


@pytest.mark.parametrize(("names", "pad", "blocks", "form", "largest"), LIVES)
def test_a_captured_engine_and_ours_publish_the_same_bytes(
    recorded: Callable, names: tuple[str, ...], pad: int, blocks: int, form: Callable, largest: int
):
    limits = Limits(blocks=blocks, block_size=32, max_model_len=min((blocks - 1) * 32, 8192), largest_image=largest)
    engine = Scheduler(limits, cost=Cost(), dialect=VllmDialect(32, published=form, hash_seed="vllm-none-hash"))
    for number, step in enumerate(step for name in names for step in recorded(name, pad)):
        if not step.prompt:
            assert engine.reset(), step.label
            continue
        request = request_of(step, number)
        engine.add(request)
        payloads = []
        while request.finished is None:
            plan = engine.schedule()
            _, events = engine.complete(plan)
            if events:
                sent, _, rank = msgspec.msgpack.decode(step.payloads[min(len(payloads), len(step.payloads) - 1)])
                payloads.append(encode_events(sent, events, rank))
        assert payloads == list(step.payloads), step.label
        if step.cached_tokens is not None:
            assert request.cached_tokens == step.cached_tokens, step.label


def test_every_captured_frame_encodes_to_the_same_bytes_after_decoding(captures: Path):
    frames, batch = 0, tuple[float, list[BlockStored | BlockRemoved | AllBlocksCleared], int]
    for path in sorted(captures.glob("*.jsonl")):
        for line in path.read_text().splitlines():
            for frame in json.loads(line).get("frames", []):
                payload = bytes.fromhex(frame["payload"])
                assert encode_events(*msgspec.msgpack.decode(payload, type=batch)) == payload
                frames += 1
    assert frames > 100


def test_extra_keys_are_tagged_in_the_hash_and_bare_in_the_event():
    assert published_keys((("mm", "u-1", -2), ("cache_salt", "tenant-1"))) == [["u-1", -2], "tenant-1"]
    assert published_keys((("lora", "l1", "adapters/l1"),)) == ["l1"]
    assert published_keys(()) is None


def inline(value, images):
    """Put the captured images back into a request body."""
    if isinstance(value, dict):
        if "$image" in value:
            return "data:image/png;base64," + base64.b64encode((images / value["$image"]).read_bytes()).decode()
        return {key: inline(part, images) for key, part in value.items()}
    return [inline(part, images) for part in value] if isinstance(value, list) else value


@pytest.mark.parametrize(
    ("capture", "folder"),
    [("qwen2vl-real", "Qwen--Qwen2-VL-2B-Instruct"), ("qwen3vl-real", "Qwen--Qwen3-VL-2B-Instruct")],
)
def test_captured_requests_give_the_captured_ids_usage_and_bytes(captures, models, capture, folder):
    settings = parse(["serve", f"models/{capture}", "--block-size", "32", "--prefix-caching-hash-algo", "sha256_cbor"])
    loaded = model.load(settings.model, models / folder, chat_template=None, processor={})
    engine = SimulatedEngine(settings, loaded)
    rank = engine.runners[0].scheduler
    steps = [json.loads(line) for line in (captures / f"{capture}.jsonl").read_text().splitlines()]
    compared = 0
    for step in steps:
        if step["kind"] != "step":
            continue
        body = inline(step["request"]["body"], captures / "images")
        prompt = requests.from_messages(engine, msgspec.convert(body, ChatRequest))
        assert prompt.ids.tolist() == step["reply"]["prompt_token_ids"], step["label"]
        answer = step["reply"]["output_token_ids"]
        request = Request(str(compared), prompt.ids, answer.__getitem__, len(answer), prompt.media)
        rank.add(request)
        payloads = []
        while request.finished is None:
            _, events = rank.complete(rank.schedule())
            if events:
                sent = msgspec.msgpack.decode(bytes.fromhex(step["frames"][len(payloads)]["payload"]))[0]
                payloads.append(encode_events(sent, events, 0).hex())
        assert payloads == [frame["payload"] for frame in step["frames"]], step["label"]
        details = step["reply"]["usage"]["prompt_tokens_details"]
        assert prompt_details(settings, request, prompt) == details, step["label"]
        compared += 1
    assert compared == 8
