"""Expansion of placeholders into runs; the tiny model of the examples."""

import json
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.prompt.conftest import TINY, image

from mmrouter_lib import families
from mmrouter_lib.prompt import PlaceholderError, PromptImage, TemplateError, expand_ids

PAD = 9
TOKENS = st.lists(st.integers(0, PAD), max_size=60)


@given(TOKENS, st.lists(st.integers(1, 70), max_size=5), st.sampled_from(["I", "Q"]))
def test_collapsing_every_span_gives_the_prompt_back(tokens, counts, typecode):
    images = [image(number, count) for number, count in enumerate(counts)]
    if tokens.count(PAD) < len(images):
        with pytest.raises(PlaceholderError, match=f"the request has {len(images)}"):
            expand_ids(array(typecode, tokens), PAD, images)
        return
    expanded = expand_ids(array(typecode, tokens), PAD, images)
    ids = list(expanded.ids)
    assert expanded.ids.typecode == typecode
    assert len(ids) == len(tokens) + sum(counts) - len(counts)
    for span, wanted in zip(expanded.spans, images, strict=True):
        assert (span.identity, span.length) == (wanted.identity, wanted.count)
        assert ids[span.offset : span.end] == [PAD] * span.length
    for span in reversed(expanded.spans):
        ids[span.offset : span.end] = [PAD]
    assert ids == tokens
    taken = {at for span in expanded.spans for at in range(span.offset, span.end)}
    rest = [at for at, token in enumerate(expanded.ids) if token == PAD and at not in taken]
    assert all(span.end <= at for span in expanded.spans for at in rest)


@pytest.mark.parametrize("count", [0, -1])
def test_an_image_without_tokens_is_refused(count):
    with pytest.raises(PlaceholderError, match="image 0"):
        expand_ids(array("I", [PAD]), PAD, [image(0, count)])


def test_case_37_a_placeholder_typed_by_a_user_takes_the_image_and_the_templates_own_stays_a_token(tiny):
    # vLLM puts images at the first placeholders, typed ones included (tests/conformance/vllm/test_fields.py, case 37).
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "see <|image_pad|> here "}, {"type": "image_url"}]}
    ]
    expanded = tiny.expand(tiny.render(messages), [image(1, 4)])
    before = tiny.expand("<|im_start|>user\nsee ", []).ids
    (span,) = expanded.spans
    assert span.offset == len(before)
    own = expanded.ids.index(tiny.tokenizer.token_to_id("<|image_pad|>"), span.end)
    assert expanded.ids[own - 1] == tiny.tokenizer.token_to_id("<|vision_start|>")


def test_case_38_image_video_image_keeps_its_order_and_the_video_its_own_token(qwen2):
    parts = [{"type": "image_url"}, {"type": "video_url", "video_url": {"url": "x"}}, {"type": "image_url"}]
    expanded = qwen2.expand(qwen2.render([{"role": "user", "content": parts}]), [image(1, 4), image(2, 6)])
    first, second = expanded.spans
    assert (first.identity[-1], second.identity[-1]) == (1, 2)
    video = qwen2.tokenizer.token_to_id("<|video_pad|>")
    assert expanded.ids[first.end : second.offset].count(video) == 1
    assert expanded.ids.count(video) == 1


def test_half_a_surrogate_pair_is_the_clients_error(tiny):
    with pytest.raises(TemplateError, match="surrogate"):
        tiny.expand("a\ud800b", [])


def test_the_tiny_models_configuration_has_the_ids_of_its_tokenizer(tiny):
    config = json.loads((TINY / "config.json").read_text())
    names = {"image": "image_pad", "video": "video_pad", "vision_start": "vision_start", "vision_end": "vision_end"}
    ids = {f"{name}_token_id": f"<|{token}|>" for name, token in names.items()}
    for name, token in {**ids, "eos_token_id": "<|im_end|>", "pad_token_id": "<|endoftext|>"}.items():
        assert config[name] == tiny.tokenizer.token_to_id(token), name
    assert config["vocab_size"] >= tiny.tokenizer.get_vocab_size()


def test_the_tiny_models_counts_are_those_of_qwen2():
    family = families.load_family(TINY, None)
    assert [family.count(*size) for size in ((224, 224), (640, 480), (1920, 1080))] == [64, 391, 2691]


def test_every_special_token_is_one_token_and_every_text_comes_back(tiny):
    for text in ("<|im_start|>", "<|im_end|>", "<|image_pad|>", "<|vision_start|>", "<|endoftext|>"):
        assert len(tiny.expand(text, []).ids) == 1
    for text in ("What is in this picture?", "日本語 und Ünïcode 🎉\n\t x", "12,345.678"):
        assert tiny.tokenizer.decode(list(tiny.expand(text, []).ids)) == text


def test_ordinary_text_takes_few_tokens(tiny):
    text = "Describe the image in one sentence. How many people are in the photo?"
    assert len(tiny.expand(text, []).ids) < len(text) / 3


def test_a_conversation_with_tools_documents_and_images_is_laid_out_as_its_template_says(tiny):
    call = {"id": "1", "type": "function", "function": {"name": "find", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Where? "}, {"type": "image_url"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "Bergen"}]},
    ]
    tools = [{"type": "function", "function": {"name": "find"}}]
    text = tiny.render(messages, tools=tools, documents=[{"title": "T", "text": "x"}])
    head, tail = text.split("<|im_start|>user\n")
    assert '{"name": "find", "description": null, "parameters": null}\n' in head
    assert head.endswith("<|im_start|>system\nT:\nx<|im_end|>\n")
    assert tail == (
        "Where? <|vision_start|><|image_pad|><|vision_end|><|im_end|>\n"
        '<|im_start|>assistant\n\n<call>{"name": "find", "arguments": {"a": 1}}</call><|im_end|>\n'
        "<|im_start|>tool\nBergen<|im_end|>\n<|im_start|>assistant\n"
    )
    assert len(tiny.expand(text, [PromptImage(bytes(32), 64)]).spans) == 1
