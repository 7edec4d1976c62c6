"""The tables of request fields: complete, without overlap, and obeyed on each route of each engine."""

import json
from dataclasses import fields as parts_of
from typing import Any

import pytest
from nested_bodies import BODIES as FULL
from nested_bodies import full_body, objects_in, refusal

from mmrouter_lib.engines import ADAPTERS
from mmrouter_lib.engines.base.request_fields import CHAT, COMPLETIONS, RESPONSES, Endpoint
from mmrouter_router.core.errors import RequestError
from mmrouter_router.intake import PARSERS, ChatRequest, Limits

BODIES: dict[Endpoint, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "x"}]},
    COMPLETIONS: {"prompt": "x"},
    RESPONSES: {"input": "x"},
}
CASES = [(engine, endpoint) for engine in ADAPTERS for endpoint in BODIES]

OPENAI: dict[Endpoint, str] = {
    CHAT: """audio frequency_penalty function_call functions logit_bias logprobs max_completion_tokens max_tokens
        messages metadata modalities model moderation n parallel_tool_calls prediction presence_penalty
        prompt_cache_key prompt_cache_options prompt_cache_retention reasoning_effort response_format
        safety_identifier seed service_tier stop store stream stream_options temperature tool_choice tools
        top_logprobs top_p user verbosity web_search_options""",
    COMPLETIONS: """best_of echo frequency_penalty logit_bias logprobs max_tokens model n presence_penalty prompt seed
        stop stream stream_options suffix temperature top_p user""",
    RESPONSES: """context_management include input instructions max_output_tokens max_tool_calls metadata model
        moderation parallel_tool_calls previous_response_id prompt_cache_key prompt_cache_options
        prompt_cache_retention reasoning safety_identifier service_tier store stream stream_options temperature text
        tool_choice tools top_logprobs top_p truncation user""",
}
"""Fields of OpenAI's API that its clients send."""


def parse(engine: Any, endpoint: Endpoint, **fields: Any) -> ChatRequest:
    raw = json.dumps({"model": "m", **BODIES[endpoint], **fields}).encode()
    # Requests that become chats are another matter (test_responses.py).
    forwarded = {"modelled": False} if endpoint == RESPONSES else {}
    return PARSERS[endpoint](raw, Limits(), "m", engine, **forwarded)


@pytest.mark.parametrize(("engine", "endpoint"), CASES)
def test_each_field_has_one_judgement(engine: str, endpoint: Endpoint) -> None:
    table = ADAPTERS[engine].request_fields[endpoint]
    names = [name for part in parts_of(table) for name in getattr(table, part.name)]
    assert sorted(names) == sorted(set(names))
    assert table.removed == set(ADAPTERS[engine].removed_fields)


@pytest.mark.parametrize(("engine", "endpoint"), CASES)
def test_fields_of_openai_are_served_where_null_and_forwarded(engine: str, endpoint: Endpoint) -> None:
    names = set(OPENAI[endpoint].split()) - {"model", "stream"} - BODIES[endpoint].keys()
    assert parse(engine, endpoint, **dict.fromkeys(names)).body.keys() >= names


@pytest.mark.parametrize(("engine", "endpoint"), CASES)
def test_a_field_of_a_later_release_is_refused_by_its_name(engine: str, endpoint: Endpoint) -> None:
    with pytest.raises(RequestError) as caught:
        parse(engine, endpoint, field_of_tomorrow=None)
    assert (caught.value.status, caught.value.param) == (400, "field_of_tomorrow")
    assert caught.value.code == "unknown_parameter"


@pytest.mark.parametrize("modelled", [True, False])
@pytest.mark.parametrize(("engine", "endpoint"), [(engine, endpoint) for engine in ADAPTERS for endpoint in FULL])
def test_a_name_of_a_later_release_is_refused_at_every_place(engine: Any, endpoint: str, modelled: bool) -> None:
    body = full_body(endpoint, engine)
    assert refusal(endpoint, engine, body, modelled=modelled) == ""
    for _, path, holder in objects_in(body):
        holder["of_tomorrow"] = None
        assert refusal(endpoint, engine, body, modelled=modelled) == f"{path}.of_tomorrow"
        del holder["of_tomorrow"]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/tokenize", {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}),
        ("/tokenize", {"tools": [{"type": "function", "function": {"name": "f"}}], "messages": []}),
        ("/v1/embeddings", {"input": [{"text": "x"}]}),
        ("/score", {"data_1": {"content": [{"type": "text", "text": "x"}]}, "data_2": "x"}),
        ("/generate", {"text": "x", "sampling_params": {"temperature": 0}}),
        ("/rerank", {"documents": [{"content": [{"type": "text", "text": "x"}]}]}),
    ],
)
def test_a_name_of_a_later_release_is_refused_on_passed_routes(path: str, fields: dict[str, Any]) -> None:
    for _, place, holder in [*objects_in(fields)]:
        holder["of_tomorrow"] = None
        assert refusal(path, "vllm", fields) == f"{place}.of_tomorrow"
        del holder["of_tomorrow"]


@pytest.mark.parametrize("first", [b'"tools":[{"type":"function","function":{"name":"f","x":1}}]', b""])
def test_a_nested_name_is_judged_as_parsed_and_of_duplicates_the_last_one_counts(first: bytes) -> None:
    for escaped in (rb'"\u0078":1', b'"x":1,"x":1'):
        last = b'"tools":[{"type":"function","function":{"name":"f",%b}}]' % escaped
        raw = b'{"model":"m","messages":[{"role":"user","content":"x"}],%b}' % b",".join(filter(None, (first, last)))
        with pytest.raises(RequestError) as caught:
            PARSERS[CHAT](raw, Limits(), "m", "vllm")
        assert (caught.value.param, caught.value.code) == ("tools[0].function.x", "unknown_parameter")


@pytest.mark.parametrize(("engine", "endpoint"), CASES)
def test_refused_fields_are_errors_where_they_ask_for_something(engine: str, endpoint: Endpoint) -> None:
    for name in ADAPTERS[engine].request_fields[endpoint].refused:
        parse(engine, endpoint, **{name: None})
        with pytest.raises(RequestError) as caught:
            parse(engine, endpoint, **{name: "x"})
        assert (caught.value.param, caught.value.code) == (name, "unsupported_parameter")


@pytest.mark.parametrize(("engine", "endpoint"), CASES)
def test_fields_of_the_router_never_reach_an_engine(engine: str, endpoint: Endpoint) -> None:
    removed = ADAPTERS[engine].request_fields[endpoint].removed
    request = parse(engine, endpoint, **dict.fromkeys(removed, "of the client"))
    sent = ADAPTERS[engine].rewrite_chat(request.body, (), model="m", cache_salt="ours")
    assert set(sent.removed) == removed
    assert "of the client" not in json.dumps(sent.body)
    assert sent.body["cache_salt"] == "ours"
