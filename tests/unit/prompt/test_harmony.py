"""Prompts of gpt-oss in the Harmony format. Against vLLM's own: ``tests/conformance/vllm/test_harmony.py``."""

import json
import time
from array import array
from dataclasses import replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.prompt.message_values import (
    MESSAGE_VALUES,
    USER,
    check_any_value_is_a_prompt_or_a_refusal,
    check_new_text_is_bounded,
)
from unit.prompt.o200k import write

from mmrouter_lib.engines.text_models import UnpredictedError, load_text_prompter
from mmrouter_lib.prompt import HarmonyPrompter, NotModelledError, PromptImage, PromptTooLongError, TemplateError
from mmrouter_lib.prompt.segment_cache import MAX_WORD

DAY = "VLLM_SYSTEM_START_DATE"
ANSWER = {"role": "assistant", "content": "Fine", "reasoning": "Easy."}
CALL = {"id": "call_1", "type": "function", "function": {"name": "now", "arguments": '{"a":1}'}}
CALLING = {"role": "assistant", "content": "Wait.", "reasoning": "A call.", "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "noon"}
NOW = {"type": "function", "function": {"name": "now", "description": "The time."}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("o200k"))


@pytest.fixture(scope="module")
def prompter(folder: Path) -> HarmonyPrompter:
    loaded = load_text_prompter("vllm", folder, variables=[{DAY: "2026-01-02"}, {DAY: "2026-01-02", "TZ": "UTC"}])
    assert isinstance(loaded, HarmonyPrompter)
    return loaded


def text(prompter: HarmonyPrompter, *messages: dict, **fields: object) -> str:
    whole = prompter.decode(prompter.prompt({"messages": list(messages), **fields}, ()).ids)
    assert whole.startswith("<|start|>system<|message|>")
    assert whole.endswith("<|start|>assistant")
    return whole


def test_a_chat_has_a_system_message_with_the_day_and_the_effort(prompter):
    shown = text(prompter, {"role": "system", "content": " Be brief. "}, USER, reasoning_effort="low")
    assert "\nCurrent date: 2026-01-02\n\nReasoning: low\n" in shown
    assert "<|start|>developer<|message|># Instructions\n\n Be brief. <|end|><|start|>user<|message|>How" in shown


def test_reasoning_is_shown_until_an_answer_follows_it(prompter):
    before = text(prompter, USER, CALLING, RESULT)
    assert "<|channel|>analysis<|message|>A call.<|end|>" in before
    after = text(prompter, USER, CALLING, RESULT, ANSWER, USER)
    assert "A call." not in after
    assert "Easy." not in after
    assert "<|start|>assistant<|channel|>final<|message|>Fine<|end|>" in after


def test_calls_and_results_name_the_function_and_the_request_stays_as_it_is(prompter):
    messages = [USER, CALLING, RESULT]
    before = json.dumps(messages)
    shown = text(prompter, *messages, tools=[NOW])
    assert '<|start|>assistant to=functions.now<|channel|>commentary json<|message|>{"a":1}<|call|>' in shown
    assert "<|start|>functions.now<|channel|>commentary to=assistant<|message|>noon<|end|>" in shown
    assert "namespace functions {\n\n// The time.\ntype now = () => any;\n\n}" in shown
    assert json.dumps(messages) == before


@given(st.lists(st.text(), min_size=1, max_size=3), st.text())
@settings(max_examples=300)
def test_the_ids_are_those_of_the_library_with_the_texts_in_it(prompter, texts, instructions):
    from openai_harmony import Conversation, DeveloperContent, Message, Role, SystemContent, TextContent

    system = SystemContent.new().with_conversation_start_date("2026-01-02")
    developer = DeveloperContent.new().with_instructions(instructions)
    parts = [TextContent(text=one) for one in texts]
    whole = [Message.from_role_and_content(Role.SYSTEM, system)]
    whole += [Message.from_role_and_content(Role.DEVELOPER, developer)] if instructions else []
    whole += [Message.from_role_and_contents(Role.USER, parts)]
    want = prompter.made.render_conversation_for_completion(Conversation.from_messages(whole), Role.ASSISTANT)
    messages = [{"role": "developer", "content": instructions}]
    messages += [{"role": "user", "content": [{"type": "text", "text": one} for one in texts]}]
    assert prompter.prompt({"messages": messages}, ()).ids.tolist() == want


def test_every_character_is_tokenized_as_by_the_library(prompter):
    codes = [*range(0xD800), *range(0xE000, 0x33480), *range(0xE0000, 0xE0200)]  # all but unassigned and private planes
    for start in range(0, len(codes), 64):
        shown = "".join(f"a{chr(code)}B1 {chr(code)}" for code in codes[start : start + 64])
        assert prompter.texts.encode_ordinary(shown) == prompter.made.encode(shown, disallowed_special=()), hex(start)


REFUSED = {
    "both ends": {"messages": [USER, ANSWER], "continue_final_message": True, "add_generation_prompt": True},
    "effort": {"messages": [USER], "reasoning_effort": "none"},
    "unknown role": {"messages": [{"role": "critic", "content": "No."}]},
    "no messages": {"messages": []},
    "half of a character": {"messages": [{"role": "user", "content": "\ud800"}]},
    "half of a character in a tool": {"messages": [USER], "tools": [{"function": {"name": "\ud800"}}]},
    "call of a name with a token": {
        "messages": [USER, {**CALLING, "tool_calls": [{**CALL, "function": {"name": "<|end|>", "arguments": ""}}]}]
    },
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_engine_refuses_is_refused(prompter, name):
    with pytest.raises(TemplateError):
        prompter.prompt(REFUSED[name], ())


UNKNOWN = {
    "a picture": {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]},
    "no parts": {"role": "user", "content": []},
    "an incomplete call": {"role": "assistant", "tool_calls": [{**CALL, "id": None}]},
    "a question with calls": {**USER, "tool_calls": [CALL]},
    "no text": {"role": "assistant", "content": 5},
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_other_messages_are_not_predicted(prompter, name):
    with pytest.raises(NotModelledError) as caught:
        prompter.prompt({"messages": [USER, UNKNOWN[name]]}, ())
    assert caught.value.reason == "not_modelled:messages"


def test_an_image_is_not_predicted(prompter):
    with pytest.raises(NotModelledError) as caught:
        prompter.prompt({"messages": [USER]}, [PromptImage(bytes(32), 1)])
    assert caught.value.reason == "family:gpt_oss"


def at(prompter: HarmonyPrompter, *moment: int) -> HarmonyPrompter:
    return replace(prompter, day=None, now=lambda: datetime(*moment, tzinfo=UTC))


@pytest.fixture
def utc(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield monkeypatch
    monkeypatch.undo()
    time.tzset()


def test_the_day_is_that_of_the_clock_but_not_around_midnight(prompter, utc):
    assert "Current date: 2026-03-01\n" in text(at(prompter, 2026, 3, 1, 0, 1), USER)
    assert "Current date: 2026-03-01\n" in text(at(prompter, 2026, 3, 1, 23, 58, 59), USER)
    for moment in ((2026, 2, 28, 23, 59, 1), (2026, 3, 1, 0, 0, 59)):
        with pytest.raises(NotModelledError) as caught:
            at(prompter, *moment).prompt({"messages": [USER]}, ())
        assert caught.value.reason == "day:messages"


def test_the_day_is_not_predicted_while_this_machine_has_another_one(prompter, utc):
    utc.setenv("TZ", "UTC-2")  # two hours before UTC
    time.tzset()
    assert "Current date: 2026-03-01\n" in text(at(prompter, 2026, 3, 1, 21), USER)
    with pytest.raises(NotModelledError):
        at(prompter, 2026, 3, 1, 23).prompt({"messages": [USER]}, ())


def test_a_completion_is_tokenized_by_the_folder(prompter):
    ids = prompter.completion("Hello <|end|>").ids
    assert ids[-1] == 200_007
    assert prompter.completion(ids).ids == ids
    assert prompter.completion("Hello", add_special_tokens=False).ids == prompter.completion("Hello").ids
    assert isinstance(ids, array)


def test_work_is_bounded(prompter):
    long = "a" * (MAX_WORD + 1)
    for content in (long, [{"type": "text", "text": " " * (MAX_WORD + 1)}]):
        with pytest.raises(PromptTooLongError):
            prompter.prompt({"messages": [{"role": "user", "content": content}]}, ())
    for description in ("a" * 10_000, "a " * 300_000):
        tool = {"function": {"name": "now", "description": description}}
        with pytest.raises(PromptTooLongError):
            prompter.prompt({"messages": [USER], "tools": [tool]}, ())
    check_new_text_is_bounded(prompter)


@given(MESSAGE_VALUES)
@settings(max_examples=200)
def test_any_value_in_a_message_is_a_prompt_or_a_refusal(prompter, value):
    check_any_value_is_a_prompt_or_a_refusal(prompter, value)


def reason(folder: Path, *pools: dict) -> str:
    with pytest.raises(UnpredictedError) as caught:
        load_text_prompter("vllm", folder, variables=pools)
    return str(caught.value)


def test_without_the_library_there_is_a_reason(folder, monkeypatch):
    def version(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr("mmrouter_lib.prompt.harmony.version", version)
    assert reason(folder) == "engine_prompts:gpt_oss"


def test_variables_that_change_prompts_are_reasons(folder):
    assert reason(folder, {DAY: "2026-01-02"}, {}) == f"engine_prompts:{DAY}"
    assert reason(folder, {DAY: None}) == f"engine_prompts:{DAY}"
    name = "VLLM_GPT_OSS_HARMONY_SYSTEM_INSTRUCTIONS"
    assert reason(folder, {}, {name: "1"}) == f"engine_prompts:{name}"
    assert reason(folder, {"TZ": "Asia/Tokyo"}) == "engine_prompts:TZ"
