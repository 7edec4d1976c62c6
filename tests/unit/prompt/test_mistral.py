"""Prompts by ``mistral_common``. Against vLLM's own: ``tests/conformance/vllm/test_mistral.py``."""

import json
import sys
from array import array
from pathlib import Path

import pytest
from hypothesis import given, settings
from unit.prompt.message_values import (
    MESSAGE_VALUES,
    USER,
    check_any_value_is_a_prompt_or_a_refusal,
    check_new_text_is_bounded,
)
from unit.prompt.tekken import write

from mmrouter_lib.engines.text_models import UnpredictedError, load_text_prompter
from mmrouter_lib.prompt import MistralPrompter, NotModelledError, PromptImage, PromptTooLongError, TemplateError
from mmrouter_lib.prompt.segment_cache import MAX_WORD

ANSWER = {"role": "assistant", "content": "Fine"}


@pytest.fixture(scope="module")
def prompter(tmp_path_factory: pytest.TempPathFactory) -> MistralPrompter:
    loaded = load_text_prompter("vllm", write(tmp_path_factory.mktemp("tekken")))
    assert isinstance(loaded, MistralPrompter)
    return loaded


def text(prompter: MistralPrompter, *messages: dict, **fields: object) -> str:
    return prompter.decode(prompter.prompt({"messages": list(messages), **fields}, ()).ids)


def test_the_library_makes_the_prompt(prompter):
    system = {"role": "system", "content": "Be brief."}
    want = "<s>[SYSTEM_PROMPT]Be brief.[/SYSTEM_PROMPT][INST]How are you?[/INST]Fine</s>[INST]How are you?[/INST]"
    assert text(prompter, system, USER, ANSWER, USER) == want
    ids = prompter.prompt({"messages": [{"role": "user", "content": "</s>"}]}, ()).ids
    assert list(ids).count(2) == 0  # a typed special token is a text


def test_a_continued_answer_stays_open(prompter):
    continued = {"continue_final_message": True, "add_generation_prompt": False}
    assert text(prompter, USER, ANSWER, **continued) == "<s>[INST]How are you?[/INST]Fine"


def test_long_ids_of_calls_are_cut_on_both_sides_and_the_request_stays_as_it_is(prompter):
    call = {"id": "call_0123456789", "type": "function", "function": {"name": "now", "arguments": '{"a":1}'}}
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]
    messages.append({"role": "tool", "tool_call_id": "call_0123456789", "content": "noon"})
    before = json.dumps(messages)
    assert '"id": "123456789"' in text(prompter, *messages)
    assert json.dumps(messages) == before


REFUSED = {
    "ends with an answer": {"messages": [USER, ANSWER]},
    "both ends": {"messages": [USER, ANSWER], "continue_final_message": True},
    "continued question": {"messages": [USER], "continue_final_message": True, "add_generation_prompt": False},
    "template variables": {"messages": [USER], "chat_template_kwargs": {"a": 1}},
    "effort": {"messages": [USER], "reasoning_effort": "utmost"},
    "unknown role": {"messages": [{"role": "critic", "content": "No."}]},
    "result without a call": {"messages": [USER, {"role": "tool", "tool_call_id": "123456789", "content": "x"}]},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_engine_refuses_is_refused(prompter, name):
    with pytest.raises(TemplateError):
        prompter.prompt(REFUSED[name], ())


def test_an_image_is_not_predicted(prompter):
    with pytest.raises(NotModelledError) as caught:
        prompter.prompt({"messages": [USER]}, [PromptImage(bytes(32), 1)])
    assert caught.value.reason == "family:mistral"


def test_a_completion_begins_with_a_token_unless_the_request_says_otherwise(prompter):
    whole, bare = (prompter.completion("Hello [INST]", add_special_tokens=add).ids for add in (True, False))
    assert whole == array("I", [1]) + bare
    assert prompter.decode(bare) == "Hello [INST]"
    assert prompter.completion(whole).ids == whole


def test_work_is_bounded(prompter):
    with pytest.raises(PromptTooLongError):
        prompter.prompt({"messages": [{"role": "user", "content": "a" * (MAX_WORD + 1)}]}, ())
    with pytest.raises(PromptTooLongError):
        prompter.completion(" " * (MAX_WORD + 1))
    check_new_text_is_bounded(prompter)


@given(MESSAGE_VALUES)
@settings(max_examples=200)
def test_any_value_in_a_message_is_a_prompt_or_a_refusal(prompter, value):
    check_any_value_is_a_prompt_or_a_refusal(prompter, value)


def reason(folder: Path) -> str:
    with pytest.raises(UnpredictedError) as caught:
        load_text_prompter("vllm", folder)
    return str(caught.value)


def test_without_weights_of_that_format_or_the_library_there_is_a_reason(tmp_path, monkeypatch):
    folder = write(tmp_path)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "mistral_common.tokens.tokenizers.mistral", None)
        assert reason(folder) == "tokenizer:tekken.json"
    (folder / "consolidated.safetensors").unlink()
    assert reason(folder) == "tokenizer:tekken.json"
