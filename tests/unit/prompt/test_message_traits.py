"""What a chat template says about system messages and thinking, as vLLM's probes find it out."""

from types import SimpleNamespace

import pytest

from mmrouter_lib.prompt.message_traits import effort_without_thinking, wants_system_first
from mmrouter_lib.prompt.templates import Templates

ANYWHERE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
REFUSAL = "{% if m.role == 'system' and not loop.first %}{{ raise_exception('no') }}{% endif %}"
FIRST = f"{{% for m in messages %}}{REFUSAL}{{% endfor %}}"


@pytest.mark.parametrize(
    ("processor", "tokenizer", "merged"),
    [
        (None, {"default": ANYWHERE}, False),
        (None, {"default": FIRST}, True),
        (None, {"default": ANYWHERE, "tool_use": FIRST}, True),
        (FIRST, {"default": ANYWHERE}, True),
        (None, {}, True),
        (None, {"default": "{{ strftime_now('%d') }}"}, True),
        (None, {"default": "{{ messages[0].content + 1 }}"}, True),
    ],
)
def test_system_messages_are_merged_where_any_template_fails_on_several(processor, tokenizer, merged):
    assert wants_system_first(Templates(processor, tokenizer)) == merged


@pytest.mark.parametrize(
    ("prompts", "effort"),
    [
        (lambda given: given, "none"),
        (lambda given: "the same", "low"),
        (lambda given: "max" if given in ("none", "max") else given, "low"),
    ],
)
def test_disabled_thinking_is_none_only_where_the_template_tells_it_from_every_effort(prompts, effort):
    def render(messages, *, chat_template_kwargs, **_):
        return prompts(chat_template_kwargs["reasoning_effort"])

    assert effort_without_thinking(SimpleNamespace(render=render)) == effort


def test_disabled_thinking_is_low_where_the_template_refuses_none():
    def render(messages, *, chat_template_kwargs, **_):
        if chat_template_kwargs["reasoning_effort"] == "none":
            raise ValueError
        return "x"

    assert effort_without_thinking(SimpleNamespace(render=render)) == "low"
