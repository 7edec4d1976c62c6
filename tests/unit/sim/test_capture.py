"""The core against a real vLLM 0.32: the same requests must cause the same hashes, the same events, the same bytes."""

import json
from array import array
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from mmrouter_sim.core.events import EventBatch, encode
from mmrouter_sim.core.hashing import first_parent, published_bytes, published_int, published_keys, sha256_cbor
from mmrouter_sim.core.request import Chain, Request
from mmrouter_sim.core.scheduler import Limits, Scheduler
from mmrouter_sim.core.step_cost import Cost

QWEN_TINY, QWEN, LLAVA, PHI = 364, 151655, 32000, 32044

BLOCKS = [
    ("qwen2vl_core_uuid_clear", QWEN_TINY, 87),
    ("qwen2vl_evict_byteshash", QWEN_TINY, 30),
    ("qwen2vl_kwargs_byteshash", QWEN_TINY, 16),
    ("qwen2vl_kvshare_lora", QWEN_TINY, 16),
    ("qwen2vl-real", QWEN, 23),
    ("qwen3vl-real", QWEN, 20),
    ("llava15-real", LLAVA, 128),
    ("llavanext-real", LLAVA, 279),
    ("phi3v-nosw", PHI, 320),
]


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


@pytest.mark.parametrize(("name", "pad", "count"), BLOCKS)
def test_every_block_of_a_capture_is_rebuilt(recorded: Callable, name: str, pad: int, count: int):
    rebuilt = 0
    for step in recorded(name, pad, "adapters/l1"):
        whole = request_of(step)
        whole.ids.extend(step.answer)
        chain = Chain(sha256_cbor, first_parent(sha256_cbor, "vllm-none-hash"), 32)
        chain.extend(whole)
        parents = [None, *whole.digests]
        keys = chain.published(whole, 0, len(whole.digests))
        for event in step.events:
            if event["type"] != "BlockStored":
                continue
            as_published = published_bytes if isinstance(event["block_hashes"][0], bytes) else published_int
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
    assert rebuilt == count


# What each engine was started with beyond the common flags (captures README). The evict and kwargs captures are one
# engine's life, one after the other; the shared-cache capture loads blocks from elsewhere, so its engine B is not
# replayed.
LIVES = [
    (("qwen2vl_core_uuid_clear",), QWEN_TINY, 4096, published_int, 0),
    (("qwen2vl_evict_byteshash", "qwen2vl_kwargs_byteshash"), QWEN_TINY, 24, published_bytes, 16384),
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
    engine = Scheduler(limits, cost=Cost(), published=form, hash_seed="vllm-none-hash")
    for number, step in enumerate(step for name in names for step in recorded(name, pad)):
        if not step.prompt:
            assert engine.reset(), step.label
            continue
        request = request_of(step, number)
        engine.add(request)
        payloads = []
        while request.finished is None:
            plan = engine.schedule(0.0)
            _, events = engine.complete(plan, 0.0)
            if events:
                sent, _, rank = msgspec.msgpack.decode(step.payloads[min(len(payloads), len(step.payloads) - 1)])
                payloads.append(encode(EventBatch(sent, events, rank)))
        assert payloads == list(step.payloads), step.label
        if step.cached_tokens is not None:
            assert request.cached_tokens == step.cached_tokens, step.label


def test_every_captured_frame_encodes_to_the_same_bytes_after_decoding(captures: Path):
    frames = 0
    for path in sorted(captures.glob("*.jsonl")):
        for line in path.read_text().splitlines():
            for frame in json.loads(line).get("frames", []):
                payload = bytes.fromhex(frame["payload"])
                assert encode(msgspec.msgpack.decode(payload, type=EventBatch)) == payload
                frames += 1
    assert frames > 100


def test_extra_keys_are_tagged_in_the_hash_and_bare_in_the_event():
    assert published_keys((("mm", "u-1", -2), ("cache_salt", "tenant-1"))) == [["u-1", -2], "tenant-1"]
    assert published_keys((("lora", "l1", "adapters/l1"),)) == ["l1"]
    assert published_keys(()) is None
