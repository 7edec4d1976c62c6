"""Fuzzing of request bodies: the result is a checked request or a :class:`RequestError`."""

import copy
import json
import random
from functools import partial

import orjson
import pytest
from campaign.mutation import places
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mmrouter_lib.engines.vllm.harmony_responses import chat_of
from mmrouter_router.core.errors import RequestError
from mmrouter_router.intake import Limits, json_body, parse_chat, parse_completion, parse_forwarded, parse_responses
from mmrouter_router.intake.json_body import depth, parse_object, text_depth

parse_for_gpt_oss = partial(parse_responses, chat_of=chat_of)
LIMITS = Limits(max_request_bytes=1 << 20, max_images=8)

CALLED = {"name": "f", "arguments": "{}"}
CONTENT = [
    {"type": "text", "text": "look"},
    {"type": "image_url", "image_url": {"url": "data:,a", "detail": "low"}, "uuid": "u"},
    {"type": "input_image", "image_url": "data:,b"},
    {"type": "video_url", "video_url": {"url": "http://a.example/"}},
    {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
    {"type": "refusal", "refusal": "no"},
]
CHAT = {
    "model": "demo",
    "messages": [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": CONTENT},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "function": CALLED}]},
        {"role": "tool", "tool_call_id": "c", "content": "42"},
    ],
    "tools": [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}],
    "documents": [{"title": "t"}],
    "chat_template_kwargs": {"enable_thinking": True},
    "vllm_xargs": {"a": 1},
    "stream": True,
    "max_tokens": 5,
    "reasoning_effort": "low",
    "add_generation_prompt": True,
}
COMPLETION = {
    "model": "demo",
    "prompt": [[1, 2], [3]],
    "add_special_tokens": True,
    "vllm_xargs": {"a": 1},
    "stream": True,
    "max_tokens": 5,
    "echo": False,
}
RESPONSES = {
    "model": "demo",
    "instructions": "be brief",
    "input": [
        {"role": "user", "content": [{"type": "input_image", "image_url": "data:,a", "uuid": "u", "file_id": None}]},
        {"type": "computer_call_output", "output": {"image_url": {"url": "data:,b"}}},
    ],
    "previous_input_messages": [{"content": [{"type": "input_image", "image_url": "data:,c"}]}],
    "prompt_cache_key": "k",
    "stream": False,
    "max_output_tokens": 3,
}
ITEMS = {
    "model": "demo",
    "instructions": "be brief",
    "input": [
        {"role": "user", "content": [{"type": "input_image", "image_url": "data:,a"}]},
        {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "y"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_image", "image_url": "data:,b"}]},
    ],
    "tools": [{"type": "function", "name": "f", "parameters": {}}],
    "reasoning": {"effort": "low"},
    "text": {"format": {"type": "json_schema", "name": "n", "schema": {}}},
    "include": ["message.output_text.logprobs"],
    "max_output_tokens": 3,
}
HARMONY_ITEMS = ITEMS | {"vllm_xargs": {"a": 1}, "truncation": "disabled"}
ODD = [None, True, False, 0, -1, 2**70, 1.5, "", "x", "text", "image_url", "\ud800", [], {}, [[]], [{}], {"url": "x"}]
NAMES = ["type", "role", "content", "image_url", "url", "uuid", "image_embeds", "file_url", "tool_calls", "new"]


def mutated(body, seed):
    """A copy of a request in which one to three values are replaced, removed, moved or added."""
    chance = random.Random(seed)
    body = copy.deepcopy(body)
    for _ in range(chance.randint(1, 3)):
        holder, key = chance.choice(list(places(body)))
        step = chance.randrange(4)
        if step == 0:
            del holder[key]
        elif step == 1 and isinstance(holder, dict):
            holder[chance.choice(NAMES)] = copy.deepcopy(chance.choice(ODD))
        elif step == 2:
            other, place = chance.choice(list(places(CHAT)))
            holder[key] = copy.deepcopy(other[place])
        else:
            holder[key] = copy.deepcopy(chance.choice(ODD))
        if not body:
            break
    return body


def outcome(parse, raw):
    """Return the request, ``None`` where it is properly refused."""
    try:
        return parse(raw, LIMITS, "demo")
    except RequestError as error:
        refusal = error
    assert 400 <= refusal.status < 500
    assert json.loads(refusal.to_body())["error"]["message"]
    return None


@pytest.mark.parametrize(
    ("parse", "body"),
    [
        (parse_chat, CHAT),
        (parse_forwarded, RESPONSES),
        (parse_completion, COMPLETION),
        (parse_responses, ITEMS),
        (parse_for_gpt_oss, HARMONY_ITEMS),
    ],
)
def test_mutated_requests_are_accepted_or_refused(parse, body):
    read = 0
    for seed in range(500):
        raw = json.dumps(mutated(body, seed)).encode()
        try:
            request = outcome(parse, raw)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {raw.decode()}") from error
        if request is None:
            continue
        read += 1
        orjson.dumps(request.body)
        for image in request.images:
            part = request.messages[image.message]["content"][image.part]
            assert (part["type"], part["image_url"]) == ("image_url", {"url": image.url}), seed
        assert all(part.holder[part.key] == "" for part in request.media), seed
        if request.endpoint == "/v1/responses":
            prompts = {
                name: request.body[name] for name in ("input", "previous_input_messages") if name in request.body
            }
            for holder, key in places(prompts):
                if key in ("image_url", "video_url", "audio_url"):
                    value = holder[key]
                    assert not (value.get("url") if isinstance(value, dict) else value), seed
    assert 30 < read < 450


NUMBERS = st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False)
SCALARS = st.none() | st.booleans() | NUMBERS | st.text()
JSON = st.recursive(
    SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(NAMES), inner), max_leaves=8
)


@pytest.mark.parametrize("parse", [parse_chat, parse_forwarded, parse_completion, parse_responses])
@settings(max_examples=25, deadline=None)
@given(raw=st.binary(max_size=60) | JSON.map(lambda value: json.dumps(value).encode()))
@example(raw=b'{"model":"demo","messages":' + b"[" * 100_000)
@example(raw=b'{"model":"demo","messages":"' + b'\\"' * 100_000)
@example(raw=b'{"model":"demo","input":{"image_url":{"url":"x"}}}')
def test_any_bytes_are_accepted_or_refused(parse, raw):
    outcome(parse, raw)


@settings(max_examples=30, deadline=None)
@given(JSON)
def test_depth_is_the_number_of_nested_containers(value):
    def recursive(item):
        if isinstance(item, dict | list):
            return 1 + max((recursive(i) for i in (item.values() if isinstance(item, dict) else item)), default=0)
        return 0

    assert depth(value) == text_depth(json.dumps(value)) == recursive(value)


@given(JSON | st.text('[]{}"\\a', max_size=30), st.integers(1, 9))
def test_the_depth_of_a_text_does_not_depend_on_where_it_is_cut(value, size):
    given_text = value if isinstance(value, str) else json.dumps(value)
    whole = text_depth(given_text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_body, "_PIECE", size)
        assert text_depth(given_text) == whole


@settings(max_examples=25, deadline=None)
@given(st.dictionaries(st.text(), JSON, max_size=3))
def test_body_within_limits_is_parsed_like_json(body):
    raw = json.dumps(body).encode()
    assert parse_object(raw, 1 << 20) == orjson.loads(raw)
