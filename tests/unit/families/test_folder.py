"""Which of a folder's files and keys decide the geometry."""

import json
from types import SimpleNamespace

import pytest

from mmrouter_lib import families
from mmrouter_lib.families import ModelFolderError

EDGES = {"shortest_edge": 3136, "longest_edge": 12845056}


def options(folder, **limits):
    processor = (
        SimpleNamespace(**{"min_pixels": None, "max_pixels": None, "num_crops": None, **limits}) if limits else None
    )
    return tuple(families.load_family(folder, processor).pixel_options.values())


def test_case_23_both_forms_of_the_limits_mean_the_same(make_folder):
    assert options(make_folder(size=EDGES)) == (3136, 12845056)
    assert options(make_folder(min_pixels=3136, max_pixels=12845056)) == (3136, 12845056)


def test_pixel_keys_win_over_size_where_a_file_has_both(make_folder):
    assert options(make_folder(size=EDGES, min_pixels=784, max_pixels=50176)) == (784, 50176)
    assert options(make_folder(size=EDGES, max_pixels=50176)) == (3136, 50176)


def test_without_any_limit_the_class_defaults_hold(make_folder):
    assert options(make_folder()) == (3136, 1003520)


def test_the_resource_wins_over_the_folder(make_folder):
    folder = make_folder(size=EDGES, min_pixels=784, max_pixels=50176)
    assert options(folder, min_pixels=12544, max_pixels=100352) == (12544, 100352)
    assert options(folder, max_pixels=100352) == (784, 100352)


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
