"""Several answers, probabilities and forms, as the engines answer them."""

import json
from collections import defaultdict
from typing import Any

import pytest
from answer_forms import ASKED, EXPECTED, JSON_SCHEMA, SCHEMA, told
from hypothesis import given
from hypothesis import strategies as st
from unit.sim.conftest import chat_body

from mmrouter_sim.core.grammar import NotSimulatedError, formed_text

ENGINES = pytest.mark.parametrize("engine", ["vllm", "sglang"])


@pytest.fixture
async def client(engine: str, serve: Any, serve_sglang: Any) -> Any:
    return await {"vllm": serve, "sglang": serve_sglang}[engine]()


@ENGINES
@pytest.mark.parametrize("name", ASKED)
async def test_an_answer_has_the_form_of_a_real_engines(client: Any, name: str) -> None:
    path, body = ASKED[name]
    status, answer = await client.post(path, {"model": "tiny", "ignore_eos": True, **body})
    assert status == 200, answer
    assert told(answer) == EXPECTED[name]


@ENGINES
@pytest.mark.parametrize("name", ASKED)
async def test_a_stream_has_the_choices_of_the_whole_answer(client: Any, name: str) -> None:
    path, body = ASKED[name]
    body = {"model": "tiny", "ignore_eos": True, **body}
    _, whole = await client.post(path, body)
    texts, ends = defaultdict[int, str](str), {}
    *chunks, last = await client.stream(path, body | {"stream_options": {"include_usage": True}})
    for chunk in chunks:
        assert chunk["id"] == chunks[0]["id"]
        for choice in chunk["choices"]:
            texts[choice["index"]] += (choice["delta"].get("content") or "") if "delta" in choice else choice["text"]
            if choice["finish_reason"]:
                ends[choice["index"]] = choice["finish_reason"]
    assert [texts[number] for number in range(len(texts))] == [
        choice["message"]["content"] if "message" in choice else choice["text"] for choice in whole["choices"]
    ]
    assert ends == {choice["index"]: choice["finish_reason"] for choice in whole["choices"]}
    assert last["usage"]["total_tokens"] == whole["usage"]["total_tokens"]


@ENGINES
async def test_a_prompt_counts_once_however_many_answers_it_has(client: Any) -> None:
    one, three = [(await client.chat("Say hello.", n=n))[1]["usage"] for n in (1, 3)]
    assert three["prompt_tokens"] == one["prompt_tokens"]
    assert three["completion_tokens"] == 3 * one["completion_tokens"]


@ENGINES
async def test_the_prompts_of_a_list_are_answered_and_cached_as_each_alone(client: Any) -> None:
    prompts = [f"{name} story of the sea. " * 20 for name in ("One", "Another")]
    alone = [(await client.post("/v1/completions", {"model": "tiny", "prompt": each}))[1] for each in prompts]
    _, together = await client.post("/v1/completions", {"model": "tiny", "prompt": prompts})
    assert [choice["text"] for choice in together["choices"]] == [each["choices"][0]["text"] for each in alone]
    assert together["usage"]["prompt_tokens"] == sum(each["usage"]["prompt_tokens"] for each in alone)
    assert together["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


@ENGINES
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"response_format": JSON_SCHEMA}, {"color": "red", "sides": []}),
        ({"response_format": {"type": "json_object"}}, {}),
        ({"response_format": {"type": "text"}}, None),
    ],
)
async def test_an_answer_has_the_requested_form(client: Any, fields: dict[str, Any], expected: Any) -> None:
    status, answer = await client.post("/v1/chat/completions", chat_body("x", **fields, max_tokens=100))
    assert status == 200, answer
    (choice,) = answer["choices"]
    if expected is not None:
        assert (json.loads(choice["message"]["content"]), choice["finish_reason"]) == (expected, "stop")
        return
    with pytest.raises(ValueError, match="Expecting value"):
        json.loads(choice["message"]["content"])


@ENGINES
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "paint"}}, "auto", "none"])
async def test_a_function_is_called_where_it_must_be(engine: str, client: Any, choice: Any) -> None:
    tools = [{"type": "function", "function": {"name": "paint", "parameters": SCHEMA}}]
    body = chat_body("x", tools=tools, tool_choice=choice, max_tokens=100)
    status, answer = await client.post("/v1/chat/completions", body)
    assert status == 200, answer
    (whole,) = answer["choices"]
    called = choice not in ("auto", "none")
    ends = {"tool_calls"} if called and (engine == "sglang" or choice == "required") else {"stop", "length"}
    assert whole["finish_reason"] in ends
    assert bool(whole["message"]["tool_calls"]) == called
    assert bool(whole["message"]["content"]) != called
    text, names = "", list[str]()
    for chunk in await client.stream("/v1/chat/completions", body):
        for part in chunk["choices"][0]["delta"].get("tool_calls") or ():
            text += part["function"]["arguments"]
            names += [part["function"]["name"]] if "name" in part["function"] else []
    if called:
        (call,) = whole["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {"color": "red", "sides": []}
        assert (text, names) == (call["function"]["arguments"], [call["function"]["name"]])
    else:
        assert (text, names) == ("", [])


SCHEMAS = st.recursive(
    st.sampled_from(
        [
            {"type": "string", "minLength": 3},
            {"type": "integer", "minimum": 4},
            {"type": "number"},
            {"type": "boolean"},
            {"type": "null"},
            {"type": ["string", "null"]},
            {"const": 5},
            {"enum": ["a", 1]},
            {"$ref": "#/$defs/side"},
        ]
    ),
    lambda inner: st.one_of(
        st.builds(lambda item, least: {"type": "array", "items": item, "minItems": least}, inner, st.integers(0, 2)),
        st.builds(lambda item: {"anyOf": [item]}, inner),
        st.dictionaries(st.sampled_from("abc"), inner).map(
            lambda of: {"type": "object", "properties": of, "required": sorted(of), "additionalProperties": False}
        ),
    ),
    max_leaves=6,
)


TYPES = {"string": str, "integer": int, "number": int | float, "boolean": bool, "null": type(None)}


def meets(value: Any, schema: dict[str, Any]) -> bool:
    """Whether a value is one of a schema of those above."""
    match schema:
        case {"$ref": _}:
            return isinstance(value, int) and value >= 2
        case {"const": only}:
            return bool(value == only)
        case {"enum": allowed}:
            return value in allowed
        case {"anyOf": forms}:
            return any(meets(value, form) for form in forms)
        case {"type": "array", "items": item, "minItems": least}:
            return isinstance(value, list) and len(value) >= least and all(meets(each, item) for each in value)
        case {"type": "object", "properties": of}:
            return (
                isinstance(value, dict) and set(value) == set(of) and all(meets(value[name], of[name]) for name in of)
            )
        case {"type": [*kinds]}:
            return any(meets(value, {"type": kind}) for kind in kinds)
    least = schema.get("minimum", schema.get("minLength", 0))
    held = len(value) if isinstance(value, str) else value or 0
    return isinstance(value, TYPES[schema["type"]]) and held >= least


@given(SCHEMAS)
def test_every_schema_is_met(schema: dict[str, Any]) -> None:
    whole = {**schema, "$defs": {"side": {"type": "integer", "minimum": 2}}}
    text = formed_text({"type": "json_schema", "json_schema": {"schema": whole}}, None)
    assert text is not None
    assert meets(json.loads(text), schema)


def test_what_is_not_simulated_is_named() -> None:
    assert formed_text(None, {"choice": ["yes", "no"]}) == "yes"
    assert formed_text(None, None, json.dumps(SCHEMA)) == '{"color": "red", "sides": []}'
    for structured in ({"regex": "a"}, {"grammar": "root ::= x"}, {"json": {"type": "string", "pattern": "a"}}):
        with pytest.raises(NotSimulatedError):
            formed_text(None, structured)
    loop = {"properties": {"a": {"$ref": "#"}}, "required": ["a"]}
    with pytest.raises(NotSimulatedError):
        formed_text(None, {"json": loop})
