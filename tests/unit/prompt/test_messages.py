"""Messages as vLLM 0.32 passes them to a template."""

import copy
import json

import pytest

from mmrouter_lib.prompt import PlaceholderError, TemplateError
from mmrouter_lib.prompt.messages import conversation, normal_tools, without_developer

MEDIA = {"image": "<pic>", "video": "<film>"}
IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}
VIDEO = {"type": "video_url", "video_url": {"url": "x"}}


def openai(*messages):
    return conversation(messages, "openai", MEDIA)


def string(*messages):
    return conversation(messages, "string", MEDIA)


def openai_content(*parts, role="user"):
    return openai({"role": role, "content": [*parts]})[0]["content"]


def string_content(*parts):
    return string({"role": "user", "content": [*parts]})[0]["content"]


def text(value, **more):
    return {"type": "text", "text": value, **more}


def test_parts_become_template_parts():
    parts = ["plain", text("a"), IMAGE, {"image_url": "http://x"}, {"type": "input_image", "image_url": "x"}]
    parts += [{"type": "refusal", "refusal": "no"}, {"type": "input_text", "text": "in"}]
    parts += [{"type": "thinking", "thinking": "hm"}, VIDEO, {"type": "tool_reference", "name": "f"}]
    wanted = [text("plain"), text("a"), *[{"type": "image"}] * 3, text("no"), text("in"), text("hm")]
    assert openai_content(*parts) == [*wanted, {"type": "video"}, {"type": "tool_reference", "name": "f"}]


def test_a_text_becomes_one_part_and_null_none():
    assert openai({"role": "user", "content": "hi"}) == [{"role": "user", "content": [text("hi")]}]
    assert openai({"role": "assistant", "content": None}) == [{"role": "assistant", "content": []}]
    assert string({"role": "user", "content": "hi"}, {"role": "assistant"}) == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": ""},
    ]


def test_null_texts_are_skipped_and_unknown_fields_passed_on():
    parts = [text(None), {"type": "refusal", "refusal": None}, text("a", cache_control={"type": "x"}, uuid="u")]
    parts.append({**IMAGE, "uuid": "m1-00", "detail": "low"})
    assert openai_content(*parts) == [text("a", cache_control={"type": "x"}), {"type": "image", "detail": "low"}]


def test_a_string_template_gets_media_in_front_of_the_texts_of_its_message():
    parts = [text("one"), IMAGE, text(""), VIDEO, IMAGE, text("two")]
    assert string_content(*parts) == "<pic>\n<pic>\n<film>\none\ntwo"
    assert string_content(IMAGE) == "<pic>"
    assert string_content(text("here <pic> it is"), IMAGE) == "here <pic> it is"


def test_more_media_text_than_media_in_a_string_is_refused():
    with pytest.raises(PlaceholderError, match=r"messages\[1\] holds '<pic>'"):
        string({"role": "user", "content": "<pic>"}, {"role": "user", "content": [text("<pic> and <pic>"), IMAGE]})


def test_a_tools_answer_of_texts_becomes_one_string():
    answer = {"role": "tool", "tool_call_id": "c", "content": [text("a"), text("b")]}
    assert openai(answer) == [{"role": "tool", "content": "a\nb", "tool_call_id": "c"}]
    assert openai({"role": "tool", "content": None})[0]["content"] == ""
    assert openai_content(text("a"), IMAGE, role="tool") == [text("a"), {"type": "image"}]


BAD = ["", None, "nope", "[1]"]


@pytest.mark.parametrize(
    ("arguments", "seen"),
    [('{"b": 1, "a": {"c": [2]}}', {"b": 1, "a": {"c": [2]}}), *[(bad, {}) for bad in BAD], ({"x": 1}, {"x": 1})],
)
def test_tool_calls_carry_their_arguments_as_an_object_in_the_engines_order(arguments, seen):
    call = {"type": "function", "id": "c", "function": {"name": "f", "arguments": arguments, "zz": 1}, "index": 0}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    before = copy.deepcopy(message)
    shown = openai(message)[0]["tool_calls"]
    wanted = [{"id": "c", "function": {"arguments": seen, "name": "f", "zz": 1}, "type": "function", "index": 0}]
    assert json.dumps(shown) == json.dumps(wanted)
    assert message == before


def test_no_tool_calls_are_no_tool_calls():
    for calls in ([], None):
        assert "tool_calls" not in openai({"role": "assistant", "content": "a", "tool_calls": calls})[0]


def test_reasoning_is_seen_under_both_names_and_only_of_the_assistant():
    for field in ("reasoning", "reasoning_content"):
        shown = openai(
            {"role": "assistant", "content": "a", field: "because"}, {"role": "user", "content": "b", field: "x"}
        )
        assert (shown[0]["reasoning"], shown[0]["reasoning_content"]) == ("because", "because")
        assert set(shown[1]) == {"role", "content"}


def test_names_are_passed_on():
    named = {"role": "user", "content": "a", "name": "bob"}
    assert openai(named | {"other": 1}) == [named | {"content": [text("a")]}]


def test_a_billing_line_of_a_client_never_reaches_a_system_prompt():
    line = "x-anthropic-billing-header: cch=abc"
    assert openai({"role": "system", "content": line + "\nBe brief."})[0]["content"] == [text("Be brief.")]
    assert openai_content(text(line), line, text("a"), role="system") == [text("a")]
    assert openai({"role": "user", "content": line})[0]["content"] == [text(line)]


def test_developer_messages_become_one_system_message_in_front():
    chat = openai(
        {"role": "system", "content": "a"},
        {"role": "user", "content": "q"},
        {"role": "developer", "content": [text("b"), text("c")], "tools": []},
    )
    assert without_developer(chat) == [{"role": "system", "content": "a\n\nb\nc"}, chat[1]]
    alone = openai({"role": "developer", "content": "a", "tools": []}, {"role": "user", "content": "q"})
    assert without_developer(alone) == [{"role": "system", "content": [text("a")]}, alone[1]]
    assert without_developer(chat[:2] * 2) == chat[:2] * 2


def test_tools_get_the_fields_that_the_engine_fills_in():
    tools = [
        {"function": {"parameters": {"type": "object"}, "name": "f", "extra": 1}, "other": 2},
        {"type": "function", "function": {"name": "g", "strict": True, "description": "d"}, "defer_loading": False},
    ]
    first = {"name": "f", "description": None, "parameters": {"type": "object"}}
    second = {"name": "g", "description": "d", "parameters": None, "strict": True, "defer_loading": False}
    wanted = [{"type": "function", "function": function} for function in (first, second)]
    assert json.dumps(normal_tools(tools)) == json.dumps([wanted[0], wanted[1] | {"defer_loading": False}])


DEEP = {"name": "f", "arguments": "[" * 100_000}


@pytest.mark.parametrize(
    ("message", "where"),
    [
        ("text", r"messages\[0\]"),
        ({"content": "a"}, r"messages\[0\]"),
        ({"role": 1}, r"messages\[0\]"),
        ({"role": "user", "content": 5}, r"messages\[0\]\.content "),
        ({"role": "user", "content": [5]}, r"messages\[0\]\.content\[0\] must"),
        ({"role": "user", "content": [{"text": "a"}]}, r"content\[0\]\.type is None"),
        ({"role": "user", "content": [text("a"), {"type": "hologram"}]}, r"content\[1\]\.type is 'hologram'"),
        ({"role": "user", "content": [{"type": "image_embeds", "image_embeds": ""}]}, "image_embeds"),
        ({"role": "user", "content": [text(7)]}, r"content\[0\]\.text"),
        ({"role": "user", "content": [{"type": "thinking", "thinking": None}]}, "thinking"),
        ({"role": "assistant", "tool_calls": "f()"}, r"messages\[0\]\.tool_calls must"),
        ({"role": "assistant", "tool_calls": ["f"]}, r"tool_calls\[0\]"),
        ({"role": "assistant", "tool_calls": [{"type": "custom", "function": {}}]}, r"tool_calls\[0\]"),
        ({"role": "assistant", "tool_calls": [{"type": "function"}]}, r"tool_calls\[0\]"),
        ({"role": "assistant", "tool_calls": [{"function": DEEP}]}, r"tool_calls\[0\]\.function\.arguments"),
    ],
)
def test_what_cannot_be_used_is_refused_by_its_place(message, where):
    with pytest.raises(TemplateError, match=where):
        openai(message)


@pytest.mark.parametrize("messages", [[], "hello", {"role": "user"}, None])
def test_messages_must_be_a_list_with_something_in_it(messages):
    with pytest.raises(TemplateError, match="messages"):
        conversation(messages, "openai", MEDIA)


def test_media_without_a_place_in_a_string_is_refused():
    with pytest.raises(TemplateError, match="audio"):
        string({"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]})


@pytest.mark.parametrize("tool", ["f", {}, {"function": {}}, {"function": {"name": 1}}])
def test_a_tool_without_a_named_function_is_refused(tool):
    with pytest.raises(TemplateError, match=r"tools\[0\]"):
        normal_tools([tool])
