"""Requests of /v1/responses on SGLang: forwarded as they came, with the prompt of the chat that the engine makes."""

import json
from dataclasses import replace
from functools import partial

import pytest
from unit.router.preparing import preparing, settings
from unit.router.test_intake import fault, read
from unit.router.test_messages import tiny_png
from unit.router.test_responses import CALL, RESPONSES, request, result, said, text, thought, user

from mmrouter_lib.engines.prompters import response_chat
from mmrouter_lib.engines.sglang.prompts import response_chats
from mmrouter_lib.engines.sglang.prompts.response_chats import shows_later_systems
from mmrouter_router.intake import Limits, parse_chat, parse_responses

URL = f"data:image/png;base64,{tiny_png()}"
PICTURE = {"type": "input_image", "image_url": URL, "detail": "high"}
ASKED = user(text("look"))


def parsed(body, later_systems=False, **options):
    def parse(raw, limits, served):
        made = partial(response_chats.chat_of, later_systems=later_systems)
        return parse_responses(raw, limits, served, "sglang", chat_of=made, **options)

    return read(body, parse=parse)


def chat_of(items, **fields):
    return parsed(request(items, **fields)).as_chat


def message(role, content=None, **fields):
    return {"role": role, **({} if content is None else {"content": content}), **fields}


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        ([said("a"), said("b")], {"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}),
        ([message("assistant", "a"), message("assistant", "b")], {"content": "a\n\nb"}),
        ([thought("r"), thought("s"), message("assistant", "a")], {"content": "a", "reasoning_content": "r\ns"}),
        ([thought("r"), {"type": "reasoning", "summary": []}], {"reasoning_content": "r"}),
    ],
)
def test_the_assistants_messages_in_a_row_become_one(items, expected):
    assert chat_of([ASKED, *items])["messages"][1:] == [message("assistant", **expected)]


def test_calls_and_results_are_those_of_a_chat():
    items = [ASKED, message("assistant", "a"), CALL, {**CALL, "call_id": "c2", "arguments": "[1]"}]
    _, assistant, tool = chat_of([*items, result([text("b"), PICTURE, text("c")])])["messages"]
    assert [(each["id"], each["function"]["arguments"]) for each in assistant["tool_calls"]] == [
        ("c1", '{"q": 1}'),
        ("c2", "{}"),
    ]
    assert tool == message("tool", "bc", tool_call_id="c1")


def test_system_messages_become_one_unless_the_template_shows_later_ones():
    items = [ASKED, message("developer", [PICTURE, text("c")]), message("system", "d")]
    body = request(items, instructions="a")
    first, *others = parsed(body).as_chat["messages"]
    assert first == message("system", "a\n\nDeveloper instructions:\nc\n\nd")
    assert [each["role"] for each in others] == ["user"]
    roles = [each["role"] for each in parsed(body, later_systems=True).as_chat["messages"]]
    assert roles == ["system", "user", "system", "system"]


@pytest.mark.parametrize(
    ("template", "shows"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", True),
        ("{{ messages[0].content }}", False),
        ("{% for m in messages %}{{ m.content }}{% endfor %}{{ raise_exception('x') }}", False),
        ("{% for", False),
    ],
)
def test_a_template_shows_later_system_messages_where_the_engines_probe_finds_one(template, shows):
    assert shows_later_systems(template) == shows


def test_reasoning_without_an_effort_has_the_engines_own():
    efforts = [chat_of("x", reasoning=given).get("reasoning_effort") for given in ({}, {"effort": "low"}, None)]
    assert efforts == ["medium", "low", None]


def test_tools_of_the_engines_own_types_are_in_no_prompt():
    tool = {"type": "function", "name": "look", "parameters": {"type": "object"}}
    function = {"name": "look", "description": None, "parameters": {"type": "object"}, "strict": False}
    chat = chat_of("x", tools=[{"type": "web_search"}, tool], tool_choice={"type": "function", "name": "look"})
    assert chat["tools"] == [{"type": "function", "function": function}]
    assert chat["tool_choice"] == {"type": "function", "function": {"name": "look"}}
    assert "tools" not in chat_of("x", tools=[{"type": "web_search"}], tool_choice="required")


FORWARDED = {
    "stored_messages:previous_response_id": request("x", previous_response_id="resp_1"),
    "not_modelled:tools[0].type": request("x", tools=[{"type": "custom", "name": "n"}]),
    "not_modelled:tool_choice": request("x", tool_choice="some"),
    "not_modelled:reasoning.reasoning_effort": request("x", reasoning={"reasoning_effort": "none"}),
    "not_modelled:input[1].type": request([ASKED, {"type": "item_reference", "id": "i"}]),
    "not_modelled:input[0].role": request([message("tool", "x")]),
    "not_modelled:input[0].phase": request([message("assistant", "x", phase="commentary")]),
    "not_modelled:input[0].content[0].type": request([message("assistant", [{"type": "refusal", "refusal": "no"}])]),
    "not_modelled:input[0].encrypted_content": request([{"type": "reasoning", "encrypted_content": "x"}]),
    "not_modelled:input[0].namespace": request([{**CALL, "namespace": "n"}]),
    "not_modelled:input": request([{"type": "reasoning", "summary": []}]),
    "template_argument:chat_template_kwargs.truncation": request("x", chat_template_kwargs={"truncation": True}),
}


@pytest.mark.parametrize("reason", FORWARDED)
def test_what_is_not_modelled_has_its_reason(reason):
    made = parsed(FORWARDED[reason])
    assert (made.endpoint, [each.label for each in made.inexact]) == (RESPONSES, [reason])
    assert made.body == FORWARDED[reason]


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_variable_that_replaces_the_template_is_refused_on_every_way(engine):
    body = request("x", chat_template_kwargs={"chat_template": "{{ 1 }}"}, previous_response_id="resp_1")
    expected = (400, "chat_template_kwargs.chat_template", "invalid_value")
    assert fault(body, parse=lambda *read: parse_responses(*read, engine)) == expected


async def predicted(request):
    async with preparing(settings(engine="sglang")) as preparer:
        return await preparer.prepare(request, None)


@pytest.mark.parametrize("stored", [False, True])
async def test_a_picture_is_predicted_as_that_of_the_same_chat_and_forwarded_by_its_bytes(stored):
    hidden = result([PICTURE])  # reaches no prompt
    made = parsed(request([user(text("what?"), PICTURE), said("A boat."), CALL, hidden, ASKED]), stored=stored)
    prepared = await predicted(made)
    chat = made.as_chat
    chat["messages"][0]["content"][1]["image_url"]["url"] = URL
    raw = json.dumps({**chat, "model": "t"}).encode()
    same = await predicted(parse_chat(raw, Limits(), "t", "sglang"))
    assert (prepared.exactness, prepared.reasons, made.stored) == ("exact", (), stored)
    assert (prepared.ids, prepared.spans) == (same.ids, same.spans)
    assert [image.param for image in prepared.images] == ["input[0].content[1].image_url"]
    assert prepared.images[0].identity == same.images[0].identity
    parts = [made.body["input"][0]["content"][1], made.body["input"][3]["output"][0]]
    assert parts[0] == {"type": "input_image", "image_url": URL}
    assert parts[1]["image_url"] == URL


@pytest.mark.parametrize("text", ["{{ messages[0].content }}", "{% for m in messages %}{{ m.content }}{% endfor %}"])
async def test_a_router_asks_its_models_template_for_later_system_messages(text):
    async with preparing(settings(engine="sglang")) as preparer:
        made = response_chat("sglang", replace(preparer.prompter, source=text))
        roles = [each["role"] for each in made({"input": [ASKED, message("system", "d")]}).body["messages"]]
        assert (roles[-1] == "system") == shows_later_systems(text)
        own = preparer.response_chat({"input": [ASKED, message("system", "d")]}).body["messages"]
        assert (own[-1]["role"] == "system") == shows_later_systems(preparer.prompter.source)
    async with preparing(settings()) as preparer:
        assert preparer.response_chat is None
