"""Rendering: the environment, the arguments of a request, the end of a continued message."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.prompt.conftest import TINY, load

from mmrouter_lib.families import ModelFolderError
from mmrouter_lib.prompt import PromptImage, TemplateError, render_arguments

USER = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"z": 1, "a": "<é>"}}}


@pytest.fixture
def with_template():
    return lambda template: load(TINY, chat_template=template)


def test_blocks_leave_no_blank_lines_and_nothing_is_escaped(with_template):
    template = "{% if true %}\n  {% set a = '<b> & é' %}\n{{ a }}\n{% endif %}\n{{ {'k': a} | tojson }}{{ eos_token }}"
    assert with_template(template).render(USER) == '<b> & é\n{"k": "<b> & é"}<|im_end|>'


def test_json_keeps_the_order_of_keys_and_takes_the_options_of_transformers(with_template):
    template = "{{ tools[0].function.parameters | tojson }}|{{ {'a': [1]} | tojson(indent=2) }}"
    assert with_template(template).render(USER, tools=[TOOL]) == '{"z": 1, "a": "<é>"}|{\n  "a": [\n    1\n  ]\n}'


def test_loop_controls_and_generation_blocks_are_known(with_template):
    template = (
        "{% for n in [1, 2, 3] %}{% if n == 2 %}{% continue %}{% endif %}{{ n }}{% endfor %}"
        "{% generation %}{{ messages[0].content }}{% endgeneration %}"
    )
    assert with_template(template).render(USER) == "13hi"


def test_the_date_is_todays(with_template):
    before = time.strftime("%Y-%m-%d")
    shown = with_template("{{ strftime_now('%Y-%m-%d') }}").render(USER)
    assert shown in (before, time.strftime("%Y-%m-%d"))


def test_a_template_cannot_change_what_it_is_given_or_leave_the_sandbox(with_template):
    for template in ("{{ messages.append(1) }}", "{{ ''.__class__.__mro__ }}", "{{ range(10**9) | list }}"):
        with pytest.raises(TemplateError):
            with_template(template).render(USER)


def test_the_templates_own_error_is_passed_to_the_client(tiny):
    with pytest.raises(TemplateError, match="unknown role wizard"):
        tiny.render([{"role": "wizard", "content": "abracadabra"}])


def test_user_text_is_never_a_template(tiny):
    assert "{{ 7 * 7 }}{% raw %}" in tiny.render([{"role": "user", "content": "{{ 7 * 7 }}{% raw %}"}])


def test_the_generation_prompt_is_added_by_default(tiny):
    assert tiny.render(USER) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tiny.render(USER, add_generation_prompt=False) == "<|im_start|>user\nhi<|im_end|>\n"


SHOW = "{{ [flag, thing is defined, documents, tools is none, add_generation_prompt] | tojson }}"


def test_template_kwargs_reach_the_template_except_unset_ones(with_template):
    shown = with_template(SHOW).render(USER, chat_template_kwargs={"flag": 3, "thing": None, "x": [1]})
    assert shown == "[3, false, null, true, true]"
    assert with_template("{{ flag is defined }}").render(USER, chat_template_kwargs={"flag": "auto"}) == "False"
    assert with_template("{{ eos_token }}").render(USER, chat_template_kwargs={"eos_token": "!"}) == "!"


def test_tools_in_template_kwargs_replace_and_documents_fill_in(with_template):
    prompter, mine, theirs = with_template("{{ [documents, tools] | tojson }}"), [{"title": "a"}], [{"title": "b"}]
    assert prompter.render(USER, chat_template_kwargs={"documents": theirs}) == '[[{"title": "b"}], null]'
    shown = prompter.render(USER, documents=mine, chat_template_kwargs={"documents": theirs})
    assert shown == '[[{"title": "a"}], null]'
    assert prompter.render(USER, tools=[TOOL], chat_template_kwargs={"tools": [{"f": 1}]}) == '[null, [{"f": 1}]]'


def test_request_arguments_win_over_the_same_names_in_template_kwargs(with_template):
    kwargs = {"add_generation_prompt": False, "continue_final_message": True, "tokenize": True}
    assert with_template("{{ add_generation_prompt }}").render(USER, chat_template_kwargs=kwargs) == "True"


@pytest.mark.parametrize("name", ["messages", "conversation", "chat_template", "return_assistant_tokens_mask"])
def test_template_kwargs_cannot_replace_what_the_request_is_made_of(tiny, name):
    with pytest.raises(TemplateError, match=rf"chat_template_kwargs\.{name}"):
        tiny.render(USER, chat_template_kwargs={name: "x"})


@pytest.mark.parametrize("given", [{"tools": "f"}, {"documents": {"title": "a"}}, {"documents": ["a"]}])
def test_tools_and_documents_must_be_lists_of_objects(tiny, given):
    with pytest.raises(TemplateError, match=next(iter(given))):
        tiny.render(USER, chat_template_kwargs=given)


def test_a_chat_body_becomes_render_arguments():
    same = {"tools": [TOOL], "add_generation_prompt": False}
    body = {"messages": USER, "reasoning_effort": "low", "chat_template_kwargs": {"flag": 1}, **same}
    kwargs = {"flag": 1, "reasoning_effort": "low", "enable_thinking": True}
    filled = {"documents": None, "continue_final_message": False, "chat_template_kwargs": kwargs}
    assert render_arguments(body) == same | filled
    assert body["chat_template_kwargs"] == {"flag": 1}
    given = {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}
    assert render_arguments(given)["chat_template_kwargs"] == {"reasoning_effort": "none", "enable_thinking": True}
    assert render_arguments({"reasoning_effort": "none"})["chat_template_kwargs"]["enable_thinking"] is False
    assert render_arguments({})["add_generation_prompt"] is True
    with pytest.raises(TemplateError, match="chat_template_kwargs"):
        render_arguments({"chat_template_kwargs": "x"})


PREFILL = [*USER, {"role": "assistant", "content": "The answer is"}]


def test_a_continued_message_ends_where_it_ends(tiny):
    shown = tiny.render(PREFILL, add_generation_prompt=False, continue_final_message=True)
    assert shown == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nThe answer is"


def test_trailing_space_is_kept_or_stripped_as_the_template_does(tiny, with_template):
    spaced = [*USER, {"role": "assistant", "content": [{"type": "text", "text": "a "}, {"type": "image_url"}]}]
    shown = tiny.render(spaced, add_generation_prompt=False, continue_final_message=True)
    assert shown.endswith("assistant\na ")
    stripping = with_template("{% for m in messages %}[{{ m.content | trim }}]{% endfor %}")
    ended = [*USER, {"role": "assistant", "content": "a \n"}]
    assert stripping.render(ended, add_generation_prompt=False, continue_final_message=True) == "[hi][a"


EVERY_PART = "{% for m in messages %}{% for c in m.content %}{{ c.text }}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "messages"),
    [
        ("{% for m in messages %}{{ m.role }}{% endfor %}", PREFILL),
        ("{{ messages[0].content }}", PREFILL),
        ("{% for m in messages %}{{ m.content | upper }}{% endfor %}", PREFILL),
        (EVERY_PART, [{"role": "assistant"}]),
    ],
)
def test_a_final_message_that_cannot_be_continued_is_refused(with_template, template, messages):
    with pytest.raises(TemplateError, match="continue_final_message"):
        with_template(template).render(messages, add_generation_prompt=False, continue_final_message=True)


def test_continuing_and_beginning_a_message_exclude_each_other(tiny):
    with pytest.raises(TemplateError, match="both"):
        tiny.render(PREFILL, continue_final_message=True)


def test_a_template_with_a_role_for_developers_keeps_theirs(with_template, tiny):
    chat = [*USER, {"role": "developer", "content": "Be brief."}]
    assert tiny.render(chat).startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi")
    knowing = with_template("{% for m in messages %}{{ m.role }} {% endfor %}{# 'developer' #}")
    assert knowing.render(chat) == "user developer "


def test_a_template_that_does_not_compile_is_refused_at_load(with_template):
    for template in ("{% if %}", "{{ x | no_such_filter }}"):
        with pytest.raises(ModelFolderError, match="does not compile"):
            with_template(template)


TEXT = st.fixed_dictionaries({"type": st.just("text"), "text": st.text(max_size=12)})
PARTS = st.lists(TEXT | st.just({"type": "image_url", "image_url": {"url": "data:,"}}), max_size=4)
ROLES = st.sampled_from(["user", "assistant", "system"])
CHATS = st.lists(st.fixed_dictionaries({"role": ROLES, "content": PARTS}), min_size=1, max_size=4)


@given(CHATS)
def test_every_image_of_a_conversation_gets_its_own_place_in_order(tiny, messages):
    number = sum(part["type"] == "image_url" for message in messages for part in message["content"])
    images = [PromptImage(n.to_bytes(32, "big"), n + 1) for n in range(number)]
    expanded = tiny.expand(tiny.render(messages), images)
    assert [span.identity for span in expanded.spans] == [image.identity for image in images]
    start, end = (tiny.tokenizer.token_to_id(f"<|vision_{edge}|>") for edge in ("start", "end"))
    for span in expanded.spans:
        assert (expanded.ids[span.offset - 1], expanded.ids[span.end]) == (start, end)
    pad = tiny.tokenizer.token_to_id("<|image_pad|>")
    assert expanded.ids.count(pad) == sum(image.count for image in images)


def test_threads_share_one_prompter(tiny):
    texts = [f"message {n} " * (n + 1) for n in range(24)]

    def ids(text: str) -> object:
        return tiny.expand(tiny.render([{"role": "user", "content": text}]), []).ids

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(ids, texts)) == [ids(text) for text in texts]
