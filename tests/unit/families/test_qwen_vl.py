"""Qwen-VL: size -> token count, as vLLM and transformers 5.19 gave it, and which of a folder's keys decide it."""

import json
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from unit.families.conftest import limits

from mmrouter_lib import families
from mmrouter_lib.families import ImageSizeError, ModelFolderError
from mmrouter_lib.families.qwen_vl import MAX_ASPECT, smart_resize
from mmrouter_lib.image_size import ImageHeaderError, probe

QWEN2 = {"min_pixels": 3136, "max_pixels": 12845056}
QWEN3 = {"size": {"shortest_edge": 65536, "longest_edge": 16777216}}
REAL = ["Qwen--Qwen2-VL-2B-Instruct", "Qwen--Qwen2.5-VL-7B-Instruct", "Qwen--Qwen3-VL-2B-Instruct"]
LLAVA = ["llava-hf--llava-1.5-7b-hf", "llava-hf--llava-v1.6-mistral-7b-hf"]


def qwen2(make_folder, *size, model_type="qwen2_5_vl"):
    return families.load_family(make_folder(model_type, **QWEN2), None).count(*size)


def qwen3(make_folder, *size, model_type="qwen3_vl"):
    return families.load_family(make_folder(model_type, patch=16, **QWEN3), None).count(*size)


@pytest.mark.parametrize(
    ("size", "second", "third"),
    [
        ((1024, 768), 999, 768),  # published examples
        ((640, 480), 391, 300),
        ((350, 350), 144, 121),  # 12.5 units round to 12, the even neighbour
        ((378, 378), 196, 144),  # 13.5 to 14
        ((33, 17), 6, 72),  # smaller than the least: scaled up
        ((512, 512), 324, 256),
        ((224, 224), 64, 64),
        ((448, 224), 128, 98),
        ((336, 336), 144, 100),
        ((100, 100), 16, 64),
        ((1920, 1080), 2691, 2040),
        ((4000, 3000), 15301, 11750),
    ],
)
def test_case_17_case_18_case_19_case_20_case_21_case_22_counts_are_those_of_the_engine(
    make_folder, size, second, third
):
    assert [qwen2(make_folder, *size, model_type=name) for name in ("qwen2_vl", "qwen2_5_vl")] == [second, second]
    later = ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
    assert [qwen3(make_folder, *size, model_type=name) for name in later] == [third] * 4


@pytest.mark.parametrize(
    ("size", "resized"),
    [
        *[((7, 103), (28, 224)), ((222, 11), (252, 28)), ((5, 288), (28, 448))],
        *[((123, 11), (196, 28)), ((14, 112), (28, 168))],
    ],
)
def test_a_side_of_half_a_unit_or_less_is_scaled_up_not_rounded_up(size, resized):
    # From transformers 5.19 itself: rounding such a side up to one unit gives fewer tokens.
    assert smart_resize(*size, unit=28, min_pixels=3136, max_pixels=12845056) == resized


@pytest.mark.parametrize("size", [(4020, 20), (201, 1), (1, 40000), (0, 10), (10, 0)])
def test_case_25_an_image_that_the_processor_refuses_is_an_error_not_a_count(make_folder, size):
    family = families.load_family(make_folder(**QWEN2), None)
    with pytest.raises(ImageSizeError, match=f"{size[0]}x{size[1]}"):
        family.count(*size)
    assert family.count(4000, 20) > 0  # 200:1 is still accepted


def size_of(file: Path) -> tuple[int, int]:
    size = probe(file.read_bytes(), max_pixels=200_000_000, exif=False)
    return size.width, size.height


@pytest.mark.parametrize("model", REAL + LLAVA)
def test_every_test_image_has_the_count_of_the_hugging_face_processor(models: Path, images: Path, model):
    family = families.load_family(models / model, None)
    expected = json.loads((images / "expected_tokens.json").read_text())["models"][model]
    counted = 0
    for name, want in expected.items():
        if "image_tokens" in want:
            assert family.count(*size_of(images / name)) == want["image_tokens"], name
            counted += 1
        elif want["error"].startswith("ValueError"):
            with pytest.raises(ImageSizeError):
                family.count(*size_of(images / name))
    assert counted >= 20


def test_an_unreadable_image_never_reaches_a_count(images: Path):
    for name in ("empty.png", "not_an_image.jpg"):
        with pytest.raises(ImageHeaderError):
            size_of(images / name)


@pytest.mark.parametrize(
    ("model", "name", "limits"),
    [
        (REAL[0], "qwen2_vl", (3136, 12845056)),
        (REAL[1], "qwen2_5_vl", (3136, 12845056)),
        (REAL[2], "qwen3_vl", (65536, 16777216)),
    ],
)
def test_real_folders_load(models: Path, model, name, limits):
    family = families.load_family(models / model, None)
    assert (family.name, family.placeholder_id, family.placeholder_text) == (name, 151655, "<|image_pad|>")
    assert family.pixel_options == {"min_pixels": limits[0], "max_pixels": limits[1]}
    assert family.rotates_exif


GEOMETRIES = [(28, 3136, 12845056), (32, 65536, 16777216), (28, 3136, 1003520)]
SIDES = st.integers(1, 20_000)


@given(SIDES, SIDES, st.sampled_from(GEOMETRIES))
def test_a_resized_image_keeps_the_limits_and_is_left_alone_when_resized_again(width, height, geometry):
    assume(max(width, height) <= MAX_ASPECT * min(width, height))
    unit, least, most = geometry
    limits = {"unit": unit, "min_pixels": least, "max_pixels": most}
    wide, high = smart_resize(width, height, **limits)
    assert wide % unit == high % unit == 0
    assert least <= wide * high <= most
    assert smart_resize(height, width, **limits) == (high, wide)
    if max(wide, high) <= MAX_ASPECT * min(wide, high):
        assert smart_resize(wide, high, **limits) == (wide, high)


@given(st.integers(112, 3500), st.integers(112, 3500))
def test_between_the_limits_a_larger_image_never_has_fewer_tokens(width, height):
    limits = {"unit": 28, "min_pixels": 3136, "max_pixels": 12845056}
    wide, high = smart_resize(width, height, **limits)
    assume((wide + 28) * (high + 28) <= limits["max_pixels"])
    for grown in ((width + 1, height), (width, height + 1)):
        assert all(a <= b for a, b in zip((wide, high), smart_resize(*grown, **limits), strict=True))


EDGES = {"shortest_edge": 3136, "longest_edge": 12845056}


def options(folder, **changes):
    return tuple(families.load_family(folder, limits(**changes) if changes else None).pixel_options.values())


PIXELS = {"min_pixels": 784, "max_pixels": 50176}


@pytest.mark.parametrize(
    ("processor", "resource", "limits"),
    [
        ({"size": EDGES}, {}, (3136, 12845056)),
        ({"min_pixels": 3136, "max_pixels": 12845056}, {}, (3136, 12845056)),  # both forms mean the same
        ({"size": EDGES, **PIXELS}, {}, (784, 50176)),  # pixel keys win over size
        ({"size": EDGES, "max_pixels": 50176}, {}, (3136, 50176)),
        ({}, {}, (3136, 1003520)),  # the class's defaults
        ({"size": EDGES, **PIXELS}, {"min_pixels": 12544, "max_pixels": 100352}, (12544, 100352)),
        ({"size": EDGES, **PIXELS}, {"max_pixels": 100352}, (784, 100352)),  # the resource wins over the folder
    ],
)
def test_case_23_limits_come_from_the_resource_then_pixel_keys_then_size_then_the_class(
    make_folder, processor, resource, limits
):
    assert options(make_folder(**processor), **resource) == limits


def test_settings_nested_in_processor_config_win_over_the_file_of_their_own(make_folder):
    folder = make_folder(min_pixels=784, max_pixels=50176)
    (folder / "processor_config.json").write_text(json.dumps({"processor_class": "Qwen2VLProcessor"}))
    assert options(folder) == (784, 50176)
    (folder / "processor_config.json").write_text(json.dumps({"image_processor": {"patch_size": 14, "size": EDGES}}))
    assert options(folder) == (3136, 12845056)


def test_an_unknown_family_is_none_and_not_an_error(make_folder):
    assert families.load_family(make_folder("mystery_vl"), None) is None


@pytest.mark.parametrize(
    ("processor", "complaint"),
    [
        ({"patch_size": 16}, "vision_config"),
        ({"merge_size": 4}, "vision_config"),
        ({"do_resize": False}, "do_resize"),
        ({"size": {"height": 336, "width": 336}}, "shortest_edge"),
        ({"size": {"longest_edge": 12845056}}, "min_pixels"),
        ({"min_pixels": 0}, "min_pixels"),
        ({"max_pixels": "many"}, "max_pixels"),
        ({"max_pixels": True}, "max_pixels"),
        ({"min_pixels": 50176, "max_pixels": 784}, "above"),
    ],
)
def test_a_geometry_that_cannot_be_used_is_refused_by_name(make_folder, processor, complaint):
    with pytest.raises(ModelFolderError, match=complaint):
        families.load_family(make_folder(**processor), None)


def test_an_option_that_the_family_does_not_have_is_refused(make_folder):
    with pytest.raises(ModelFolderError, match="num_crops"):
        options(make_folder(), num_crops=4)


def test_missing_and_broken_files_are_refused_by_name(make_folder):
    folder = make_folder()
    (folder / "preprocessor_config.json").unlink()
    with pytest.raises(ModelFolderError, match=r"preprocessor_config\.json: no such file"):
        families.load_family(folder, None)
    for text in ("{", "[]", "\xff"):
        (folder / "config.json").write_text(text, encoding="latin-1")
        with pytest.raises(ModelFolderError, match=r"config\.json"):
            families.load_family(folder, None)


@pytest.mark.parametrize("missing", ["image_token_id", "vision_config"])
def test_a_config_without_what_decides_the_layout_is_refused(make_folder, missing):
    folder = make_folder()
    config = json.loads((folder / "config.json").read_text())
    del config[missing]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelFolderError, match=missing):
        families.load_family(folder, None)
