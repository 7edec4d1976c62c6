"""Values that a client may put where a message has texts, parts or calls, and what every prompter does with them."""

from typing import Any

import pytest
from hypothesis import strategies as st

from mmrouter_lib.prompt import NotModelledError, TemplateError
from mmrouter_lib.prompt.segment_cache import NEW_TEXT, NewTextError

USER = {"role": "user", "content": "How are you?"}

NAMES = ("text", "function", "name", "id", "arguments")
MESSAGE_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(NAMES), inner),
)


def check_any_value_is_a_prompt_or_a_refusal(prompter: Any, value: object) -> None:
    for message in ({"role": "user", "content": value}, {"role": "assistant", "tool_calls": value}):
        try:
            prompter.prompt({"messages": [USER, message, USER]}, ())
        except (TemplateError, NotModelledError):
            continue


def check_new_text_is_bounded(prompter: Any, completion: str = "How are you?") -> None:
    token = NEW_TEXT.set(10)
    try:
        with pytest.raises(NewTextError):
            prompter.prompt({"messages": [USER]}, ())
        with pytest.raises(NewTextError):
            prompter.completion(completion)
    finally:
        NEW_TEXT.reset(token)
