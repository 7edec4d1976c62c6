"""SGLang's rules around a chat template. ``tests/conformance/sglang/test_rendering.py`` compares them with its code."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken
from tokenizers.processors import TemplateProcessing
from unit.prompt.conftest import TINY, image

from mmrouter_lib import families
from mmrouter_lib.engines.prompters import PROMPTERS
from mmrouter_lib.engines.sglang.prompts.chats import template_variables
from mmrouter_lib.engines.sglang.prompts.conversation_form import PADDLEOCR
from mmrouter_lib.engines.sglang.prompts.prompter import SglangPrompter
from mmrouter_lib.engines.sglang.prompts.response_chats import shows_later_systems
from mmrouter_lib.engines.sglang.prompts.tool_schemas import shown_tools, with_standard_types
from mmrouter_lib.families.gemma3 import BEGIN, END, PICTURE, Gemma3
from mmrouter_lib.families.gemma4 import Gemma4
from mmrouter_lib.families.glm4v import Glm4v
from mmrouter_lib.families.paddleocr import PaddleOCRVL
from mmrouter_lib.prompt import NotModelledError, PlaceholderError, TemplateError
from mmrouter_lib.prompt.message_traits import wants_system_first

ASK = {"role": "user", "content": "hi"}
ANSWER = {"role": "assistant", "content": "So"}
SHOW = "{# image #}{{ messages | tojson }}"
PAGE = {"type": "image_url", "image_url": {"url": "data:,"}}
PLACE = "<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>"


def load(template: str | None = None) -> SglangPrompter:
    family = families.load_family(TINY, None)
    loaded = PROMPTERS["sglang"].load(TINY, family=family, chat_template=template)
    assert isinstance(loaded, SglangPrompter)
    return loaded


def shown(template: str | None = None, images=(), **body) -> str:
    prompter = load(template)
    return prompter.tokenizer.decode(prompter.prompt(body, images).ids, skip_special_tokens=False)


def test_an_answer_at_the_end_becomes_a_question_unless_it_goes_on():
    question = "<|im_start|>user\nhi<|im_end|>\n"
    assert shown(messages=[ASK, ANSWER]) == question + "<|im_start|>user\nSo<|im_end|>\n<|im_start|>assistant\n"
    continued = question + "<|im_start|>assistant\nSo"
    assert shown(messages=[ASK, ANSWER], continue_final_message=True) == continued
    assert shown(messages=[ASK, ANSWER], continue_final_message=True, add_generation_prompt=False) == continued


def test_the_text_that_goes_on_is_tokenized_apart_except_beside_an_image():
    prompter = load("{# image #}{% for m in messages %}{% for c in m.content %}<|image_pad|>{% endfor %}{% endfor %}a")
    apart, whole = (prompter.codec.encode(text, add_special_tokens=False) for text in ("a", "<|image_pad|>aa"))
    body = {"messages": [ASK, {"role": "assistant", "content": "a"}], "continue_final_message": True}
    assert (
        prompter.prompt(body | {"messages": [{**ASK, "content": []}, *body["messages"][1:]]}, []).ids == apart + apart
    )
    seen = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}, *body["messages"][1:]]
    assert prompter.prompt(body | {"messages": seen}, [image(1, 1)]).ids == whole


@pytest.mark.parametrize("place", ["<image>", "<|vision_start|><|image_pad|><|vision_end|>", "<|image_pad|>"])
def test_a_typed_place_beside_an_image_is_not_modelled_because_the_engine_fails_at_it(place):
    seen = {"type": "image_url", "image_url": {"url": "data:,"}}

    def ids(text: str, *images) -> int:
        content = [*({**seen} for _ in images), {"type": "text", "text": text}]
        return len(load().prompt({"messages": [{"role": "user", "content": content}]}, images).ids)

    assert ids(place), "without an image it is a text"
    assert ids("an image", image(1, 1))
    with pytest.raises(NotModelledError, match="another place for an image"):
        ids(place, image(1, 1))


FAMILIES = {
    "gemma3": (lambda of: Gemma3(of(BEGIN), of(PICTURE), of(END), 2), BEGIN),
    "gemma4": (lambda of: Gemma4(of("<|image|>"), 2, 3, 16, 3, 280), "<|image|>"),
    "glm4v": (lambda of: Glm4v("glm4v", of("<|image|>"), 28, 9, 99), "<|begin_of_image|><|image|><|end_of_image|>"),
    "paddleocr": (lambda of: PaddleOCRVL(of("<|IMAGE_PLACEHOLDER|>"), 28, 9, 99, of("<|VIDEO|>")), PLACE),
}
"""Family -> what makes it of the ids of its tokens, and what a template writes for an image."""


def of_family(name: str, template: str | None, *, begins: bool = False) -> SglangPrompter:
    """The tiny model's tokenizer with the tokens of another family. ``begins``: it adds ``<bos>`` to a text."""
    tokenizer, make = load().tokenizer, FAMILIES[name][0]

    def of(text: str) -> int:
        tokenizer.add_special_tokens([AddedToken(text, special=True)])
        return tokenizer.token_to_id(text)

    if begins:
        tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", of("<bos>"))])
    made = SglangPrompter.load(TINY, family=make(of), tokenizer=tokenizer, chat_template=template)
    codec = replace(made.codec, begin_id=tokenizer.token_to_id("<bos>"))
    return replace(made, codec=codec, variables={"bos_token": "<bos>"}) if begins else made


@pytest.mark.parametrize(
    ("name", "typed"),
    [
        *(("gemma3", typed) for typed in (BEGIN, PICTURE)),
        *(("gemma4", typed) for typed in ("<|image|>", "<|video|>", "<|audio|>")),
        *(("glm4v", typed) for typed in ("<|image|>", "<|video|>", "<|begin_of_video|>")),
        *(("paddleocr", typed) for typed in ("<|IMAGE_PLACEHOLDER|>", "<|VIDEO|>")),
    ],
)
def test_the_tokens_of_other_media_are_places_too(name, typed):
    parts = "{% for part in messages[0].content %}{{ part.text or 'PLACE' }}{% endfor %}"
    prompter = of_family(name, "{# image #}" + parts.replace("PLACE", FAMILIES[name][1]))

    def ids(text: str, *images) -> list[int]:
        content = [
            *({"type": "image_url", "image_url": {"url": "data:,"}} for _ in images),
            {"type": "text", "text": text},
        ]
        return prompter.prompt({"messages": [{"role": "user", "content": content}]}, images).ids.tolist()

    assert ids("an image", image(1, 1))
    assert ids(typed), "without an image it is a text"
    with pytest.raises(
        PlaceholderError if name == "paddleocr" else NotModelledError, match="another place for an image"
    ):
        ids(typed, image(1, 1))


def test_a_text_that_the_template_begins_is_not_begun_again_beside_an_image():
    template = "{# image #}<bos>{% for part in messages[0].content if part.type == 'image' %}PLACE{% endfor %}a"
    prompter, other = (
        of_family(name, template.replace("PLACE", FAMILIES[name][1]), begins=True) for name in ("gemma3", "paddleocr")
    )
    bos, begin, picture, end = map(prompter.tokenizer.token_to_id, ("<bos>", BEGIN, PICTURE, END))
    seen = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}
    assert prompter.prompt({"messages": [ASK]}, []).ids.tolist()[:2] == [bos, bos]
    ids = prompter.prompt({"messages": [seen]}, [image(1, 1)]).ids.tolist()
    assert (ids.count(bos), ids[0]) == (1, bos)
    assert ids[ids.index(begin) :][:4] == [begin, picture, picture, end]
    with pytest.raises(NotModelledError, match="begins twice"):
        other.prompt({"messages": [seen]}, [image(1, 1)])


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ([ASK], "User: hi\nAssistant: "),
        ([{"role": "user", "content": [PAGE, {"type": "text", "text": "OCR:"}]}], f"User: {PLACE}OCR:\nAssistant: "),
        ([{"role": "user", "content": ""}], "User: Assistant: "),
        ([ASK, ANSWER, ASK], "User: hi\nAssistant: So<|end_of_sentence|>User: hi\nAssistant: "),
        (
            [ASK, {"role": "system", "content": [{"type": "text", "text": "Be brief."}]}],
            "Be brief.User: hi\nAssistant: ",
        ),
        (
            [{"role": "user", "content": [*[PAGE] * 17, {"type": "text", "text": "OCR:"}]}],
            f"User: {PLACE * 17}\nOCR:\nAssistant: ",
        ),
    ],
)
def test_chats_of_paddleocr_have_the_engines_own_form(messages, text):
    assert PADDLEOCR.text({"messages": messages}) == f"<|begin_of_sentence|>{text}"


def test_an_answer_of_paddleocr_goes_on_without_its_end_and_is_a_turn_otherwise():
    turn = "<|begin_of_sentence|>User: hi\nAssistant: So"
    assert PADDLEOCR.text({"messages": [ASK, ANSWER], "continue_final_message": True}) == turn
    assert PADDLEOCR.text({"messages": [ASK, ANSWER]}) == f"{turn}<|end_of_sentence|>Assistant: "
    ended = {"role": "assistant", "content": "So<|end_of_sentence|>"}
    assert PADDLEOCR.text({"messages": [ASK, ended], "continue_final_message": True}) == turn


@pytest.mark.parametrize(
    "message",
    [
        {"role": "tool", "content": "x", "tool_call_id": "1"},
        {"role": "developer", "content": "x"},
        {"role": "system", "content": [PAGE]},
        {"role": "assistant", "content": [{"type": "text", "text": "a"}] * 2},
        {"role": "user", "content": None},
        {"role": "user", "content": [{"type": "file"}]},
        {"role": "user", "content": [{"type": "text"}]},
        {"role": "user", "content": ["hi"]},
        "hi",
    ],
)
def test_messages_that_the_form_of_paddleocr_has_no_place_for_are_refused(message):
    with pytest.raises(TemplateError, match=r"messages\[1\]"):
        PADDLEOCR.text({"messages": [ASK, message]})


def test_the_form_of_paddleocr_takes_the_place_of_the_folders_template_alone():
    own, given = (of_family("paddleocr", template) for template in (None, "{{ messages[0].content }}"))
    body = {"messages": [ASK, {"role": "system", "content": "Hm."}]}
    assert own.decode(own.prompt(body, []).ids) == "<|begin_of_sentence|>Hm.User: hi\nAssistant: "
    assert given.decode(given.prompt(body, []).ids) == "hi"
    with pytest.raises(TemplateError, match="reasoning_effort"):
        own.prompt({**body, "reasoning_effort": "extreme"}, [])
    assert wants_system_first(own.templates)
    assert not shows_later_systems(own.source)


def test_an_image_without_a_place_is_not_modelled_because_the_engine_drops_it():
    prompter = load("{# image #}{{ messages[0].role }}")
    seen = [{"type": "image_url", "image_url": {"url": "data:,"}}]
    with pytest.raises(NotModelledError, match="a place for 0 images, the request has 1"):
        prompter.prompt({"messages": [{"role": "user", "content": seen}]}, [image(1, 1)])


def test_messages_keep_the_fields_of_the_engines_model_alone():
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"b": 1, "a": 2.0}'}}
    messages = [
        {**ASK, "name": "anna"},
        {"role": "assistant", "content": None, "reasoning": "x", "reasoning_content": "y", "tool_calls": [call]},
        {
            "role": "tool",
            "tool_call_id": "c",
            "content": [{"type": "text", "text": "1"}, {"type": "text", "text": "2"}],
        },
        {"role": "developer", "content": [{"type": "text", "text": "z"}]},
    ]
    assert shown(SHOW, messages=messages) == (
        '[{"role": "user", "content": "hi"}, {"role": "assistant", "content": "", "reasoning_content": "y", '
        '"tool_calls": [{"id": "c", "index": null, "type": "function", "function": {"name": "f", "arguments": '
        '{"b": 1, "a": 2.0}}}]}, {"role": "tool", "tool_call_id": "c", "content": "1 2"}, '
        '{"role": "developer", "content": [{"type": "text", "text": "z"}]}]'
    )


@pytest.mark.parametrize("arguments", ["", "[1]", "{'a': 1}", '{"a": NaN}'])
def test_arguments_of_a_call_that_are_no_object_are_refused(arguments):
    call = {"id": "c", "function": {"name": "f", "arguments": arguments}}
    with pytest.raises(TemplateError, match=r"messages\[0\]\.tool_calls\[0\]\.function\.arguments"):
        shown(messages=[{"role": "assistant", "content": "x", "tool_calls": [call]}, ASK])


def test_a_template_of_texts_has_no_place_for_images():
    texts = "{% for m in messages %}{{ m.content }}{% endfor %}"
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert shown(texts, messages=[{**ASK, "content": parts}]) == "a b"
    with pytest.raises(NotModelledError):
        shown(texts, [image(1, 1)], messages=[{**ASK, "content": parts}])


def called(*ids):
    """Return a message with calls of these ids."""
    calls = [{"id": each, "function": {"name": "f", "arguments": "{}"}} for each in ids]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def result(name, content):
    return {"role": "tool", "tool_call_id": name, "content": content}


def test_results_with_media_that_the_engine_would_put_in_order_are_not_predicted():
    results = [result(name, [{"type": "text", "text": name}]) for name in "ba"]
    messages = [called("a", "b", {}, "a"), *results, ASK]
    assert shown(SHOW, messages=messages)
    with pytest.raises(NotModelledError):
        shown(SHOW + "{{ messages[1].tool_call_id }}", messages=messages)
    messages[1:3] = reversed(results)
    assert shown(SHOW + "{{ messages[1].tool_call_id }}", messages=messages)


class Counted(str):
    """A text that counts how often it is compared."""

    compared = 0
    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other):
        Counted.compared += 1
        return str.__eq__(self, other)


def test_the_work_for_many_results_and_type_words_grows_with_their_number():
    many, Counted.compared = [Counted(number) for number in range(300)], 0
    messages = [called(*many), *(result(each, "") for each in reversed(many)), ASK]
    assert load(SHOW + "{{ messages[0].tool_call_id }}").prompt({"messages": messages}, ()).ids
    assert with_standard_types({"type": many}) == {"type": many}
    assert Counted.compared < 10 * len(many)


TOOLS = [
    {"type": "function", "function": {"parameters": {"type": "map"}, "name": "f", "strict": False}},
    {"function": {"name": "g"}, "defer_loading": True},
]
F = {
    "type": "function",
    "function": {"parameters": {"type": "object"}, "name": "f", "strict": False, "description": None},
}
G = {"type": "function", "function": {"name": "g", "description": None, "parameters": None, "defer_loading": True}}


def test_the_choice_of_tools_decides_which_are_shown_in_the_clients_order_of_keys():
    both = [F | {"defer_loading": None}, G | {"defer_loading": True}]
    assert [list(tool["function"]) for tool in both] == [list(tool["function"]) for tool in shown_tools(TOOLS, None)]
    assert shown_tools(TOOLS, None) == shown_tools(TOOLS, "auto") == shown_tools(TOOLS, "required") == both
    assert shown_tools(TOOLS, {"type": "function", "function": {"name": "g"}}) == both[1:]
    assert (
        shown_tools(TOOLS, {"function": {"name": "h"}}) is shown_tools(TOOLS, "none") is shown_tools([], None) is None
    )
    assert TOOLS[0]["function"]["parameters"] == {"type": "map"}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("varchar(20)", "string"),
        ("INT", "integer"),
        ("int32", "integer"),
        ("list[str]", "array"),
        (" Float (8) ", "number"),
        ("internal", "internal"),
        (["int", "integer", "null", {}], ["integer", "null", {}]),
    ],
)
def test_words_for_types_become_those_of_json_schema_wherever_a_schema_is(given, expected):
    schema = {"type": given, "properties": {"type": {"anyOf": [{"type": given}]}}, "items": {"not": {"type": given}}}
    assert with_standard_types({**schema, "const": {"type": given}}) == {
        "type": expected,
        "properties": {"type": {"anyOf": [{"type": expected}]}},
        "items": {"not": {"type": expected}},
        "const": {"type": given},
    }


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, {}),
        ({"reasoning_effort": "none"}, {"reasoning_effort": "none", "thinking": False, "enable_thinking": False}),
        ({"reasoning_effort": "0.5"}, {"reasoning_effort": 0.5, "thinking": True, "enable_thinking": True}),
        ({"reasoning": {"effort": "low"}, "reasoning_effort": "high"}, {"reasoning_effort": "low"}),
        ({"reasoning": {"enabled": "yes"}}, {"thinking": True, "enable_thinking": True}),
        ({"chat_template_kwargs": {"enable_thinking": None, "range": 1}}, {"enable_thinking": None, "range": 1}),
        ({"chat_template_kwargs": {"reasoning_effort": "x"}, "reasoning_effort": "low"}, {"reasoning_effort": "x"}),
    ],
)
def test_reasoning_fields_are_variables_of_the_template(body, expected):
    assert template_variables(body).items() >= expected.items()
    assert bool(template_variables(body)) == bool(expected)


@pytest.mark.parametrize(
    "body",
    [
        *({"reasoning_effort": effort} for effort in ("extreme", 1, -0.1, True)),
        *({"chat_template_kwargs": {name: None}} for name in ("tools", "add_generation_prompt", "tokenize")),
        {"chat_template_kwargs": {"continue_final_message": True}},
        {"chat_template_kwargs": "x"},
    ],
)
def test_what_the_engine_refuses_of_them_is_refused(body):
    with pytest.raises(TemplateError):
        template_variables(body)


@given(
    st.recursive(
        st.none() | st.text() | st.integers(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
    )
)
def test_any_schema_is_kept_but_for_its_words(schema):
    assert with_standard_types(with_standard_types(schema)) == with_standard_types(schema)
