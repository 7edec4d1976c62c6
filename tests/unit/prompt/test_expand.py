"""Expansion: the first placeholders become runs, everything else stays as it is."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmrouter_lib.prompt import PlaceholderError, PromptImage, TemplateError, expand_ids

PAD = 9
TOKENS = st.lists(st.integers(0, PAD), max_size=60)


def image(number: int, count: int) -> PromptImage:
    return PromptImage(number.to_bytes(32, "big"), count)


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
    assert expanded.unplaced == (rest[0] if rest else None)
    assert all(span.end <= at for span in expanded.spans for at in rest)


def test_the_images_go_to_the_first_placeholders_in_order():
    expanded = expand_ids(array("I", [1, PAD, 2, PAD, PAD, 3]), PAD, [image(7, 2), image(8, 3)])
    assert list(expanded.ids) == [1, PAD, PAD, 2, PAD, PAD, PAD, PAD, 3]
    assert [(span.offset, span.length, span.identity[-1]) for span in expanded.spans] == [(1, 2, 7), (4, 3, 8)]
    assert expanded.unplaced == 7


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
    assert expanded.spans[0].offset == len(before)
    assert expanded.unplaced is not None
    assert expanded.ids[expanded.unplaced - 1] == tiny.tokenizer.token_to_id("<|vision_start|>")


def test_case_38_image_video_image_keeps_its_order_and_the_video_its_own_token(qwen2):
    parts = [{"type": "image_url"}, {"type": "video_url", "video_url": {"url": "x"}}, {"type": "image_url"}]
    expanded = qwen2.expand(qwen2.render([{"role": "user", "content": parts}]), [image(1, 4), image(2, 6)])
    first, second = expanded.spans
    assert (first.identity[-1], second.identity[-1]) == (1, 2)
    video = qwen2.tokenizer.token_to_id("<|video_pad|>")
    assert expanded.ids[first.end : second.offset].count(video) == 1
    assert expanded.ids.count(video) == 1


def test_images_beyond_the_resolved_ones_are_where_exactness_ends(tiny):
    messages = [
        {"role": "user", "content": [{"type": "image_url"}, {"type": "text", "text": "and"}, {"type": "image_url"}]}
    ]
    text = tiny.render(messages)
    both, first = tiny.expand(text, [image(1, 4), image(2, 6)]), tiny.expand(text, [image(1, 4)])
    assert first.unplaced == both.spans[1].offset
    assert first.ids[: first.unplaced] == both.ids[: first.unplaced]
    assert first.spans == both.spans[:1]


def test_half_a_surrogate_pair_is_the_clients_error(tiny):
    with pytest.raises(TemplateError, match="surrogate"):
        tiny.expand("a\ud800b", [])
