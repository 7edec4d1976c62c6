"""The core against a real vLLM 0.32: the same requests must cause the same hashes, the same events, the same bytes."""

import base64
import json
from array import array
from collections.abc import Callable, Iterator
from itertools import chain, groupby
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from mmrouter_sim import model
from mmrouter_sim.core.events import AllBlocksCleared, BlockRemoved, BlockStored, VllmDialect, encode_events
from mmrouter_sim.core.requests import Adapter, Media, Request, published_int
from mmrouter_sim.core.scheduler import Limits, Scheduler
from mmrouter_sim.core.step_cost import Cost
from mmrouter_sim.engine import simulated
from mmrouter_sim.vllm import requests
from mmrouter_sim.vllm.completions import prompt_details
from mmrouter_sim.vllm.flags import parse
from mmrouter_sim.vllm.requests import ChatRequest

QWEN_TINY, QWEN, LLAVA, PHI = 364, 151655, 32000, 32044


class Recorded(NamedTuple):
    """One answered request of a capture, with everything that the engine's hashes depend on; none for a reset."""

    label: str
    request: Request | None
    payloads: list[bytes]
    cached_tokens: int | None


def recorded(captures: Path, name: str, pad: int, lora_path: str = "") -> Iterator[Recorded]:
    names: dict[str, str] = {}
    for line in (captures / f"{name}.jsonl").read_text().splitlines():
        step = json.loads(line)
        if step.get("kind") != "step" or step["status"] != 200:
            continue
        body, reply = step["request"]["body"] or {}, step["reply"]
        payloads = [bytes.fromhex(frame["payload"]) for frame in step["frames"]]
        request = None
        if "prompt_token_ids" in reply:
            stored = list(stores(payloads))
            ids, answer = reply["prompt_token_ids"], reply.get("output_token_ids") or []
            lora = stored[0]["lora_name"] if stored else None
            request = Request(
                id=step["label"],
                ids=array("I", ids),
                sample=answer.__getitem__,
                max_tokens=len(answer),
                media=tuple(media_of(ids + answer, stored, pad, image_names(body), names)),
                salt=body.get("cache_salt"),
                lora=Adapter(lora, lora_path) if lora else None,
                report_hits=body.get("vllm_xargs", {}).get("kv_cache_report_mode") == "full",
            )
        elif step["label"] != "reset_prefix_cache":
            continue
        usage = (reply.get("usage") or {}).get("prompt_tokens_details") or {}
        yield Recorded(step["label"], request, payloads, usage.get("cached_tokens"))


def stores(payloads: list[bytes]) -> Iterator[dict[str, Any]]:
    for payload in payloads:
        yield from (event for event in msgspec.msgpack.decode(payload)[1] if event["type"] == "BlockStored")


def image_names(body: dict[str, Any]) -> list[str]:
    """A name per image of a request that is equal exactly when the engine calls the images equal."""
    parts = [p for m in body.get("messages", []) if isinstance(m["content"], list) for p in m["content"]]
    extra = json.dumps([body.get("mm_processor_kwargs"), body.get("media_io_kwargs")])
    return [
        (part.get("uuid") or ((part.get("image_url") or {}).get("url") or {}).get("$image", "")) + extra
        for part in parts
        if part.get("type") == "image_url"
    ]


def media_of(
    ids: list[int], stored: list[dict[str, Any]], pad: int, images: list[str], names: dict[str, str]
) -> Iterator[Media]:
    """Placeholder runs, each with the identifier that the events give it or, when it was a hit, gave it before."""
    known: dict[int, str] = {}
    for event in stored:
        size, tokens, first = event["block_size"], event["token_ids"], event["parent_block_hash"] is None
        start = next(s for s in range(0, len(ids), size) if ids[s : s + len(tokens)] == tokens and (s == 0) == first)
        for number, keys in enumerate(event.get("extra_keys") or []):
            known |= {start + number * size + key[1]: key[0] for key in keys or [] if isinstance(key, list)}
    offset = number = 0
    for is_image, run in groupby(ids, lambda token: token == pad):
        length = len(list(run))
        if is_image:
            name = images[number] if number < len(images) else ""
            names[name] = known.get(offset) or names.get(name) or name.removesuffix(json.dumps([None, None]))
            yield Media(names[name], offset, length)
            number += 1
        offset += length


def test_every_block_of_the_capture_with_an_adapter_and_a_shared_cache_is_rebuilt(captures: Path):
    rebuilt = 0
    for label, whole, payloads, _ in recorded(captures, "qwen2vl_kvshare_lora", QWEN_TINY, "adapters/l1"):
        whole.ids.extend(whole.sample(n) for n in range(whole.max_tokens))
        dialect = VllmDialect(32, hash_seed="vllm-none-hash")
        dialect.extend(whole)
        parents = [None, *whole.digests]
        keys = dialect.stored(whole, 0, len(whole.digests)).extra_keys
        for event in stores(payloads):
            as_published = bytes if isinstance(event["block_hashes"][0], bytes) else published_int
            numbers = {as_published(digest): number for number, digest in enumerate(whole.digests)}
            parent = event["parent_block_hash"]
            for position, digest in enumerate(event["block_hashes"]):
                number = numbers[digest]
                before = parents[number]
                assert parent == (None if before is None else as_published(before)), label
                tokens = event["token_ids"][position * 32 : (position + 1) * 32]
                assert tokens == list(whole.ids[number * 32 : (number + 1) * 32]), label
                assert event["extra_keys"][position] == keys[number], label
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
    captures: Path, names: tuple[str, ...], pad: int, blocks: int, form: Callable, largest: int
):
    limits = Limits(blocks=blocks, block_size=32, max_model_len=min((blocks - 1) * 32, 8192), largest_image=largest)
    engine = Scheduler(limits, cost=Cost(), dialect=VllmDialect(32, published=form, hash_seed="vllm-none-hash"))
    for label, request, expected, cached_tokens in chain(*(recorded(captures, name, pad) for name in names)):
        if request is None:
            assert engine.reset(), label
            continue
        engine.add(request)
        payloads = []
        while request.finished is None:
            plan = engine.schedule()
            _, events = engine.complete(plan)
            if events:
                sent, _, rank = msgspec.msgpack.decode(expected[min(len(payloads), len(expected) - 1)])
                payloads.append(encode_events(sent, events, rank))
        assert payloads == expected, label
        assert cached_tokens in (None, request.cached_tokens), label


def test_every_captured_frame_encodes_to_the_same_bytes_after_decoding(captures: Path):
    frames, batch = 0, tuple[float, list[BlockStored | BlockRemoved | AllBlocksCleared], int]
    for path in sorted(captures.glob("*.jsonl")):
        for line in path.read_text().splitlines():
            for frame in json.loads(line).get("frames", []):
                payload = bytes.fromhex(frame["payload"])
                assert encode_events(*msgspec.msgpack.decode(payload, type=batch)) == payload
                frames += 1
    assert frames > 100


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
    engine = simulated(settings, loaded)
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
