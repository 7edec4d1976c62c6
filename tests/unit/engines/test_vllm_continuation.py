"""Continuing a chat at vLLM's tokens-in endpoint: which requests, which ids, and what the client gets of it."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmrouter_lib.engines.base.continuation import ContinuationError
from mmrouter_lib.engines.vllm.continuation import applies, as_chunk, build, ends_whole, strip

BASE = {"model": "m", "messages": [], "stream": True, "temperature": 0.7}
JSON = st.recursive(
    st.none() | st.integers() | st.text(max_size=20) | st.just('"token_ids":[1]') | st.just('x,"token_ids":null'),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('abc"\\,', max_size=8), inner, max_size=3),
    max_leaves=8,
)


def compact(value) -> bytes:
    """As engines write JSON."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


@given(JSON, st.lists(st.integers(0, 200_000), max_size=4) | st.none(), st.lists(st.integers(0, 9), max_size=4))
def test_only_the_ids_are_stripped(content, ids, prompt):
    chunk = {"id": "x", "choices": [{"delta": content, "finish_reason": None}]}
    reporting = {"id": "x", "choices": [{"delta": content, "finish_reason": None, "token_ids": ids}]}
    assert strip(compact(reporting | {"prompt_token_ids": prompt})) == compact(chunk)


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 2},
        {"stop": ["end"]},
        {"stop": "end"},
        {"tools": [{"type": "function"}]},
        {"tool_choice": "auto"},
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"regex": "a"}},
        {"presence_penalty": 0.1},
        {"frequency_penalty": -1},
        {"logprobs": True},
        {"return_token_ids": True},
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        {"stream_options": []},
        {"thinking_token_budget": 5},
        {"a_field_of_a_later_release": 1},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_what_depends_on_where_the_answer_begins_is_not_continued(fields):
    assert applies(BASE)
    assert not applies(BASE | fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 1, "stop": None, "presence_penalty": 0.0},
        {"stream_options": {"include_usage": True}, "tool_choice": "none"},
        {"top_p": 0.9, "min_tokens": 3, "max_tokens": 9, "logit_bias": {"5": 1}},
    ],
)
def test_neutral_values_and_sampling_are_continued(fields):
    assert applies(BASE | fields)


RENDERED = {
    "token_ids": [1, 2, 3],
    "sampling_params": {"max_tokens": 10, "min_tokens": 4, "top_p": 0.5},
    "features": {},
}


def test_the_rest_is_generated_behind_prompt_and_answer():
    request = json.loads(build(compact(RENDERED | {"cache_salt": "s", "stream": False}), [7, 8, 9, 10, 11]))
    assert request["token_ids"] == [1, 2, 3, 7, 8, 9, 10, 11]
    assert request["sampling_params"] == {"max_tokens": 5, "min_tokens": 0, "top_p": 0.5}
    assert (request["stream"], request["output_mode"], request["cache_salt"]) == (True, "text", "s")


@pytest.mark.parametrize(
    "rendered",
    [RENDERED | {"reasoning_parser_kwargs": {}}, RENDERED | {"sampling_params": {"max_tokens": 2}}, {}, [], 5],
)
def test_what_cannot_be_continued_is_refused(rendered):
    with pytest.raises(ContinuationError):
        build(compact(rendered), [7, 8])


def test_usage_counts_the_whole_answer():
    usage = {"prompt_tokens": 13, "completion_tokens": 4, "total_tokens": 17}
    made = as_chunk({"request_id": "r", "choices": [], "usage": usage}, 3)
    assert made["usage"] == {"prompt_tokens": 10, "completion_tokens": 7, "total_tokens": 17}


def test_a_step_becomes_a_chunk_of_a_chat():
    step = {"index": 0, "text": "ab", "token_ids": [4, 5], "finish_reason": "stop", "stop_reason": 2, "logprobs": None}
    (choice,) = as_chunk({"request_id": "r", "choices": [step]}, 3)["choices"]
    assert choice["delta"] == {"content": "ab"}
    assert [choice[name] for name in ("finish_reason", "stop_reason", "token_ids")] == ["stop", 2, [4, 5]]


def test_an_incomplete_character_is_seen():
    assert ends_whole(compact({"prompt": "né"}))
    assert not ends_whole(compact({"prompt": "n\ufffd"}))
    with pytest.raises(ContinuationError):
        ends_whole(b"{}")
