"""Nemotron Omni: an image's and a recording's tokens, and when images are counted alone."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models
from unit.families.conftest import limits

from mmrouter_lib import families
from mmrouter_lib.families import Family, ImageSizeError, ModelFolderError, PromptImage
from mmrouter_lib.families.nemotron_omni import ARCHITECTURES, AudioEncoder, NemotronOmni
from mmrouter_lib.prompt.tokenizer import TokenizerCodec
from mmrouter_lib.wav_header import WavHeader

NAMES = ["<image>", "<img>", "</img>", "<so_embedding>", "<so_start>", "<so_end>"]
IMAGE, BEGIN, END, AUDIO, AUDIO_BEGIN, AUDIO_END = range(6)
ENCODER = AudioEncoder(rate=16_000, hop=160, layers=3, kernel=3, stride=2)
OMNI = NemotronOmni(IMAGE, 16, 1024, 13_312, AUDIO, ENCODER)
SOUND = {
    "sampling_rate": 16_000,
    "subsampling_factor": 8,
    "subsampling_conv_kernel_size": 3,
    "subsampling_conv_stride": 2,
}
CONFIG: dict[str, Any] = {
    "architectures": [ARCHITECTURES[0]],
    "model_type": ARCHITECTURES[0],
    "vision_config": {"args": {"min_num_patches": 1024, "max_num_patches": 13_312}},
    "patch_size": 16,
    "downsample_ratio": 0.5,
    "sound_config": SOUND,
}
TOKENIZER = {"added_tokens": [{"id": number, "content": name} for number, name in enumerate(NAMES)]}


@pytest.fixture(scope="module")
def codec() -> TokenizerCodec:
    tokenizer = Tokenizer(models.BPE(vocab={}, merges=[]))
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in NAMES])
    return TokenizerCodec.of(tokenizer, {})


@pytest.fixture
def load(write_folder):
    """Return a loader of a folder as published; arguments replace keys of config.json."""

    def made(tokenizer: dict[str, Any] = TOKENIZER, options: Any = None, **changes: Any) -> Family | None:
        return families.load_family(write_folder(config={**CONFIG, **changes}, tokenizer=tokenizer), options)

    return made


@pytest.mark.parametrize(
    ("size", "count"),
    [
        ((512, 512), 256 + 2),
        ((1920, 1088), 120 * 68 // 4 + 2),
        ((1, 1), 256 + 2),
        ((100, 50), 44 * 26 // 4 + 2),
        ((4000, 3000), 132 * 100 // 4 + 2),
        ((16, 200_000), 2 * 9122 // 4 + 2),
    ],
)
def test_an_image_keeps_its_shape_between_the_least_and_the_most_patches(size, count):
    assert OMNI.count(*size) == count


@pytest.mark.parametrize("size", [(0, 9), (9, 0), (16, 1_000_000)])
def test_an_image_without_pixels_or_with_nothing_left_of_a_side_is_refused(size):
    with pytest.raises(ImageSizeError):
        OMNI.count(*size)


@given(st.integers(1, 5000), st.integers(1, 5000))
def test_an_image_is_a_grid_of_squares_within_the_limits(codec, width, height):
    try:
        count = OMNI.count(width, height)
    except ImageSizeError:
        assert max(width, height) / min(width, height) > 1000
        return
    patches = 4 * (count - 2)
    assert patches + 2 * (width / 16 + height / 16) + 4 >= 1024
    assert patches <= 13_312 or min(width, height) < 32
    tokens = OMNI.tokens(codec, PromptImage(bytes(32), count), 0)
    assert list(tokens) == [BEGIN, *[IMAGE] * (count - 2), END]


@pytest.mark.parametrize(
    ("samples", "tokens"), [(1, 2), (1600, 2), (16_000, 13), (480_000, 375), (480_001, 375 + 2), (960_000, 750)]
)
def test_a_recording_is_counted_in_clips_of_30_seconds(codec, samples, tokens):
    count = OMNI.count_audio(WavHeader(16_000, samples))
    assert count == tokens + 2
    sound = PromptImage(bytes(32), count, modality="audio")
    assert list(OMNI.tokens(codec, sound, 0)) == [AUDIO_BEGIN, *[AUDIO] * tokens, AUDIO_END]


def test_a_recording_that_is_not_counted_keeps_its_placeholder(codec):
    assert OMNI.count_audio(WavHeader(44_100, 44_100)) is None
    assert list(OMNI.tokens(codec, PromptImage(bytes(32), 1, modality="audio"), 0)) == [AUDIO]


@pytest.mark.parametrize(
    ("images", "room", "alone"),
    [
        ([258], 3332, True),
        ([258], 3331, False),  # a larger image would be scaled down here
        ([3300, 28], 3332, True),
        ([3300, 29], 3332, False),
        ([258, None], 32_768, False),
        ([258], 0, False),
    ],
)
def test_images_are_counted_alone_where_the_context_has_room_for_all_of_known_size(images, room, alone):
    assert OMNI.fits(images, room) is alone


def test_without_a_largest_image_the_context_alone_is_the_limit():
    open_ended = NemotronOmni(IMAGE, 16, 1024, None)
    assert open_ended.count(8192, 8192) == 512 * 512 // 4 + 2
    assert open_ended.fits([1000], 1004)
    assert not open_ended.fits([258], 260)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_folders_as_published_load_and_are_proved_on_vllm(load, name):
    family = load(architectures=[name])
    assert family is not None
    assert (family.name, family.placeholder_id, family.audio_id, family.video_id) == (name, IMAGE, AUDIO, None)
    assert family.may_have_states
    assert [family.count(640, 480), family.count_audio(WavHeader(16_000, 99_999))] == [
        OMNI.count(640, 480),
        OMNI.count_audio(WavHeader(16_000, 99_999)),
    ]
    assert families.is_proved(name, "vllm")
    assert not families.is_proved(name, "sglang")


def test_audio_has_no_place_without_an_encoder_for_it(load):
    assert load(sound_config=None).audio_id is None


def test_a_folder_whose_images_are_tiles_or_whose_tokenizer_is_code_is_of_no_known_family(load, write_folder):
    assert load(vision_config={"args": {"model": "vit"}}) is None
    write_folder(tokenizer_config={"auto_map": {"AutoTokenizer": ["tokenization.Own", None]}})
    assert load() is None


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"vision_config": {}}, "args"),
        ({"vision_config": {"args": {"min_num_patches": 4}}}, "max_num_patches"),
        ({"vision_config": {"args": {"min_num_patches": 4, "max_num_patches": 3}}}, "at least min_num_patches"),
        ({"downsample_ratio": 0.25}, "downsample_ratio"),
        ({"patch_size": None}, "patch_size"),
        ({"sound_config": {**SOUND, "sampling_rate": None}}, "sampling_rate"),
        ({"tokenizer": {"added_tokens": []}}, "no token <image>"),
        ({"options": limits(max_pixels=4)}, "max_pixels"),
    ],
)
def test_values_that_are_not_modelled_are_refused_by_name(load, changes, complaint):
    with pytest.raises(ModelFolderError, match=complaint):
        load(**changes)


@pytest.mark.parametrize("name", ["<img>", "<so_end>"])
def test_a_tokenizer_without_a_token_around_images_or_audio_is_refused(name):
    tokenizer = Tokenizer(models.BPE(vocab={}, merges=[]))
    tokenizer.add_special_tokens([AddedToken(each if each != name else "<other>", special=True) for each in NAMES])
    with pytest.raises(ModelFolderError, match=name):
        OMNI.check(TokenizerCodec.of(tokenizer, {}))
