"""The whole way of a request against a real vLLM 0.32: the same bodies, the same ids, usage and event bytes."""

import base64
import json

import msgspec
import pytest

from mmrouter_sim import model
from mmrouter_sim.core.events import EventBatch, encode
from mmrouter_sim.core.request import Request
from mmrouter_sim.engine import SimulatedEngine
from mmrouter_sim.vllm import prompts
from mmrouter_sim.vllm.completions import prompt_details
from mmrouter_sim.vllm.flags import parse
from mmrouter_sim.vllm.schema import ChatRequest


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
        prompt = prompts.from_messages(engine, msgspec.convert(body, ChatRequest), body["messages"], special=False)
        assert prompt.ids.tolist() == step["reply"]["prompt_token_ids"], step["label"]
        said = step["reply"]["output_token_ids"]
        request = Request(str(compared), prompt.ids, said.__getitem__, len(said), prompt.media)
        rank.add(request)
        payloads = []
        while request.finished is None:
            _, events = rank.complete(rank.schedule(0.0), 0.0)
            if events:
                sent = msgspec.msgpack.decode(bytes.fromhex(step["frames"][len(payloads)]["payload"]))[0]
                payloads.append(encode(EventBatch(sent, events, 0)).hex())
        assert payloads == [frame["payload"] for frame in step["frames"]], step["label"]
        details = step["reply"]["usage"]["prompt_tokens_details"]
        assert prompt_details(settings, request, prompt) == details, step["label"]
        compared += 1
    assert compared == 8
