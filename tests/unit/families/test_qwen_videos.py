"""Videos of Qwen-VL: frames that vLLM takes, and the ids that they become, by the rules that its loaders state.

tests/conformance/vllm/test_videos.py compares drawn videos with what vLLM itself makes of them.
"""

import json
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.families.conftest import limits

from mmrouter_lib import families
from mmrouter_lib.families import ImageSizeError, PromptImage
from mmrouter_lib.families.qwen_vl import evenly, resize_together, spread
from mmrouter_lib.video_header import VideoHeader

IDS = {"video_token_id": 5, "vision_start_token_id": 6, "vision_end_token_id": 7}
PIXELS = {"size": {"shortest_edge": 4096, "longest_edge": 25165824}}


def video(frames, fps, width=64, height=48):
    return VideoHeader(width, height, frames, fps)


@pytest.mark.parametrize(
    ("frames", "fps", "taken"),
    [
        (60, 30.0, 4),
        (2, 30.0, 2),
        (3, 1.0, 2),
        (7, 1.0, 6),
        (101, 30000 / 1001, 6),
        (900, 30.0, 60),
        (40_000, 25.0, 768),
    ],
)
def test_up_to_qwen25_an_even_number_of_frames_is_taken(frames, fps, taken):
    assert evenly(video(frames, fps)) == taken


@pytest.mark.parametrize(
    ("frames", "fps", "taken"),
    [
        (60, 30.0, [0, 20, 39, 59]),
        (2, 30.0, [0, 1]),
        (3, 1.0, [0, 1, 2]),
        (7, 1.0, [0, 1, 2, 3, 4, 5, 6]),
        (75, 30.0, [0, 18, 37, 56, 74]),
    ],
)
def test_from_qwen3_on_frames_are_spread_from_the_first_to_the_last(frames, fps, taken):
    assert spread(video(frames, fps), 2, 4, 768) == taken


@pytest.mark.parametrize(("frames", "fps", "taken"), [(60, 30.0, 4), (4, 30.0, 3), (61, 30.0, 4), (5, 1.0, 4)])
def test_up_to_qwen25_a_last_frame_that_is_missing_is_left_out_where_all_are_taken(frames, fps, taken):
    assert evenly(VideoHeader(64, 48, frames, fps, missing=1)) == taken


@given(st.integers(2, 100_000), st.sampled_from([1.0, 5.0, 24000 / 1001, 25.0, 30.0, 60.0, 240.0]))
def test_both_take_some_of_the_frames_and_each_once(frames, fps):
    taken = spread(video(frames, fps), 2, 4, 768)
    assert len(taken) == min(max(int(frames / fps * 2), 4), 768, frames)
    assert (taken[0], taken[-1], taken) == (0, frames - 1, sorted(set(taken)))
    assert 2 <= evenly(video(frames, fps)) <= min(769, frames)


@given(st.integers(1, 2000), st.integers(1, 2000), st.integers(2, 768))
def test_frames_share_the_pixels(width, height, frames):
    if max(width, height) > 150 * min(width, height):
        return
    wide, high = resize_together(width, height, frames, unit=32, min_pixels=4096, max_pixels=25_165_824)
    assert (wide % 32, high % 32) == (0, 0)
    assert round(frames / 2) * 2 * wide * high <= 25_165_824 or 32 in (wide, high)


def folder(make_folder, model_type, *, video_file=None, **processor):
    made = make_folder(model_type, patch=16 if model_type.startswith("qwen3") else 14, **processor)
    config = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(json.dumps(config | IDS))
    if video_file is not None:
        (made / "video_preprocessor_config.json").write_text(json.dumps(video_file))
    return made


def encode(text, add_special_tokens):
    """Encode as a tokenizer with one id per character."""
    assert not add_special_tokens
    return SimpleNamespace(ids=[1000 + ord(each) for each in text])


CODEC = SimpleNamespace(tokenizer=SimpleNamespace(encode=encode))


def test_up_to_qwen25_a_video_is_one_run(make_folder):
    family = families.load_family(folder(make_folder, "qwen2_5_vl", min_pixels=3136, max_pixels=12845056), None)
    shown = video(60, 30.0)
    assert (family.video_id, family.count_video(shown)) == (5, 8)
    assert list(family.tokens(CODEC, PromptImage(bytes(32), 8, modality="video", video=shown), 0)) == [5] * 8
    assert list(family.tokens(CODEC, PromptImage(bytes(32), 1, modality="video"), 0)) == [5]


def test_from_qwen3_on_each_slice_stands_behind_its_time(make_folder):
    made = folder(make_folder, "qwen3_vl", video_file=PIXELS, **PIXELS)
    family = families.load_family(made, None)
    shown = video(75, 30.0)  # frames 0, 18, 37, 56 and 74, the last of them twice
    ids = family.tokens(CODEC, PromptImage(bytes(32), 1, modality="video", video=shown), 0)
    runs = "".join(chr(each - 1000) if each > 1000 else f"[{each}]" for each in ids)
    a_slice = "[6]" + "[5]" * (family.count_video(shown) // 3) + "[7]"
    assert runs == "".join(f"<{time} seconds>{a_slice}" for time in ("0.3", "1.6", "2.5"))


def test_a_video_of_one_frame_is_refused(make_folder):
    for model_type in ("qwen2_5_vl", "qwen3_vl"):
        family = families.load_family(folder(make_folder, model_type, **PIXELS), None)
        with pytest.raises(ImageSizeError, match="at least 2"):
            family.count_video(video(1, 30.0))


@pytest.mark.parametrize(
    "options",
    [
        {"video_processor_type": "OtherVideoProcessor"},
        {"cap_pixels_per_frame": True},
        {"num_frames": 8},
        {"temporal_patch_size": 1},
        {"patch_size": 14},
        {"do_resize": False},
        {"size": {"shortest_edge": 1.5, "longest_edge": 9}},
    ],
)
def test_videos_with_options_that_are_not_modelled_have_no_place(make_folder, options):
    made = folder(make_folder, "qwen3_vl", video_file=PIXELS | options, **PIXELS)
    family = families.load_family(made, None)
    assert family.video_id is None
    assert family.count(64, 64) > 0


def test_pixel_limits_of_the_resource_leave_videos_unmodelled(make_folder):
    made = folder(make_folder, "qwen3_vl", video_file=PIXELS, **PIXELS)
    assert families.load_family(made, limits(max_pixels=100_000)).video_id is None
