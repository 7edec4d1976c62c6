"""PaddleOCR-VL and DeepSeek-OCR: an image's tokens, which of a folder's files decide them, and vLLM's own template."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from unit.families.conftest import limits

from mmrouter_lib import families
from mmrouter_lib.families import ImageSizeError, ModelFolderError, PromptImage
from mmrouter_lib.families.deepseek_ocr import DeepseekOCR
from mmrouter_lib.families.paddleocr import PaddleOCRVL
from mmrouter_lib.prompt import Prompter
from mmrouter_lib.prompt.templates import TemplateError

PLACEHOLDER, IMAGE, BEGIN = "<|IMAGE_PLACEHOLDER|>", "<image>", "<|begin|>"
PUBLISHED = {"min_pixels": 147_384, "max_pixels": 2_822_400}
FAMILIES = {
    "paddleocr": PaddleOCRVL(7, 28, *PUBLISHED.values()),
    "ocr": DeepseekOCR("DeepseekOCRForCausalLM", 7, 640, rows_end=True),
    "ocr2": DeepseekOCR("DeepseekOCR2ForCausalLM", 7, 768, rows_end=False),
}
DEEPSEEK: dict[str, Any] = {"model_type": "deepseek_vl_v2", "architectures": ["DeepseekOCRForCausalLM"]}
GEOMETRY = {"patch_size": 14, "merge_size": 2}
PADDLE: dict[str, Any] = {
    "model_type": "paddleocr_vl",
    "image_token_id": 7,
    "vision_config": {"patch_size": 14, "spatial_merge_size": 2},
}
ADDED = {"added_tokens": [{"id": 77, "content": IMAGE}]}


@pytest.mark.parametrize(
    ("family", "size", "count"),
    [
        ("paddleocr", (1120, 840), 40 * 30),
        ("paddleocr", (280, 280), 14 * 14),  # enlarged to the least number of pixels
        ("paddleocr", (2800, 2800), 60 * 60),  # reduced to the greatest
        ("paddleocr", (14, 280), 4 * 62),  # first enlarged to the width of a unit
        ("paddleocr", (28, 5600), 1 * 200),
        ("ocr", (1, 1), 16 * 17 + 1),
        ("ocr", (640, 640), 16 * 17 + 1),
        ("ocr", (641, 1), 16 * 17 + 1 + 10 * 61),
        ("ocr", (1300, 650), 16 * 17 + 1 + 10 * 21),
        ("ocr", (1000, 1500), 16 * 17 + 1 + 30 * 21),
        ("ocr2", (768, 768), 16 * 16 + 1),
        ("ocr2", (1000, 1000), 16 * 16 + 1 + 24 * 24),
        ("ocr2", (3000, 40), 16 * 16 + 1 + 12 * 72),
    ],
)
def test_an_image_has_the_tokens_of_vllms_formula(family, size, count):
    assert FAMILIES[family].count(*size) == count


@pytest.mark.parametrize("family", FAMILIES)
def test_an_image_without_pixels_is_refused(family):
    for size in ((0, 10), (10, 0)):
        with pytest.raises(ImageSizeError):
            FAMILIES[family].count(*size)


SIDES = st.integers(1, 9000)


@given(width=SIDES, height=SIDES)
def test_paddleocr_keeps_every_image_within_its_limits_or_refuses_one_of_200_times(width, height):
    family = FAMILIES["paddleocr"]
    thin = max(max(width, 28) / height, max(height, 28) / width)
    try:
        pixels = family.count(width, height) * 28**2
    except ImageSizeError:
        assert thin > 199
    else:
        assert PUBLISHED["min_pixels"] <= pixels <= PUBLISHED["max_pixels"]


@given(width=SIDES, height=SIDES)
def test_deepseek_ocr_cuts_into_two_to_six_tiles_in_the_images_direction(width, height):
    for family in (FAMILIES["ocr"], FAMILIES["ocr2"]):
        across = family.tile // 64
        tiles = family.count(width, height) - family.count(1, 1)
        if max(width, height) <= family.tile:
            assert tiles == 0
            continue
        shapes = [(c, r) for c in range(1, 7) for r in range(1, 7) if 2 <= c * r <= 6]
        fitting = {r * across * (c * across + family.rows_end) for c, r in shapes if (c >= r or width < height)}
        assert tiles in fitting


@pytest.fixture
def load(write_folder):
    """Return a loader of a family's folder of these files, with the resource's processor options."""

    def made(options: Any = None, **files: dict[str, Any]) -> Any:
        return families.load_family(write_folder(**files), options)

    return made


@pytest.mark.parametrize(
    ("processor", "least", "most"),
    [
        ({**PUBLISHED, "size": PUBLISHED}, *PUBLISHED.values()),
        ({"size": {"shortest_edge": 100_000, "longest_edge": 300_000}}, 100_000, 300_000),
        ({"max_pixels": 300_000, "size": {"shortest_edge": 100_000, "longest_edge": 700_000}}, 100_000, 300_000),
        ({"max_pixels": 300_000}, 384 * 384, 300_000),
        ({}, 384 * 384, 1536 * 1536),
    ],
)
def test_paddleocr_takes_its_limits_from_the_keys_then_the_size_then_the_class(load, processor, least, most):
    family = load(config=PADDLE, preprocessor_config={**GEOMETRY, **processor})
    assert family == PaddleOCRVL(7, 28, least, most)
    assert family.pixel_options == {"min_pixels": least, "max_pixels": most}


def test_a_paddleocr_folder_whose_own_code_may_set_the_limits_is_of_no_known_family(load):
    own_code = {**GEOMETRY, "auto_map": {"AutoImageProcessor": "image_processing.PaddleOCRVLImageProcessor"}}
    assert load(config=PADDLE, preprocessor_config=own_code) is None
    assert load(config=PADDLE, preprocessor_config={**own_code, **PUBLISHED}) is not None


def test_the_resources_limits_come_before_those_of_a_paddleocr_folder(load):
    family = load(limits(max_pixels=400_000), config=PADDLE, preprocessor_config={**GEOMETRY, **PUBLISHED})
    assert (family.min_pixels, family.max_pixels) == (147_384, 400_000)


@pytest.mark.parametrize(
    ("options", "processor", "complaint"),
    [
        (None, {"size": PUBLISHED}, "min_pixels"),
        (None, {"size": {"longest_edge": 700_000}}, "min_pixels"),
        (None, {"max_pixels": 156_800}, "thin image"),
        (limits(max_pixels=150_000), {}, "thin image"),
        (limits(num_crops=4), {}, "num_crops"),
        (None, {"patch_size": 16}, "patch_size"),
        (None, {"merge_size": 1}, "merge_size"),
        (None, {"do_resize": False}, "do_resize"),
    ],
)
def test_a_paddleocr_folder_that_is_not_modelled_is_refused_by_name(load, options, processor, complaint):
    with pytest.raises(ModelFolderError, match=complaint):
        load(options, config=PADDLE, preprocessor_config={**GEOMETRY, **processor})


@pytest.mark.parametrize("architecture", ["DeepseekOCRForCausalLM", "DeepseekOCR2ForCausalLM"])
def test_deepseek_ocr_is_known_by_its_architecture_and_takes_its_placeholder_from_the_tokenizer(load, architecture):
    family = load(config={**DEEPSEEK, "architectures": [architecture]}, tokenizer=ADDED)
    assert (family.name, family.placeholder_id) == (architecture, 77)
    assert (families.is_proved(architecture, "vllm"), families.is_proved(architecture, "sglang")) == (True, False)
    assert all(families.is_proved("paddleocr_vl", engine) for engine in ("vllm", "sglang"))


def test_other_models_of_deepseek_vl2s_type_are_of_no_known_family(load):
    assert load(config={**DEEPSEEK, "architectures": ["DeepseekVLV2ForCausalLM"]}) is None
    assert load(config={**DEEPSEEK, "model_type": "deepseek_ocr2"}) is None


@pytest.mark.parametrize("file", ["processor_config", "chat_template"])
def test_a_template_where_vllm_does_not_look_for_one_leaves_deepseek_ocr_without_a_family(load, file):
    assert load(config=DEEPSEEK, tokenizer=ADDED, **{file: {"chat_template": "Hi"}}) is None


@pytest.mark.parametrize(
    ("options", "processor", "tokenizer", "complaint"),
    [
        (None, {"max_crops": 9}, ADDED, "max_crops"),
        (None, {"image_token": "<img>"}, ADDED, "image_token"),
        (None, {}, {}, "no token <image>"),
        (limits(max_pixels=4), {}, ADDED, "max_pixels"),
    ],
)
def test_a_deepseek_ocr_folder_that_is_not_modelled_is_refused_by_name(load, options, processor, tokenizer, complaint):
    with pytest.raises(ModelFolderError, match=complaint):
        load(options, config=DEEPSEEK, processor_config=processor, tokenizer=tokenizer)


@pytest.fixture
def ocr(write_folder) -> Path:
    """A DeepSeek-OCR folder with a tokenizer of bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: at for at, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in (BEGIN, IMAGE)])
    folder: Path = write_folder(config=DEEPSEEK, tokenizer_config={"bos_token": BEGIN})
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def prompter(folder: Path) -> Prompter:
    family = families.load_family(folder, None)
    assert family is not None
    return Prompter.load(folder, family=family)


def said(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def test_a_folder_without_a_template_gets_vllms_own_which_joins_the_contents(ocr):
    loaded = prompter(ocr)
    parts = [{"type": "text", "text": "Read this."}, {"type": "image_url"}]
    chat = [said("system", "Be brief."), said("user", parts), said("assistant", "It says A.")]
    assert loaded.render(chat) == f"{BEGIN}Be brief.{IMAGE}\nRead this.It says A."
    assert loaded.render(chat, tools=[]) == loaded.render(chat)
    made = loaded.prompt({"messages": [said("user", parts)]}, [PromptImage(bytes(32), 483, (1300, 700))])
    assert [(span.offset, span.length) for span in made.spans] == [(1, 483)]


@pytest.mark.parametrize(
    "roles", [["assistant"], ["user", "user"], ["system", "system"], ["user", "assistant", "tool"]]
)
def test_turns_that_do_not_alternate_are_refused_as_vllms_template_refuses_them(ocr, roles):
    with pytest.raises(TemplateError, match="take turns"):
        prompter(ocr).render([said(role, "Hi") for role in roles])


def test_a_template_of_the_folder_comes_before_vllms_own(ocr):
    (ocr / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    assert prompter(ocr).render([said("user", "Hi")]) == "Hi!"


def test_tokens_that_a_folder_names_itself_are_variables_of_its_template(ocr):
    named = {"image_token": IMAGE, "row_token": {"__type": "AddedToken", "content": "|"}}
    others = {"add_bos_token": True, "plain_token": {"content": "x"}}
    (ocr / "tokenizer_config.json").write_text(json.dumps({"bos_token": BEGIN, **named, **others}))
    (ocr / "chat_template.jinja").write_text("{{ bos_token }}{{ image_token }}{{ row_token }}{{ plain_token }}")
    loaded = prompter(ocr)
    assert loaded.render([said("user", "Hi")]) == f"{BEGIN}{IMAGE}|"
    assert {BEGIN, IMAGE, "|"} == set(loaded.codec.special_texts)
