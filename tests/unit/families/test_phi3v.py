"""Phi-3-vision: tiles, counts, and which of a folder's files and keys decide them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.families.conftest import limits

from mmrouter_lib import families
from mmrouter_lib.families import ImageSizeError, ModelFolderError
from mmrouter_lib.families.phi3v import TILE, tiles

FILES = {
    "config": {"model_type": "phi3_v", "img_processor": {"num_img_tokens": 144}},
    "preprocessor_config": {"num_crops": 16, "num_img_tokens": 144},
}
SIDES = st.integers(1, 6000)
CROPS = st.integers(1, 40)


def test_case_30_phi3_512x512_with_the_folders_crops_and_the_resources(write_folder):
    folder = write_folder(**FILES)
    assert families.load_family(folder, None).count(512, 512) == 2509
    assert families.load_family(folder, limits(num_crops=4)).count(512, 512) == 757
    write_folder(preprocessor_config={"num_crops": 4})
    assert families.load_family(folder, None).count(512, 512) == 757


@pytest.mark.parametrize(
    ("size", "count"),
    [((1024, 768), 1921), ((640, 480), 1921), ((1920, 1080), 2353), ((480, 320), 1921), ((320, 480), 1933)],
)
def test_counts_are_those_of_the_engine(write_folder, size, count):
    assert families.load_family(write_folder(**FILES), None).count(*size) == count


def test_an_image_too_thin_for_one_pixel_is_refused(write_folder):
    family = families.load_family(write_folder(**FILES), None)
    assert family.count(5376, 1) == 2473  # captured: 336 x 16 pixels long
    for size in ((5377, 1), (1, 5377), (6000, 1), (0, 1), (1, 0)):
        with pytest.raises(ImageSizeError, match=f"{size[0]}x{size[1]}"):
            family.count(*size)


def test_the_crops_are_part_of_the_identity_and_default_to_the_classes_own(write_folder):
    folder = write_folder(**FILES)
    assert families.load_family(folder, None).pixel_options == {"num_crops": 16}
    assert families.load_family(folder, limits(num_crops=9)).pixel_options == {"num_crops": 9}
    write_folder(preprocessor_config={})
    assert families.load_family(folder, None).pixel_options == {"num_crops": 1}


@pytest.mark.parametrize(
    ("files", "complaint"),
    [
        ({"preprocessor_config": {"num_crops": 0}}, "num_crops"),
        ({"preprocessor_config": {"num_img_tokens": 100}}, "num_img_tokens"),
        ({"config": {"model_type": "phi3_v", "img_processor": {"num_img_tokens": 100}}}, "num_img_tokens"),
        ({"config": {"model_type": "phi3_v", "img_processor": [1]}}, "img_processor"),
        ({"tokenizer_config": {"clean_up_tokenization_spaces": True}}, "clean_up"),
    ],
)
def test_what_is_not_modelled_is_refused_by_name(write_folder, files, complaint):
    with pytest.raises(ModelFolderError, match=complaint):
        families.load_family(write_folder(**{**FILES, **files}), None)


@pytest.mark.parametrize("option", ["min_pixels", "max_pixels"])
def test_an_option_that_the_family_does_not_have_is_refused(write_folder, option):
    with pytest.raises(ModelFolderError, match=option):
        families.load_family(write_folder(**FILES), limits(**{option: 4}))


@given(SIDES, SIDES, CROPS)
def test_tiles_keep_the_limit_turn_with_the_image_and_never_become_fewer_with_more_crops(width, height, crops):
    try:
        rows, columns = tiles(width, height, crops)
    except ImageSizeError:
        assert max(width, height) > TILE * min(width, height)
        return
    assert 1 <= rows * columns <= crops
    assert (columns >= rows) == (width >= height) or rows == columns
    assert tiles(height, width, crops) == (columns, rows) or width == height
    more_rows, more_columns = tiles(width, height, crops + 1)
    assert more_rows * more_columns >= rows * columns


@given(SIDES, st.integers(1, 8), st.integers(1, 8), CROPS)
def test_the_count_depends_on_the_shape_alone(unit, wide, high, crops):
    if max(wide, high) * unit <= 6000:
        assert tiles(wide * unit, high * unit, crops) == tiles(wide, high, crops)
