"""LLaVA-1.5 and LLaVA-NeXT: counts, and which of a folder's files and keys decide them."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from unit.families.conftest import limits

from mmrouter_lib import families
from mmrouter_lib.families import ImageSizeError, ModelFolderError
from mmrouter_lib.families.llava_next import DEFAULT_PINPOINTS, best_pinpoint, unpadded

VISION = {"model_type": "clip_vision_model", "image_size": 336, "patch_size": 14}
CLIP = {"size": {"shortest_edge": 336}, "crop_size": {"height": 336, "width": 336}}
SIDES = st.integers(1, 6000)


@pytest.fixture
def make(write_folder):
    """Return a maker of folders; keyword arguments change config.json, ``clip`` and ``processor`` the other files."""

    def load(model_type="llava", clip=CLIP, processor=None, **config):
        values = {"model_type": model_type, "vision_config": VISION, "image_token_index": 7, **config}
        config = {key: value for key, value in values.items() if value is not None}
        folder = write_folder(config=config, preprocessor_config=clip, processor_config=processor or {})
        return families.load_family(folder, None)

    return load


@pytest.mark.parametrize("size", [(224, 224), (448, 224), (1, 1), (4020, 20), (4000, 3000)])
def test_case_26_llava15_gives_every_size_the_same_count(make, size):
    assert make().count(*size) == 576


def test_an_empty_image_is_refused(make):
    for model_type in ("llava", "llava_next"):
        for size in ((0, 10), (10, 0)):
            with pytest.raises(ImageSizeError, match=f"{size[0]}x{size[1]}"):
                make(model_type).count(*size)


def test_case_29_llavanext_honours_the_folders_pinpoints(make):
    assert make("llava_next").count(672, 672) == 2928
    only = {"image_grid_pinpoints": [[336, 672]]}
    # One picture high and two wide: 24 of 48 columns are left of a square, and a newline for each of 24 rows.
    assert make("llava_next", clip={**CLIP, **only}, **only).count(672, 672) == 576 + 24 * 24 + 24


@pytest.mark.parametrize(
    ("size", "count"),
    [
        *[((1024, 768), 2340), ((300, 200), 1464), ((200, 300), 984), ((500, 333), 1464), ((224, 224), 1176)],
        *[((336, 336), 1176), ((1920, 1080), 1948), ((1000, 300), 2182), ((448, 224), 1752)],
    ],
)
def test_case_27_case_28_llavanext_counts_are_those_of_the_engine(make, size, count):
    assert make("llava_next").count(*size) == count


def test_full_feature_selection_keeps_the_class_token(make):
    for model_type, count in (("llava", 577), ("llava_next", 1177)):
        assert make(model_type, vision_feature_select_strategy="full").count(336, 336) == count


def test_sizes_may_be_given_as_a_number_as_two_sides_or_as_the_shorter_side(make):
    for size in (336, {"height": 336, "width": 336}, {"shortest_edge": 336}):
        for crop in (336, {"height": 336, "width": 336}):
            assert make(clip={"size": size, "crop_size": crop}).count(9, 9) == 576
    uncropped = {"size": {"height": 336, "width": 336}, "do_center_crop": False}
    assert make(clip=uncropped).count(9, 9) == 576


def test_keys_that_are_left_out_have_the_classes_defaults(make):
    assert make(vision_config=None).count(9, 9) == 576
    assert make(vision_config={}, clip={}).count(9, 9) == 49  # 224 pixels in patches of 32
    next_of = make("llava_next", image_token_index=None)
    assert (next_of.placeholder_id, next_of.placeholder_text) == (32000, "<image>")
    assert next_of.pinpoints == DEFAULT_PINPOINTS


def test_settings_nested_in_processor_config_win(make):
    nested = {"image_processor": CLIP, "patch_size": 14, "image_token": {"content": "<pic>"}}
    family = make(clip={"size": 224}, processor=nested, image_token_index=None, image_token_id=9)
    assert (family.count(9, 9), family.placeholder_id, family.placeholder_text) == (576, 9, "<pic>")


def test_a_tower_that_is_not_clip_is_of_no_known_family(make):
    assert make(vision_config={**VISION, "model_type": "siglip_vision_model"}) is None


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"vision_config": [1]}, "vision_config"),
        ({"vision_config": {**VISION, "patch_size": 15}}, "multiple"),
        ({"vision_config": {**VISION, "image_size": [336, 336]}}, "image_size"),
        ({"vision_feature_select_strategy": "class"}, "default or full"),
        ({"image_token_id": 8}, "differ"),
        ({"image_token_index": -1}, "image_token_index"),
        ({"clip": {**CLIP, "crop_size": {"height": 224, "width": 224}}}, "crop_size is 224x224"),
        ({"clip": {**CLIP, "crop_size": {"height": 336, "width": 224}}}, "224x336"),
        ({"clip": {**CLIP, "size": {"shortest_edge": 224}}}, "size is 224x224"),
        ({"clip": {**CLIP, "size": {"longest_edge": 336}}}, "shortest_edge"),
        ({"clip": {}}, "size is 224x224"),
        ({"clip": {**CLIP, "do_resize": False}}, "do_resize"),
        ({"clip": {"size": {"shortest_edge": 336}, "do_center_crop": False}}, "any shape"),
        ({"processor": {"patch_size": 16}}, "patch_size is 16"),
        ({"processor": {"vision_feature_select_strategy": "full"}}, "strategy is 'full'"),
        ({"processor": {"num_additional_image_tokens": 0}}, "num_additional_image_tokens"),
        ({"processor": {"image_token": 5}}, "image_token"),
    ],
)
def test_files_that_contradict_each_other_are_refused_by_name(make, change, complaint):
    for model_type in ("llava", "llava_next"):
        with pytest.raises(ModelFolderError, match=complaint):
            make(model_type, **change)


@pytest.mark.parametrize("pinpoints", [[[336, 672]], [], [[336]], [[336, 100]], [[336, True]], "any"])
def test_pinpoints_that_differ_or_cannot_be_used_are_refused(make, pinpoints):
    with pytest.raises(ModelFolderError, match="image_grid_pinpoints"):
        make("llava_next", image_grid_pinpoints=pinpoints)


@pytest.mark.parametrize("option", ["min_pixels", "max_pixels", "num_crops"])
def test_an_option_that_the_family_does_not_have_is_refused(make, write_folder, option):
    make()
    with pytest.raises(ModelFolderError, match=option):
        families.load_family(write_folder(), limits(**{option: 4}))


def test_the_real_folders_load(models):
    first = families.load_family(models / "llava-hf--llava-1.5-7b-hf", None)
    second = families.load_family(models / "llava-hf--llava-v1.6-mistral-7b-hf", None)
    assert (first.name, first.placeholder_id, first.base_tokens) == ("llava", 32000, 576)
    assert (second.name, second.placeholder_id, second.pinpoints) == ("llava_next", 32000, DEFAULT_PINPOINTS)
    for family in (first, second):
        assert (family.pixel_options, family.rotates_exif, family.media_text["image"]) == ({}, True, "<image>")


@given(SIDES, SIDES)
def test_the_best_grid_keeps_the_most_pixels_and_of_equal_ones_is_the_first(width, height):
    def kept(high, wide):
        scale = min(wide / width, high / height)
        return min(int(width * scale) * int(height * scale), width * height)

    best = best_pinpoint(width, height, DEFAULT_PINPOINTS)
    most = [pair for pair in DEFAULT_PINPOINTS if kept(*pair) == kept(*best)]
    assert kept(*best) == max(kept(*pair) for pair in DEFAULT_PINPOINTS)
    assert best == min(most, key=lambda pair: (pair[0] * pair[1], DEFAULT_PINPOINTS.index(pair)))


@given(SIDES, SIDES, st.integers(1, 3), st.integers(1, 3))
def test_only_padding_is_cut_off_and_of_one_direction_and_evenly(width, height, across, down):
    columns, rows = 24 * across, 24 * down
    left_rows, left_columns = unpadded(width, height, columns, rows)
    assert left_rows == rows or left_columns == columns
    for whole, left in ((rows, left_rows), (columns, left_columns)):
        assert 0 <= left <= whole
        assert (whole - left) % 2 == 0


@given(SIDES, SIDES, st.integers(1, 2000))
def test_along_one_side_a_larger_image_never_loses_patches_of_that_side(width, height, more):
    assume(width + more <= 6000)
    assert unpadded(width, height, 48, 48)[1] <= unpadded(width + more, height, 48, 48)[1]
    assert unpadded(width, height, 48, 48)[0] >= unpadded(width + more, height, 48, 48)[0]


ORIGINAL = {
    "model_type": "llava",
    "architectures": ["LlavaLlamaForCausalLM"],
    "mm_vision_tower": "openai/clip-vit-large-patch14-336",
    "mm_vision_select_feature": "patch",
    "image_aspect_ratio": "pad",
}
ANYRES = {"image_aspect_ratio": "anyres", "image_grid_pinpoints": [[336, 672], [672, 336], [672, 672]]}
ADDED = {"added_tokens": [{"id": 32000, "content": "<image>"}]}


@pytest.fixture
def original(write_folder):
    """Return a maker of folders in the form of LLaVA's authors; keyword arguments change config.json."""

    def load(tokenizer=ADDED, **config):
        return families.load_family(write_folder(config=ORIGINAL | config, tokenizer=tokenizer), None)

    return load


def test_authors_checkpoints_are_a_family_of_their_own_which_is_proved_on_sglang(original):
    family = original()
    assert (family.name, family.placeholder_id, family.placeholder_text) == ("LlavaLlamaForCausalLM", 32000, "<image>")
    name = families.family_name(ORIGINAL)
    assert [families.is_proved(name, engine) for engine in ("sglang", "vllm")] == [True, False]
    assert families.family_name(ORIGINAL | {"architectures": ["LlavaForConditionalGeneration"]}) == "llava"


def test_padded_images_of_authors_checkpoints_have_one_count(original):
    assert {original().count(*size) for size in ((1, 1), (320, 240), (4020, 20))} == {576}


@pytest.mark.parametrize(("size", "count"), [((320, 240), 1026), ((240, 320), 1376), ((336, 336), 1176)])
def test_pinpoints_of_authors_checkpoints_are_width_and_height(original, size, count):
    assert original(**ANYRES).count(*size) == count


def test_authors_checkpoints_are_not_rotated(original):
    assert original().rotates_exif is False


@pytest.mark.parametrize(
    "config",
    [
        {"mm_vision_tower": "google/siglip-so400m-patch14-384"},
        {"mm_vision_select_feature": "cls_patch"},
        {"image_aspect_ratio": "anyres_max_9"},
        {"image_aspect_ratio": "anyres", "image_grid_pinpoints": "(1x1),...,(6x6)"},
        {"image_aspect_ratio": "anyres", "image_grid_pinpoints": [[336]]},
        {"tokenizer": {"added_tokens": []}},
        {"tokenizer": {}},
    ],
)
def test_other_forms_of_authors_checkpoints_are_not_modelled(original, config):
    assert original(**config) is None
