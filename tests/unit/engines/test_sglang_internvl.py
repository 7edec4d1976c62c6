"""InternVL of its authors on SGLang: its tiles, the form of its chats, and the places that the engine adds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.families.test_internvl_chat import made

from mmrouter_lib.engines.sglang.families.internvl import MOST, SglangInternVL
from mmrouter_lib.engines.sglang.prompts.conversation_form import INTERNVL
from mmrouter_lib.families import ModelFolderError, NotModelledError, PromptImage
from mmrouter_lib.families.internvl_chat import CONTEXT, InternVLChat

CODEC = made()
CONTEXT_ID = CODEC.token_id(CONTEXT)
assert CONTEXT_ID is not None
FAMILY = SglangInternVL.of(InternVLChat(CONTEXT_ID, 448, 256, 1, 6))
LEFT = "<<<__IMG_PLACEHOLDER__>>>"
PAGE = {"type": "image_url", "image_url": {"url": "data:,"}}
TURN = "<|im_start|>user\nhi<|im_end|>\n"
ANSWER = "<|im_start|>assistant\n"


def shown(text: str, *counts: int) -> str:
    """The prompt of a text with images of so many placeholders, each image as ``[count]``."""
    images = [PromptImage(bytes([number]) * 32, count + 2) for number, count in enumerate(counts)]
    done = FAMILY.expand_text(CODEC, text, images, add_special_tokens=False)
    for span, count in zip(done.spans, counts, strict=True):
        assert done.ids[span.offset : span.end].tolist() == [CONTEXT_ID] * count
    text = CODEC.decode(done.ids)
    for count in sorted(counts, reverse=True):
        text = text.replace(f"<img>{CONTEXT * count}</img>", f"[{count}]", 1)
    return text


@pytest.mark.parametrize(
    ("width", "height", "tiles"),
    [(10, 10, 10), (448, 448, 10), (896, 448, 9), (448, 896, 9), (4480, 448, 11), (9000, 448, 13), (1000, 750, 13)],
)
def test_an_image_has_the_tiles_of_the_largest_of_the_closest_grids(width, height, tiles):
    assert FAMILY.count(width, height) == tiles * 256 + 2


@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(1, 4))
def test_tiles_depend_on_the_shape_of_an_image_alone(width, height, factor):
    tiles = (FAMILY.count(width, height) - 2) // 256
    assert 1 <= tiles <= MOST + 1
    assert FAMILY.count(width * factor, height * factor) == FAMILY.count(width, height)


def test_tiles_of_another_size_are_refused():
    with pytest.raises(ModelFolderError, match="448"):
        SglangInternVL.of(InternVLChat(CONTEXT_ID, 224, 64, 1, 12))


def test_a_place_is_added_before_the_answer_for_each_image_and_places_that_are_left_stay_a_text():
    asked = f"{CONTEXT}\n{CONTEXT}\nhi<|im_end|>\n{ANSWER}"
    assert shown(asked, 5, 3) == f"[5]\n[3]\nhi<|im_end|>\n\n{LEFT}\n{LEFT}\n{ANSWER}"
    assert shown("hi", 5) == "hi\n[5]\n"
    assert shown("a<image>b", 5) == "a[5]b"
    assert shown(f"{CONTEXT}<image>", 5, 3) == f"[5][3]\n{LEFT}\n"


def test_without_images_a_text_keeps_its_places():
    assert shown("<image>\n<img>") == "<image>\n<img>"


@pytest.mark.parametrize("typed", ["<image><image>", "<img>", "</img>", "<video>", LEFT])
def test_a_text_that_the_engine_takes_for_another_place_is_not_modelled(typed):
    with pytest.raises(NotModelledError):
        shown(f"{typed} or {CONTEXT}", 5)


def test_images_stand_before_the_text_of_their_message_and_the_last_system_message_replaces_the_forms():
    parts = [{"type": "text", "text": "What "}, PAGE, {"type": "text", "text": "is it?"}, PAGE]
    text = INTERNVL.text({"messages": [{"role": "user", "content": parts}, {"role": "system", "content": "S"}]})
    begin = "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\n"
    assert text == f"{begin}{CONTEXT}\n{CONTEXT}\nWhat is it?<|im_end|>\n{ANSWER}"
    own = INTERNVL.text({"messages": [{"role": "user", "content": "hi"}]})
    assert own.startswith(f"<|im_start|>system\n{INTERNVL.system}<|im_end|>\n")
    assert own.endswith(TURN + ANSWER)


def test_an_answer_goes_on_without_its_end():
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "So"}]
    text = INTERNVL.text({"messages": messages, "continue_final_message": True})
    assert text.endswith(f"{TURN}{ANSWER}So")
