"""The simulated vLLM's endpoints for token ids."""

import json

import pytest
from unit.sim.conftest import CHAT, LONG, chat_body, image, png, text

RENDER, GENERATE = f"{CHAT}/render", "/inference/v1/generate"


@pytest.mark.parametrize("sent", [0, 1, 7])
async def test_tokens_behind_a_rendered_prompt_continue_its_answer(serve, sent):
    client = await serve("--enable-scale-out")
    body = chat_body([text(LONG), image(png(), "u-1")], max_tokens=30, ignore_eos=True)
    _, whole = await client.post(CHAT, body | {"return_token_ids": True})
    answer = whole["choices"][0]["token_ids"]
    status, rendered = await client.post(RENDER, body | {"stream": True, "stream_options": {"include_usage": True}})
    assert (status, rendered["token_ids"]) == (200, whole["prompt_token_ids"])
    rendered["token_ids"] += answer[:sent]
    rendered["sampling_params"]["max_tokens"] -= sent
    *steps, last = await client.stream(GENERATE, rendered | {"output_mode": "text"})
    assert [token for step in steps for token in step["choices"][0]["token_ids"]] == answer[sent:]
    assert steps[-1]["choices"][0]["finish_reason"] == "length"
    _, detokenized = await client.post("/detokenize", {"tokens": answer[sent:]})
    assert "".join(step["choices"][0]["text"] for step in steps) == detokenized["prompt"]
    prompt = whole["usage"]["prompt_tokens"]
    assert (last["usage"]["prompt_tokens"], last["usage"]["completion_tokens"]) == (prompt + sent, 30 - sent)


async def test_the_endpoints_are_closed_without_their_flag(serve):
    client = await serve()
    for path, body in ((RENDER, chat_body(LONG)), (GENERATE, json.dumps({}).encode())):
        assert (await client.post(path, body))[0] == 403
