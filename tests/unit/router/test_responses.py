"""Requests of /v1/responses: their chat, what is forwarded instead, their answers, and their way to an engine."""

import json

import pytest
from unit.router.preparing import settings
from unit.router.rig import value
from unit.router.router_rig import client_of, router
from unit.router.test_intake import MISSING, PART_TYPE, TOO_MANY, TYPE, UNKNOWN, VALUE, fault, read
from unit.router.test_messages import ANSWER, STREAM, Chats, call, chunk, events, serving, tiny_png

from mmrouter_lib.engines import storing_pools
from mmrouter_router.core.errors import RequestError
from mmrouter_router.intake import parse_responses
from mmrouter_router.intake.request import MIN_URI
from mmrouter_router.streams.responses import ResponseStream, response_of

RESPONSES = "/v1/responses"
BY_URL = {"type": "input_image", "image_url": "https://a.example/x.png", "detail": "auto"}
CALL = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"q": 1}', "id": "fc_1"}
TOOL = {"type": "function", "name": "look", "description": "d", "parameters": {"type": "object"}, "strict": True}


def text(words):
    return {"type": "input_text", "text": words}


def said(words, **fields):
    content = [{"type": "output_text", "text": words, "annotations": []}]
    return {"type": "message", "id": "msg_1", "role": "assistant", "content": content, **fields}


def thought(words):
    return {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": words}]}


def result(output):
    return {"type": "function_call_output", "call_id": "c1", "output": output}


def user(*parts):
    return {"role": "user", "content": list(parts)}


def request(given, **fields):
    return {"model": "demo", "input": given, **fields}


def chat_of(given, **fields):
    return read(request(given, **fields), parse=parse_responses).body


def test_a_text_is_a_message_of_the_user_behind_the_instructions():
    assert chat_of("hi", instructions="be brief")["messages"] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hi"},
    ]


def test_items_of_one_turn_become_one_message_of_the_assistant():
    items = [user(text("look"), BY_URL), thought("hm"), said("I look."), CALL, {**CALL, "call_id": "c2"}]
    items += [result("seen"), result([text("and"), BY_URL]), said("Done."), {"role": "developer", "content": "more"}]
    made = read(request(items), parse=parse_responses)
    first, assistant, tool, pictures, done, last = made.messages
    assert [part["type"] for part in first["content"]] == ["text", "image_url"]
    assert (assistant["reasoning"], assistant["content"]) == ("hm", "I look.")
    assert [each["id"] for each in assistant["tool_calls"]] == ["c1", "c2"]
    assert assistant["tool_calls"][0]["function"] == {"name": "look", "arguments": '{"q": 1}'}
    assert tool == {"role": "tool", "tool_call_id": "c1", "content": "seen"}
    assert (pictures["role"], [part["type"] for part in pictures["content"]]) == ("tool", ["text", "image_url"])
    assert (done, last["role"]) == ({"role": "assistant", "content": "Done."}, "developer")
    assert [(image.message, image.part, image.param) for image in made.images] == [
        (0, 1, "input[0].content[1].image_url"),
        (3, 1, "input[6].output[1].image_url"),
    ]
    assert (made.endpoint, made.inexact, made.prompt_field) == ("/v1/chat/completions", (), "input")


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        ([said("a"), said("b")], [{"content": "a"}, {"content": "b"}]),
        ([said("a"), thought("r")], [{"content": "a", "reasoning": "r"}]),
        ([thought("r"), thought("s")], [{"reasoning": "r"}, {"reasoning": "s"}]),
        ([{"role": "assistant", "content": []}, said("a")], [{"content": []}, {"content": "a"}]),
        ([{"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}]}], [{"reasoning": "s"}]),
    ],
)
def test_an_assistants_message_takes_each_field_once(items, expected):
    assert chat_of(items)["messages"] == [{"role": "assistant", **fields} for fields in expected]


def test_an_unfinished_last_message_is_continued():
    for status, continued in (("incomplete", True), ("in_progress", True), ("completed", False)):
        body = chat_of([user(text("x")), said("and so", status=status)])
        assert body.get("continue_final_message", False) is continued
        assert body.get("add_generation_prompt", True) is not continued


def test_a_large_inline_image_is_taken_out_of_the_body_before_it_is_parsed():
    data = "A" * (MIN_URI + 4)
    picture = {"type": "input_image", "image_url": f"data:image/png;base64,{data}"}
    made = read(request([user(picture, text("what?"), picture)]), parse=parse_responses)
    assert [len(image.inline.data) for image in made.images] == [len(data) * 3 // 4] * 2
    assert [image.param for image in made.images] == [f"input[0].content[{at}].image_url" for at in (0, 2)]
    assert made.text_size < 1000


def test_fields_of_the_answer_are_those_of_a_chat():
    form = {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}}
    fields = {"tools": [TOOL], "tool_choice": {"type": "function", "name": "look"}, "reasoning": {"effort": "low"}}
    fields |= {"stream": True, "max_output_tokens": 7, "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    fields |= {"text": form, "temperature": 0.5, "cache_salt": "mine", "store": True}
    made = read(request("x", **fields), parse=parse_responses)
    schema = {"name": "n", "schema": {"type": "object"}, "strict": True}
    function = {name: item for name, item in TOOL.items() if name != "type"}
    expected = {
        "tools": [{"type": "function", "function": function}],
        "tool_choice": {"type": "function", "function": {"name": "look"}},
        "response_format": {"type": "json_schema", "json_schema": schema},
        "reasoning_effort": "low",
        "max_completion_tokens": 7,
        "logprobs": True,
        "top_logprobs": 2,
        "temperature": 0.5,
        "stream_options": {"include_usage": True},
    }
    assert {name: made.body[name] for name in expected} == expected
    assert (made.stream, made.max_tokens, made.removed, made.inexact) == (True, 7, ("cache_salt",), ())
    assert made.response["reasoning"] == {"effort": "low"}


def test_tools_are_shown_also_by_an_engine_that_finds_no_calls():
    for choice, sent in (({}, "none"), ({"tool_choice": "required"}, "required")):
        body = request("x", tools=[TOOL], **choice)
        made = read(body, parse=lambda raw, *more: parse_responses(raw, *more, parses_tools=False))
        assert (len(made.body["tools"]), made.body["tool_choice"]) == (1, sent)


def test_a_prompt_that_the_engine_may_cut_is_not_exact():
    made = read(request("x", truncation="auto"), parse=parse_responses)
    assert made.body["truncate_prompt_tokens"] == -1
    assert [reason.label for reason in made.inexact] == ["truncation:truncation"]
    assert read(request("x", truncation="disabled"), parse=parse_responses).inexact == ()


FORWARDED = {
    "stored_messages:previous_response_id": request("x", previous_response_id="resp_1"),
    "not_modelled:previous_input_messages": request("x", previous_input_messages=[{"role": "user", "content": "y"}]),
    "not_modelled:enable_response_messages": request("x", enable_response_messages=True),
    "not_modelled:tools[0].type": request("x", tools=[{"type": "web_search"}]),
    "not_modelled:tool_choice": request("x", tool_choice={"type": "allowed_tools"}),
    "not_modelled:input[1].type": request([user(text("x")), {"type": "item_reference", "id": "i"}]),
    "not_modelled:input[0].namespace": request([{**CALL, "namespace": "n"}]),
    "not_modelled:input[0].content[0].type": request(
        [{"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}]
    ),
}


@pytest.mark.parametrize("reason", FORWARDED)
def test_what_is_not_modelled_is_forwarded_with_its_reason(reason):
    body = FORWARDED[reason]
    made = read(body, parse=parse_responses)
    assert (made.endpoint, [each.label for each in made.inexact]) == (RESPONSES, [reason])
    assert (made.body, made.response) == (body, None)


def test_a_request_for_an_engine_of_other_rules_is_forwarded():
    made = read(request("x"), parse=lambda raw, *more: parse_responses(raw, *more, modelled=False))
    assert (made.endpoint, [each.label for each in made.inexact]) == (RESPONSES, ["not_modelled:input"])


def stored(body):
    return read(body, parse=lambda raw, *more: parse_responses(raw, *more, stored=True))


def test_a_response_that_the_engine_stores_is_forwarded_with_the_prompt_of_its_chat():
    made = stored(request([user(text("a")), said("b"), user(text("c"))], instructions="be brief", background=True))
    chat = chat_of([user(text("a")), said("b"), user(text("c"))], instructions="be brief")
    assert (made.endpoint, made.stored, made.inexact, made.as_chat) == (RESPONSES, True, (), chat)
    assert "background" in made.body
    not_kept = stored(request("x", store=False))
    assert (not_kept.endpoint, not_kept.stored, not_kept.as_chat) == ("/v1/chat/completions", False, None)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (request([user(BY_URL)]), "stored_images:store"),
        (request("x", previous_response_id="resp_1"), "stored_messages:previous_response_id"),
        (request("x", truncation="auto"), "truncation:truncation"),
    ],
)
def test_what_the_engine_adds_to_a_stored_response_is_not_predicted(given, reason):
    made = stored(given)
    assert (made.endpoint, made.stored, [each.label for each in made.inexact]) == (RESPONSES, True, [reason])


def pools_of(dep, env=(), args=(), **pool):
    """Return the storing pools of a deployment whose first pool has these variables and arguments."""
    variables = [{"name": name, "value": each} for name, each in env]
    template = {"spec": {"containers": [{"name": "engine", "env": variables}]}}
    changed = dep.spec.pools[0].model_copy(update={"pod_template": template, "args": list(args), **pool})
    spec = dep.spec.model_copy(update={"pools": [changed, *dep.spec.pools[1:]]})
    return storing_pools(dep.model_copy(update={"spec": spec}))


def test_a_variable_of_vllm_and_a_flag_of_sglang_make_engines_store_responses():
    store = ("VLLM_ENABLE_RESPONSES_API_STORE", "1")
    vllm, sglang = settings().deployment, settings(engine="sglang").deployment
    assert pools_of(vllm) == pools_of(vllm, [(store[0], "0")]) == pools_of(sglang, [store]) == frozenset()
    assert pools_of(vllm, [store]) == pools_of(sglang, args=["--enable-response-store"]) == {"worker"}
    ranks = vllm.spec.pools[0].parallelism.model_copy(update={"data": 2})
    assert pools_of(vllm, [store], parallelism=ranks) == frozenset(), "each rank has a server with a store of its own"
    assert pools_of(sglang, args=["--enable-response-store", "--tokenizer-worker-num=2"]) == frozenset()


ENV = {"name": "VLLM_ENABLE_RESPONSES_API_STORE", "value": "1"}


@pytest.mark.parametrize(
    "template",
    [
        *({"spec": spec} for spec in (None, "x", {"containers": "x"}, {"containers": ["x"]}, {"containers": [{}]})),
        *({"spec": {"containers": [{"name": "engine", "env": env}]}} for env in ("x", ["x"], [{"value": "1"}])),
        {"spec": {"containers": [{"name": "engine", "env": [{**ENV, "$patch": "delete"}]}]}},
        {"spec": {"containers": [{"name": "sidecar", "env": [ENV]}]}},
    ],
)
def test_a_pod_template_that_is_malformed_or_a_directive_makes_no_engine_store_responses(template):
    assert pools_of(settings().deployment, pod_template=template) == frozenset()


FIRST = "input[0].content[0]"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"model": "demo"}, (400, "input", MISSING)),
        (request([]), (400, "input", TYPE)),
        (request(["x"]), (400, "input[0]", TYPE)),
        ({**request("x"), "model": "other"}, (404, "model", "model_not_found")),
        (request("x", new=1), (400, "new", UNKNOWN)),
        (request("x", background=True), (400, "background", "unsupported_parameter")),
        (request([{"content": "x"}]), (400, "input[0].role", MISSING)),
        (request([{"role": "tool", "content": "x"}]), (400, "input[0].role", VALUE)),
        (request([{"role": "user", "content": "x", "tool_calls": []}]), (400, "input[0].tool_calls", UNKNOWN)),
        (request([{"role": "user"}]), (400, "input[0].content", MISSING)),
        (request([user({"type": "text", "text": "x"})]), (400, f"{FIRST}.type", PART_TYPE)),
        (request([user({"type": "input_file", "file_data": "x"})]), (400, f"{FIRST}.type", PART_TYPE)),
        (request([user({**text("x"), "image_url": "y"})]), (400, f"{FIRST}.image_url", UNKNOWN)),
        (request([user({"type": "input_image", "file_id": "f"})]), (400, f"{FIRST}.file_id", PART_TYPE)),
        (request([user({"type": "input_image"})]), (400, f"{FIRST}.image_url", MISSING)),
        (request([user(*[BY_URL] * 4)]), (400, "input[0].content[3].image_url", TOO_MANY)),
        (request([{**CALL, "arguments": {}}]), (400, "input[0].arguments", TYPE)),
        (request([{**CALL, "arguments": "[" * 5000}]), (400, "input[0].arguments", VALUE)),
        (request([{"type": "function_call_output", "output": "x"}]), (400, "input[0].call_id", MISSING)),
        (request([result(7)]), (400, "input[0].output", TYPE)),
        (request([{**thought("x"), "encrypted_content": "x"}]), (400, "input[0].encrypted_content", PART_TYPE)),
        (request("x", tools=[{"type": "function"}]), (400, "tools[0].name", MISSING)),
        (request("x", tool_choice="required"), (400, "tools", MISSING)),
        (request("x", reasoning={"effort": []}), (400, "reasoning.effort", VALUE)),
        (request("x", text={"format": {"type": "xml"}}), (400, "text.format.type", VALUE)),
        (request("x", chat_template_kwargs={"messages": []}), (400, "chat_template_kwargs.messages", VALUE)),
    ],
)  # fmt: skip
def test_invalid_request_is_refused_with_status_field_and_code(body, expected):
    assert fault(body, parse=parse_responses) == expected


# -- answers


def test_a_whole_answer_becomes_a_response():
    message = {"content": "Hi", "reasoning": "hm", "tool_calls": call(0, "look", "{}")["tool_calls"]}
    logprob = {"token": "Hi", "logprob": -0.5, "bytes": [72, 105], "top_logprobs": []}
    choice = {"message": message, "finish_reason": "stop", "logprobs": {"content": [logprob]}}
    answer = {**ANSWER, "created": 5, "choices": [choice]}
    response = response_of(answer, {"temperature": 0.5, "metadata": {"a": "b"}, "text": None})
    assert (response["id"], response["object"], response["created_at"]) == ("resp_r-1", "response", 5)
    assert (response["status"], response["incomplete_details"], response["error"]) == ("completed", None, None)
    assert (response["temperature"], response["metadata"], response["truncation"]) == (0.5, {"a": "b"}, "disabled")
    thinking, written, called = response["output"]
    assert (thinking["type"], thinking["content"]) == ("reasoning", [{"type": "reasoning_text", "text": "hm"}])
    assert (written["role"], written["content"][0]["text"]) == ("assistant", "Hi")
    assert written["content"][0]["logprobs"] == [logprob]
    assert (called["type"], called["call_id"], called["name"], called["arguments"]) == (
        *("function_call", "c0"),
        *("look", "{}"),
    )
    assert len({item["id"] for item in response["output"]}) == 3
    usage = response["usage"]
    assert (usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]) == (9, 2, 11)
    assert usage["input_tokens_details"]["cached_tokens"] == 4


def test_an_answer_that_was_cut_is_incomplete():
    response = response_of({**ANSWER, "choices": [{"message": {"content": "Hi"}, "finish_reason": "length"}]}, {})
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})


@pytest.mark.parametrize("together", [1, 3, len(STREAM)])
def test_a_stream_becomes_items_however_its_events_arrive(together):
    stream = ResponseStream({"temperature": 0.5})
    pieces = [b"".join(STREAM[at : at + together]) for at in range(0, len(STREAM), together)]
    found = events(b"".join(map(stream.feed, pieces)))
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    kinds = [event["type"] for event in found]
    assert (kinds[:2], kinds[-1]) == (["response.created", "response.in_progress"], "response.completed")
    done = [event["item"] for event in found if event["type"] == "response.output_item.done"]
    assert done == found[-1]["response"]["output"]
    texts = [item.get("arguments") or item["content"][0]["text"] for item in done]
    assert [item["type"] for item in done] == ["reasoning", "message", "function_call", "message", "function_call"]
    assert texts == ["hm", "ab", '{"q":1}', "late", "{}"]
    for number, item in enumerate(done):
        own = [event for event in found if event.get("output_index") == number]
        assert (own[0]["type"], own[0]["item"]["id"]) == ("response.output_item.added", item["id"])
        deltas = "".join(event["delta"] for event in own if event["type"].endswith(".delta"))
        assert deltas == texts[number]
        assert {event["item_id"] for event in own if "item_id" in event} == {item["id"]}
    assert found[-1]["response"]["usage"]["input_tokens"] == 7
    assert found[0]["response"]["temperature"] == found[-1]["response"]["temperature"] == 0.5


def test_an_error_event_ends_the_stream_of_a_response():
    stream = ResponseStream({})
    broken = RequestError(500, "It broke.", type="server_error", code="stream_limit").to_body()
    found = events(stream.feed(STREAM[0] + b"data: " + broken + b"\n\ndata: [DONE]\n\n"))
    assert [event["type"] for event in found] == ["response.created", "response.in_progress", "error"]
    assert (found[-1]["code"], found[-1]["message"]) == ("stream_limit", "It broke.")
    assert stream.feed(STREAM[1]) == b""


def test_logprobs_are_in_the_events_and_in_the_item():
    logprob = {"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": [{"token": "b", "logprob": -1.0}]}
    piece = {"choices": [{"index": 0, "delta": {"content": "a"}, "logprobs": {"content": [logprob]}}]}
    stream = ResponseStream({})
    found = events(stream.feed(chunk(**piece)) + stream.feed(STREAM[-1]))
    (delta,) = [event for event in found if event["type"] == "response.output_text.delta"]
    assert delta["logprobs"][0]["top_logprobs"] == [{"token": "b", "logprob": -1.0}]
    assert found[-1]["response"]["output"][0]["content"][0]["logprobs"] == [logprob]


# -- through the router


@pytest.mark.parametrize("key", ["", "key"])
async def test_engines_get_a_chat_with_identities_and_the_tenants_salt(tmp_path, key):
    url = f"data:image/png;base64,{tiny_png()}"
    body = {**request([user(text("what?"), {"type": "input_image", "image_url": url})]), "model": "t"}
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with router(tmp_path, key=key) as r, serving(r, engine := Chats()), client_of(r) as client:
        answer = await client.post(RESPONSES, json=body, headers=headers)
    assert (answer.status_code, answer.json()["object"]) == (200, "response")
    ((path, _, chat),) = engine.requests
    part = chat["messages"][0]["content"][1]
    assert (path, part["uuid"][:3], part["image_url"]["url"]) == ("/v1/chat/completions", "m1-", url)
    assert ("cache_salt" in chat) == bool(key)
    assert value(r.metrics.requests.labels(RESPONSES, "200")) == 1


async def test_a_growing_conversation_is_exact_and_streams(tmp_path):
    items = [user(text("what?")), thought("hm"), said("A boat."), user(text("and now?"))]
    body = {**request(items, stream=True), "model": "t"}
    async with router(tmp_path) as r, serving(r, Chats()), client_of(r) as client:
        answer = await client.post(RESPONSES, json=body)
        prepared = await r.chat.prepare(RESPONSES, json.dumps(body).encode(), r.chat.tenants.authenticate([]))
    assert answer.headers["content-type"] == "text/event-stream"
    assert events(answer.content)[-1]["type"] == "response.completed"
    assert (prepared.exactness, prepared.reasons) == ("exact", ())
    assert len(prepared.ids) > 0


async def test_an_engines_error_names_the_field_of_the_request(tmp_path):
    class Refuses(Chats):
        async def respond(self, reader, writer, headers):
            error = {"error": {"message": "too long", "param": "messages", "code": 400}}
            raw = json.dumps(error).encode()
            writer.write(b"HTTP/1.1 400 X\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(raw))
            writer.write(raw)
            return True

    async with router(tmp_path) as r, serving(r, Refuses()), client_of(r) as client:
        answer = await client.post(RESPONSES, json={**request("x"), "model": "t"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input")
