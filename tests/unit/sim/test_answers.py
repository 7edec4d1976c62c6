"""Several answers, probabilities and forms, as the engines answer them."""

import json
import re
from collections import defaultdict
from typing import Any

import pytest
from answer_forms import ASKED, EXPECTED, FORMS, JSON_SCHEMA, REFUSED_FORMS, SCHEMA, told
from unit.sim.conftest import chat_body

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


@pytest.mark.parametrize("name", FORMS)
async def test_a_vllm_answers_in_the_form_of_structured_outputs(serve: Any, name: str) -> None:
    fields, matching = FORMS[name]
    status, answer = await (await serve()).chat("x", **fields, max_tokens=100)
    assert status == 200, answer
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "stop"
    assert re.fullmatch(matching, choice["message"]["content"], re.DOTALL)


@pytest.mark.parametrize("name", REFUSED_FORMS)
async def test_a_vllm_refuses_a_form_without_an_answer(serve: Any, name: str) -> None:
    status, answer = await (await serve()).chat("x", **REFUSED_FORMS[name], max_tokens=100)
    assert (status, answer["error"]["code"], answer["error"]["type"]) == (400, 400, "BadRequestError")
    field = next(iter(REFUSED_FORMS[name]))
    assert answer["error"]["param"].startswith(field)
    assert field in answer["error"]["message"]


@pytest.mark.parametrize(
    ("path", "fields", "matching"),
    [
        ("/v1/chat/completions", {"regex": "[ab]{3}-[0-9]+"}, "[ab]{3}-[0-9]+"),
        ("/v1/chat/completions", {"ebnf": 'root ::= "a" root | "b"'}, "a*b"),
        ("/v1/completions", {"regex": "(yes|no)!"}, "(yes|no)!"),
        ("/v1/completions", {"ebnf": "root ::= [xy]{2,}"}, "[xy]{2,}"),
        ("/v1/completions", {"json_schema": '{"type": "string", "pattern": "^a+$"}'}, '"a+"'),
    ],
)
async def test_an_sglang_answers_in_the_form_of_its_own_fields(
    serve_sglang: Any, path: str, fields: dict[str, str], matching: str
) -> None:
    client = await serve_sglang()
    body = chat_body("x", **fields, max_tokens=100) if "chat" in path else {"prompt": "x", "max_tokens": 100, **fields}
    status, answer = await client.post(path, body)
    assert status == 200, answer
    (choice,) = answer["choices"]
    assert re.fullmatch(matching, choice.get("text") or choice["message"]["content"])


@pytest.mark.parametrize("fields", [{"regex": "(a"}, {"ebnf": "root ::= a"}, {"ebnf": 'start: "a"'}])
async def test_an_sglang_names_the_field_whose_form_has_no_answer(serve_sglang: Any, fields: dict[str, str]) -> None:
    status, answer = await (await serve_sglang()).chat("x", **fields)
    assert (status, answer["param"]) == (400, next(iter(fields)))


@ENGINES
async def test_an_answer_has_one_form_only(engine: str, client: Any) -> None:
    second = {"regex": "a"} if engine == "sglang" else {"structured_outputs": {"regex": "a"}}
    status, answer = await client.post("/v1/chat/completions", chat_body("x", response_format=JSON_SCHEMA, **second))
    assert (status, "one form only" in json.dumps(answer)) == (400, True)


@pytest.mark.parametrize("text", ["<|im_end|>", "a<|endoftext|>b"])
async def test_a_text_without_tokens_is_refused_instead_of_another(serve: Any, text: str) -> None:
    client = await serve()
    status, answer = await client.chat("x", structured_outputs={"choice": [text]}, max_tokens=20)
    assert (status, "no tokens" in answer["error"]["message"]) == (400, True)
    status, answer = await client.chat("x", structured_outputs={"choice": ["é ß\n\t"]}, max_tokens=20)
    assert answer["choices"][0]["message"]["content"] == "é ß\n\t"


@ENGINES
async def test_a_response_has_the_form_of_its_text(client: Any) -> None:
    form = {"type": "json_schema", "name": "paint", "schema": SCHEMA}
    body = {"model": "tiny", "input": "x", "max_output_tokens": 100, "text": {"format": form}}
    status, made = await client.post("/v1/responses", body)
    assert status == 200, made
    assert json.loads(made["output"][0]["content"][0]["text"]) == {"color": "red", "sides": []}


@ENGINES
@pytest.mark.parametrize(
    ("last", "parser", "called"),
    [
        ("Please mix the colours.", True, "mix"),
        ([{"type": "text", "text": "Now mix, do not paint."}], True, "paint"),  # the first of the tools
        ("Remix the repaint.", True, None),
        ("Please mix the colours.", False, None),
    ],
)
async def test_a_function_that_the_user_names_is_called_where_the_engine_has_a_parser(
    engine: str, serve: Any, serve_sglang: Any, last: Any, parser: bool, called: str | None
) -> None:
    flags = ("--tool-call-parser", "hermes", *(("--enable-auto-tool-choice",) if engine == "vllm" else ()))
    client = await {"vllm": serve, "sglang": serve_sglang}[engine](*(flags if parser else ()))
    tools = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("paint", "mix")]
    _, answer = await client.post("/v1/chat/completions", chat_body(last, tools=tools, max_tokens=100))
    (choice,) = answer["choices"]
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"] or ()] == ([called] if called else [])
    if called:
        assert choice["finish_reason"] == "tool_calls"
        assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"]) == {"color": "red", "sides": []}


@ENGINES
async def test_a_result_of_a_tool_is_answered_by_text(engine: str, serve: Any, serve_sglang: Any) -> None:
    flags = ("--tool-call-parser", "hermes", *(("--enable-auto-tool-choice",) if engine == "vllm" else ()))
    client = await {"vllm": serve, "sglang": serve_sglang}[engine](*flags)
    call = {"id": "c", "type": "function", "function": {"name": "mix", "arguments": "{}"}}
    body = chat_body("Please mix.", tools=[{"type": "function", "function": {"name": "mix"}}], max_tokens=100)
    body["messages"] += [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "mix"},
    ]
    _, answer = await client.post("/v1/chat/completions", body)
    (choice,) = answer["choices"]
    assert choice["message"]["content"]
    assert not choice["message"]["tool_calls"]
