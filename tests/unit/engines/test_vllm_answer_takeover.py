"""Continuing a chat at vLLM's tokens-in endpoint: which requests, which ids, and what the client gets of it."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmrouter_lib.engines import adapter
from mmrouter_lib.engines.base.answer_takeover import ContinuationError
from mmrouter_lib.engines.vllm.answer_takeover import CHAT, COMPLETIONS, as_chunk, build, ends_whole, obstacle, strip

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
    ("fields", "why"),
    [
        ({"n": 2}, "choices"),
        ({"use_beam_search": True}, "choices"),
        ({"stop": ["end"]}, "stop"),
        ({"stop": "end"}, "stop"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "auto"}, "tools"),
        ({"response_format": {"type": "json_object"}}, "grammar"),
        ({"structured_outputs": {"regex": "a"}}, "grammar"),
        ({"presence_penalty": 0.1}, "penalties"),
        ({"frequency_penalty": -1}, "penalties"),
        ({"include_reasoning": False}, "reasoning"),
        ({"bad_words": ["a b"]}, "bad_words"),
        ({"return_token_ids": True}, "field"),
        ({"stream_options": {"include_usage": True, "continuous_usage_stats": True}}, "field"),
        ({"stream_options": []}, "field"),
        ({"thinking_token_budget": 5}, "field"),
        ({"a_field_of_a_later_release": 1}, "field"),
    ],
    ids=str,
)
def test_what_depends_on_where_the_answer_begins_is_not_continued(fields, why):
    for path in (CHAT, COMPLETIONS):
        assert obstacle(path, BASE) is None
        assert obstacle(path, BASE | fields) == why


@pytest.mark.parametrize(
    ("path", "fields", "why"),
    [
        (CHAT, {"logprobs": True, "top_logprobs": 3}, None),
        (COMPLETIONS, {"logprobs": 0}, "logprobs"),
        (COMPLETIONS, {"logprobs": 2}, "logprobs"),
        (COMPLETIONS, {"prompt": "x"}, None),
        (COMPLETIONS, {"prompt": [1, 2]}, None),
        (COMPLETIONS, {"prompt": ["x"]}, None),
        (COMPLETIONS, {"prompt": ["x", "y"]}, "prompts"),
        (COMPLETIONS, {"prompt": [[1], [2]], "n": 2}, "prompts"),
        (COMPLETIONS, {"best_of": 2}, "choices"),
        (COMPLETIONS, {"suffix": "x"}, "field"),
        (COMPLETIONS, {"echo": True}, "field"),
    ],
    ids=str,
)
def test_chats_and_completions_differ(path, fields, why):
    assert obstacle(path, BASE | fields) == why


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 1, "stop": None, "presence_penalty": 0.0},
        {"stream_options": {"include_usage": True}, "tool_choice": "none"},
        {"top_p": 0.9, "min_tokens": 3, "max_tokens": 9, "logit_bias": {"5": 1}},
    ],
)
def test_neutral_values_and_sampling_are_continued(fields):
    assert obstacle(CHAT, BASE | fields) is None


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
    [
        RENDERED | {"reasoning_parser_kwargs": {}},
        RENDERED | {"sampling_params": {"max_tokens": 2}},
        {},
        [],
        5,
        [RENDERED] * 2,
    ],
)
def test_what_cannot_be_continued_is_refused(rendered):
    with pytest.raises(ContinuationError):
        build(compact(rendered), [7, 8])


def test_a_completion_is_rendered_as_a_list_of_one_prompt():
    assert json.loads(build(compact([RENDERED]), [7]))["token_ids"] == [1, 2, 3, 7]


def test_usage_counts_the_whole_answer():
    usage = {"prompt_tokens": 13, "completion_tokens": 4, "total_tokens": 17}
    made = as_chunk({"request_id": "r", "choices": [], "usage": usage}, CHAT, {}, 3)
    assert made["usage"] == {"prompt_tokens": 10, "completion_tokens": 7, "total_tokens": 17}


LISTED = {"token": "ab", "logprob": -1.0, "bytes": [97, 98], "top_logprobs": [{"token": "ab", "logprob": -1.0}]}
STEP = {"index": 0, "text": "ab", "token_ids": [4, 5], "finish_reason": "stop", "stop_reason": 2}


def choice_of(path: str, step: dict, fields: dict) -> dict:
    (choice,) = as_chunk({"request_id": "r", "choices": [step]}, path, fields, 3)["choices"]
    return choice


def test_a_step_becomes_a_chunk_of_its_path():
    ending = {"index": 0, "logprobs": None, "finish_reason": "stop", "stop_reason": 2, "token_ids": [4, 5]}
    assert choice_of(CHAT, STEP, {}) == ending | {"delta": {"content": "ab"}}
    assert choice_of(COMPLETIONS, STEP, {}) == ending | {"text": "ab"}
    middle = {**STEP, "finish_reason": None, "stop_reason": None}
    assert [("stop_reason" in choice_of(path, middle, {})) for path in (CHAT, COMPLETIONS)] == [False, True]


@pytest.mark.parametrize(("top", "listed"), [(1, LISTED["top_logprobs"]), (0, []), (None, [])])
def test_log_probabilities_of_a_chat_list_as_many_tokens_as_asked_for(top, listed):
    made = choice_of(CHAT, STEP | {"logprobs": {"content": [LISTED]}}, {"logprobs": True, "top_logprobs": top})
    assert made["logprobs"]["content"] == [LISTED | {"top_logprobs": listed}]


@pytest.mark.parametrize(
    ("engine", "args", "config", "traits"),
    [
        ("vllm", [[], ["--enforce-eager"]], {}, ("seeded", False, False)),
        ("vllm", [[], ["--reasoning-parser=qwen3"]], {}, ("seeded", True, False)),
        ("vllm", [["--tool-call-parser", "hermes"]], {}, ("seeded", False, True)),
        ("vllm", [["--reasoning_parser", "qwen3"]], {"canvas_length": 32}, ("none", True, False)),
        ("sglang", [[]], {}, ("none", False, False)),
        ("sglang", [["--enable-deterministic-inference"], []], {}, ("none", False, False)),
        ("sglang", [["--enable-deterministic-inference"]] * 2, {}, ("all", False, False)),
    ],
)
def test_flags_and_model_decide_the_traits_of_answers(engine, args, config, traits):
    assert adapter(engine).answer_traits(args, config) == traits


def test_an_incomplete_character_is_seen():
    assert ends_whole(compact({"prompt": "né"}))
    assert not ends_whole(compact({"prompt": "n\ufffd"}))
    with pytest.raises(ContinuationError):
        ends_whole(b"{}")
