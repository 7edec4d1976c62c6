"""Phi-3-vision prompts: numbered tags, pieces tokenised one by one, and what cannot be placed.

The rules were observed on vLLM 0.32 (docs/engine-facts/vllm.md#placeholder-counts,
docs/engine-facts/vllm.md#requests-that-end-the-engine); the captures hold its own ids.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.prompt.conftest import image

from mmrouter_lib.families import ModelFolderError
from mmrouter_lib.image_size import probe
from mmrouter_lib.prompt import PlaceholderError

BEGIN, PAD = 1, 32044
MODEL = "microsoft--Phi-3-vision-128k-instruct"
IMAGE = {"type": "image_url"}
EDGE, PROBES = "phi3v-real_sw131072_edge.jsonl", "phi3v-real_sw131072_probes.jsonl"
REFUSED = {"two literal swapped, same size", "two literal swapped, other size", "literal swapped, different sizes"}


def text(value: str) -> dict[str, str]:
    return {"type": "text", "text": value}


def user(*content):
    return [{"role": "user", "content": list(content)}]


@pytest.mark.parametrize(("name", "prompts"), [(EDGE, 5), (PROBES, 9)])
def test_case_34_prompts_of_odd_requests_are_the_engines(phi3, models, captures, name, prompts):
    steps = [step for step in captures.steps(name, models / MODEL) if step.prompt]
    for step in steps:
        rendered = phi3.render(step.body["messages"])
        expanded = phi3.expand(rendered, step.images, step.body.get("add_special_tokens", False))
        assert list(expanded.ids) == step.prompt, step.label
    assert len(steps) == prompts


def test_case_34_two_images_begin_every_piece_and_stand_where_the_engine_has_them(phi3, models, captures):
    steps = {step.label: step for step in captures.steps("phi3v-nosw.jsonl", models / MODEL)}
    step = steps["two images A B"]
    expanded = phi3.expand(phi3.render(step.body["messages"]), step.images)
    assert list(expanded.ids) == step.prompt
    assert expanded.ids.count(BEGIN) == 3  # before, between and behind the two tags
    assert [span.length for span in expanded.spans] == [2509, 2509]
    assert [expanded.ids[span.end] for span in expanded.spans] == [BEGIN, BEGIN]


def test_case_37_tags_that_users_type_are_placed_as_the_engine_places_them(phi3, models, captures):
    compared = set()
    for render in captures.renders(PROBES, models / MODEL):
        if render.label in REFUSED:
            # The engine takes lengths by number and pictures by position: it mixes them up, or ends.
            with pytest.raises(PlaceholderError, match=r"<\|image_2\|> before <\|image_1\|>"):
                phi3.expand(phi3.render(render.messages), render.images)
        else:
            expanded = phi3.expand(phi3.render(render.messages), render.images)
            assert list(expanded.ids) == render.prompt, render.label
            assert [(span.offset, span.length) for span in expanded.spans] == render.places, render.label
        compared.add(render.label)
    assert len(compared) == 8
    assert compared & REFUSED == {"two literal swapped, same size", "two literal swapped, other size"}


def test_case_33_a_picture_is_counted_as_it_is_displayed(phi3, captures):
    for name, count in (("exif_orientation6_480x320.jpg", 1933), ("exif_none_480x320.jpg", 1921)):
        data = (captures.folder / "images" / name).read_bytes()
        size = probe(data, max_pixels=10**8, exif=phi3.family.rotates_exif)
        assert phi3.family.count(size.width, size.height) == count


def test_missing_tags_are_put_in_front_of_their_own_message_and_numbered_over_the_chat(phi3):
    messages = [
        *user(text("one"), IMAGE, text(""), text("two")),
        {"role": "assistant", "content": "three"},
        *user(IMAGE, text("see <|image_2|> here"), IMAGE),
    ]
    assert phi3.render(messages, add_generation_prompt=False) == (
        "<|user|>\n<|image_1|>\none\ntwo<|end|>\n<|assistant|>\nthree<|end|>\n"
        "<|user|>\n<|image_3|>\nsee <|image_2|> here<|end|>\n"
    )


def test_a_tag_that_a_message_repeats_beyond_its_image_is_refused(phi3):
    with pytest.raises(PlaceholderError, match=r"messages\[0\] holds '<\|image_1\|>' more often"):
        phi3.render(user(text("<|image_1|> and <|image_1|>"), IMAGE))


def test_a_text_without_images_is_not_cut_and_begins_with_nothing(phi3):
    rendered = phi3.render(user(text("what is <|image_1|>?")))
    plain = phi3.expand(rendered, [])
    assert BEGIN not in plain.ids
    assert plain.spans == ()
    assert phi3.expand(rendered, [], add_special_tokens=True).ids.tolist() == [BEGIN, *plain.ids]


def test_a_surplus_tag_cuts_the_text_keeps_its_tokens_and_takes_no_image(phi3):
    expanded = phi3.expand("a<|image_1|>b<|image_7|>c<|image_1|>", [image(1, 4)])
    tag = phi3.codec.encode("<|image_7|>", add_special_tokens=False).tolist()
    assert [(span.offset, span.length, span.identity[-1]) for span in expanded.spans] == [(2, 4, 1)]
    assert expanded.ids.count(BEGIN) == 4
    at = len(phi3.codec.encode("a", add_special_tokens=True)) + 4 + len(phi3.codec.encode("b", add_special_tokens=True))
    assert expanded.ids[at : at + len(tag)].tolist() == tag


def test_images_beyond_the_resolved_ones_are_where_exactness_ends(phi3):
    rendered = phi3.render(user(IMAGE, text("and"), IMAGE))
    both, first = phi3.expand(rendered, [image(1, 4), image(2, 6)]), phi3.expand(rendered, [image(1, 4)])
    end = both.spans[1].offset
    assert first.spans == both.spans[:1]
    assert first.ids[:end] == both.ids[:end]


def test_a_literal_image_token_is_one_token_and_no_placeholder(phi3):
    expanded = phi3.expand("<|image|> is a token, <|image_1|>", [image(1, 3)])
    assert expanded.ids[:2].tolist() == [BEGIN, PAD]
    assert len(expanded.spans) == 1
    assert expanded.spans[0].offset > 2
    assert expanded.ids.count(PAD) == 4
    with pytest.raises(PlaceholderError, match="a place for 0 images"):
        phi3.expand("<|image|>", [image(1, 3)])


@pytest.mark.parametrize(
    "prompt",
    ["<|image_2|>", "<|image_2|><|image_1|>", "<|image_3|><|image_1|><|image_2|>", "<|image_1|><|image_3|><|image_2|>"],
)
def test_tags_that_do_not_first_appear_in_their_order_are_refused(phi3, prompt):
    with pytest.raises(PlaceholderError, match="before"):
        phi3.expand(prompt, [image(number, 2) for number in (1, 2, 3)])


@pytest.mark.parametrize("tag", ["<|image_0|>", "<|image_01|>", "<|image_\u0661|>", "<|image_" + "9" * 5000 + "|>"])
def test_other_digits_make_no_tag(phi3, tag):
    expanded = phi3.expand(f"{tag}<|image_1|>", [image(1, 2)])
    assert len(expanded.spans) == 1
    own = phi3.codec.encode(tag, add_special_tokens=False)
    assert expanded.ids[1 : 1 + len(own)] == own  # behind the first piece, which is empty but for what begins it
    with pytest.raises(PlaceholderError, match="a place for 0"):
        phi3.expand(tag, [image(1, 2)])


def test_an_image_without_tokens_is_refused(phi3):
    with pytest.raises(PlaceholderError, match="image 0"):
        phi3.expand("<|image_1|>", [image(1, 0)])


SPECIAL = ["<|user|>", "<|end|>\n", "<|assistant|>", "<s>", "</s> ", "<|image|>"]
PIECES = st.lists(st.sampled_from([*SPECIAL, "a", " b", "\n", "\u2581", "<|", "é", "  "]), max_size=5).map("".join)


@given(st.lists(PIECES, min_size=2, max_size=4))
def test_every_piece_is_begun_and_every_image_stands_between_two(phi3, pieces):
    tags = [f"<|image_{number}|>" for number in range(1, len(pieces))]
    images = [image(number, 3) for number in range(1, len(pieces))]
    expanded = phi3.expand("".join(p + t for p, t in zip(pieces, [*tags, ""], strict=True)), images)
    assert [span.identity[-1] for span in expanded.spans] == list(range(1, len(pieces)))
    starts = [0, *(span.end for span in expanded.spans)]
    assert [expanded.ids[at] for at in starts] == [BEGIN] * len(pieces)
    for span in expanded.spans:
        assert expanded.ids[span.offset : span.end].tolist() == [PAD] * 3


def test_a_tokenizer_that_begins_no_text_is_refused(phi3):
    class Bare:
        special_texts = ()
        begin_id = 1

        def encode(self, text, *, add_special_tokens):
            return phi3.codec.encode(text, add_special_tokens=False)

    with pytest.raises(ModelFolderError, match="bos_token"):
        phi3.family.check(Bare())
