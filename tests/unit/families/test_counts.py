"""Image size -> token count, against what vLLM and transformers 5.19 gave."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from mmrouter_lib import families
from mmrouter_lib.families import ImageSizeError
from mmrouter_lib.families.qwen_vl import MAX_ASPECT, smart_resize
from mmrouter_lib.image_size import ImageHeaderError, probe

QWEN2 = {"min_pixels": 3136, "max_pixels": 12845056}
QWEN3 = {"size": {"shortest_edge": 65536, "longest_edge": 16777216}}
REAL = ["Qwen--Qwen2-VL-2B-Instruct", "Qwen--Qwen2.5-VL-7B-Instruct", "Qwen--Qwen3-VL-2B-Instruct"]
LLAVA = ["llava-hf--llava-1.5-7b-hf", "llava-hf--llava-v1.6-mistral-7b-hf"]


def qwen2(make_folder, *size, model_type="qwen2_5_vl"):
    return families.load_family(make_folder(model_type, **QWEN2), None).count(*size)


def qwen3(make_folder, *size):
    return families.load_family(make_folder("qwen3_vl", patch=16, **QWEN3), None).count(*size)


def test_case_17_qwen25_1024x768(make_folder):
    assert qwen2(make_folder, 1024, 768) == 999


def test_case_18_qwen25_640x480(make_folder):
    assert qwen2(make_folder, 640, 480) == 391


def test_case_19_qwen3_1024x768(make_folder):
    assert qwen3(make_folder, 1024, 768) == 768


def test_case_20_qwen3_640x480(make_folder):
    assert qwen3(make_folder, 640, 480) == 300


def test_case_21_a_tie_rounds_to_even(make_folder):
    assert qwen2(make_folder, 350, 350) == 144  # 12.5 units round to 12, the even neighbour
    assert qwen2(make_folder, 378, 378) == 196  # 13.5 to 14
    assert qwen3(make_folder, 350, 350) == 121


def test_case_22_a_picture_smaller_than_the_least_is_scaled_up(make_folder):
    assert qwen2(make_folder, 33, 17) == 6
    assert qwen3(make_folder, 33, 17) == 72


@pytest.mark.parametrize(
    ("size", "second", "third"),
    [
        ((512, 512), 324, 256),
        ((224, 224), 64, 64),
        ((448, 224), 128, 98),
        ((336, 336), 144, 100),
        ((100, 100), 16, 64),
        ((1920, 1080), 2691, 2040),
        ((4000, 3000), 15301, 11750),
    ],
)
def test_counts_are_those_of_the_engine(make_folder, size, second, third):
    assert [qwen2(make_folder, *size, model_type=name) for name in ("qwen2_vl", "qwen2_5_vl")] == [second, second]
    assert qwen3(make_folder, *size) == third


@pytest.mark.parametrize(
    ("size", "resized"),
    [
        ((7, 103), (28, 224)),
        ((222, 11), (252, 28)),
        ((5, 288), (28, 448)),
        ((123, 11), (196, 28)),
        ((14, 112), (28, 168)),
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


@pytest.mark.parametrize("model", REAL + LLAVA)
def test_every_test_image_has_the_count_of_the_hugging_face_processor(models: Path, images: Path, model):
    family = families.load_family(models / model, None)
    expected = json.loads((images / "expected_tokens.json").read_text())["models"][model]
    counted = 0
    for name, want in expected.items():
        if "image_tokens" in want:
            size = probe((images / name).read_bytes(), max_pixels=200_000_000, exif=False)
            assert family.count(size.width, size.height) == want["image_tokens"], name
            counted += 1
        elif want["error"].startswith("ValueError"):
            size = probe((images / name).read_bytes(), max_pixels=200_000_000, exif=False)
            with pytest.raises(ImageSizeError):
                family.count(size.width, size.height)
    assert counted >= 20


def test_an_unreadable_image_never_reaches_a_count(images: Path):
    for name in ("empty.png", "not_an_image.jpg"):
        with pytest.raises(ImageHeaderError):
            probe((images / name).read_bytes(), max_pixels=200_000_000, exif=False)


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


@dataclass(frozen=True)
class Geometry:
    unit: int
    min_pixels: int
    max_pixels: int


GEOMETRIES = [Geometry(28, 3136, 12845056), Geometry(32, 65536, 16777216), Geometry(28, 3136, 1003520)]
SIDES = st.integers(1, 20_000)


@given(SIDES, SIDES, st.sampled_from(GEOMETRIES))
def test_a_resized_image_keeps_the_limits_and_is_left_alone_when_resized_again(width, height, geometry):
    assume(max(width, height) <= MAX_ASPECT * min(width, height))
    limits = {"unit": geometry.unit, "min_pixels": geometry.min_pixels, "max_pixels": geometry.max_pixels}
    wide, high = smart_resize(width, height, **limits)
    assert wide % geometry.unit == 0
    assert high % geometry.unit == 0
    assert geometry.min_pixels <= wide * high <= geometry.max_pixels
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
