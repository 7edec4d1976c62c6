"""Families whose images are rows, tiles or slices: an image's tokens, and which of a folder's files decide them."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from unit.families.conftest import limits

from mmrouter_lib import families
from mmrouter_lib.families import Family, ImageSizeError, ModelFolderError, NotModelledError, PromptImage
from mmrouter_lib.families.gemma4 import Gemma4
from mmrouter_lib.families.glm4v import Glm4v
from mmrouter_lib.families.internvl import InternVL
from mmrouter_lib.families.kimi_k25 import KimiK25
from mmrouter_lib.families.llama4 import Llama4
from mmrouter_lib.families.minicpmv import MiniCPMV
from mmrouter_lib.families.nemotron_vl import NemotronVL
from mmrouter_lib.families.pixtral import Pixtral
from mmrouter_lib.prompt.tokenizer import TokenizerCodec

NAMES = [
    *("[IMG]", "[IMG_BREAK]", "[IMG_END]", "<|image|>", "<IMG_CONTEXT>", "<img>", "</img>", "<|image_pad|>"),
    *("<|image_start|>", "<|image_end|>", "<|patch|>", "<|tile_x_separator|>", "<|tile_y_separator|>"),
    *("<image>", "</image>", "<slice>", "</slice>", "<image_id>", "</image_id>", "<|media_pad|>"),
]
FIRST = 300
IDS = {name: FIRST + number for number, name in enumerate(NAMES)}
IMG, BREAK, END = (IDS[name] for name in NAMES[:3])

PIXTRAL = Pixtral("mistral3", IMG, 28, 1540)
GLM = Glm4v("glm4v", IDS["<|image|>"], 28, 112 * 112, 28 * 28 * 15_000)
INTERNVL = InternVL(IDS["<IMG_CONTEXT>"], 448, 256, 1, 12)
LLAMA4 = Llama4(IDS["<|image|>"], 336, 144, 16)
GEMMA4 = Gemma4(IDS["<|image|>"], 1, 2, 16, 3, 280)
MINICPM = MiniCPMV(IDS["<|image_pad|>"], 14, 448, 9, 16)
NEMOTRON = NemotronVL(IDS["<image>"], 512, 256, 1, 12)
ALL = {"mistral3": PIXTRAL, "glm4v": GLM, "internvl": INTERNVL, "llama4": LLAMA4, "gemma4": GEMMA4, "minicpm": MINICPM}
KIMI_CODE = Path(__file__).parents[3] / "hack" / "engines" / "folder_code" / "tokenization_kimi.py"
KIMI = KimiK25(IDS["<|media_pad|>"], 14, 2, 16_384, 512)
ALL |= {"nemotron": NEMOTRON, "kimi_k25": KIMI}


@pytest.fixture(scope="module")
def codec() -> TokenizerCodec:
    """A tokenizer of bytes with the tokens of all families."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: at for at, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    filler = [AddedToken(f"<unused{number}>", special=True) for number in range(FIRST - len(alphabet))]
    tokenizer.add_special_tokens([*filler, *(AddedToken(name, special=True) for name in NAMES)])
    assert tokenizer.token_to_id(NAMES[0]) == FIRST
    return TokenizerCodec.of(tokenizer, {})


@pytest.mark.parametrize(
    ("family", "size", "count"),
    [
        ("mistral3", (28, 28), 2),
        ("mistral3", (1540, 1540), 55 * 56),
        ("mistral3", (3080, 1540), 28 * 56),
        ("mistral3", (29, 28), 3),
        ("glm4v", (336, 336), 144),
        ("glm4v", (1, 1), 9),
        ("glm4v", (8000, 8000), 86 * 86),
        ("internvl", (448, 448), 258),
        ("internvl", (896, 448), 3 * 256 + 2),
        ("internvl", (10, 900), 13 * 256 + 2),
        ("llama4", (336, 336), 147),
        ("llama4", (100, 50), 147),
        ("llama4", (672, 672), 4 * 145 + 147),
        ("llama4", (337, 336), 2 * 145 + 147),
        ("gemma4", (800, 800), 256 + 2),
        ("gemma4", (1600, 400), 33 * 8 + 2),
        ("gemma4", (3, 900), 280 + 2),
        ("minicpm", (448, 448), 64 + 5),
        ("minicpm", (896, 896), 3 + 66 + 4 * 66 + 1),
        ("nemotron", (512, 512), 256 + 2),
        ("nemotron", (1024, 512), 3 * 256 + 2),
        ("nemotron", (10, 900), 13 * 256 + 2),
        ("kimi_k25", (28, 28), 1),
        ("kimi_k25", (29, 28), 2),
        ("kimi_k25", (1, 1), 1),
        ("kimi_k25", (1792, 1792), 64 * 64),
        ("kimi_k25", (3584, 3584), 64 * 64),
        ("kimi_k25", (14_336, 14), 256),
    ],
)
def test_an_image_has_the_tokens_of_the_published_processor(family, size, count):
    assert ALL[family].count(*size) == count


SIDES = st.integers(1, 5000)


@pytest.mark.parametrize("name", ALL)
@given(width=SIDES, height=SIDES)
def test_an_image_becomes_as_many_tokens_as_it_is_counted(codec, name, width, height):
    family = ALL[name]
    try:
        count = family.count(width, height)
    except ImageSizeError:
        return
    tokens = family.tokens(codec, PromptImage(bytes(32), count, (width, height)), 0)
    assert len(tokens) == count
    assert family.placeholder_id in tokens


@pytest.mark.parametrize("name", ALL)
def test_an_image_without_pixels_is_refused(name):
    for size in ((0, 10), (10, 0)):
        with pytest.raises(ImageSizeError):
            ALL[name].count(*size)


def expanded(family: Family, codec: TokenizerCodec, text: str, *sizes: tuple[int, int]) -> tuple[list[int], list[Any]]:
    images = [PromptImage(bytes([n]) * 32, family.count(*size), size) for n, size in enumerate(sizes)]
    made = family.expand(codec, text, images, add_special_tokens=False)
    return made.ids.tolist(), [(span.offset, span.length) for span in made.spans]


def test_rows_of_pixtral_end_with_a_break_and_the_last_with_an_end(codec):
    ids, spans = expanded(PIXTRAL, codec, "[IMG][IMG]", (56, 84), (28, 28))
    assert ids == [IMG, IMG, BREAK, IMG, IMG, BREAK, IMG, IMG, END, IMG, END]
    assert spans == [(0, 9), (9, 2)]


def test_an_image_of_which_a_side_would_vanish_is_refused_by_pixtral():
    with pytest.raises(ImageSizeError, match="shorter side"):
        PIXTRAL.count(5000, 1)


def test_case_32_kimi_pads_an_image_to_squares_and_scales_a_large_one_down():
    assert [KIMI.count(1024, 768), KIMI.count(4000, 3000)] == [1036, 4200]


def test_case_31_tiles_of_llama4_are_separated_and_the_whole_picture_follows(codec):
    begin, end, patch, between, row = (IDS[name] for name in NAMES[8:13])
    family = Llama4(IDS["<|image|>"], 336, 2, 16)
    ids, _ = expanded(family, codec, "<|image|>", (672, 336))
    assert ids == [begin, patch, patch, between, patch, patch, row, IDS["<|image|>"], patch, patch, end]
    assert expanded(family, codec, "<|image|>", (9, 9))[0] == [begin, IDS["<|image|>"], patch, patch, end]


def test_images_of_internvl_and_gemma4_stand_between_two_tokens(codec):
    ids, spans = expanded(INTERNVL, codec, "<IMG_CONTEXT>", (448, 448))
    assert (ids[0], ids[-1], spans) == (IDS["<img>"], IDS["</img>"], [(0, 258)])
    ids, spans = expanded(GEMMA4, codec, "<|image|>", (800, 800))
    assert (ids[0], ids[-1], spans) == (1, 2, [(0, 258)])
    image = PromptImage(bytes(32), GEMMA4.count(800, 800), (800, 800))
    made = GEMMA4.expand_text(codec, "<|image|>", [image], add_special_tokens=False)
    assert (made.ids.tolist(), made.spans[0].offset, made.spans[0].length) == (ids, 1, 256)


def test_images_of_minicpm_are_numbered_and_rows_of_slices_stand_on_lines(codec):
    def text(number: int, rows: Sequence[int]) -> list[int]:
        slices = "\n".join("<slice><|image_pad|></slice>" * columns for columns in rows)
        ids = codec.encode(
            f"<image_id>{number}</image_id><image><|image_pad|></image>{slices}", add_special_tokens=False
        )
        return ids.tolist()

    pads = IDS["<|image_pad|>"]

    def short(ids: list[int]) -> list[int]:
        return [token for at, token in enumerate(ids) if token != pads or ids[at - 1] != pads]

    ids, spans = expanded(MINICPM, codec, "<|image_pad|><|image_pad|>", (448, 448), (896, 896))
    first = spans[0][1]
    assert short(ids[:first]) == text(0, [])
    assert short(ids[first:]) == text(1, [2, 2])
    many = [PromptImage(bytes([n]) * 32, 69, (448, 448)) for n in range(11)]
    made = MINICPM.expand(codec, "<|image_pad|>" * 11, many, add_special_tokens=False)
    assert [span.length for span in made.spans] == [69] * 10 + [70]  # the eleventh has a number of two digits


def test_a_tile_layout_needs_the_images_size(codec):
    for family in (PIXTRAL, LLAMA4, MINICPM):
        with pytest.raises(NotModelledError, match="size"):
            family.tokens(codec, PromptImage(bytes(32), 5), 0)


FOLDERS: dict[str, dict[str, dict[str, Any]]] = {
    "mistral3": {
        "config": {
            "vision_config": {"model_type": "pixtral", "patch_size": 14, "image_size": 1540},
            "image_token_index": 10,
        },
        "preprocessor_config": {"size": {"longest_edge": 1540}},
        "processor_config": {"patch_size": 14, "spatial_merge_size": 2},
    },
    "glm4v": {
        "config": {"vision_config": {}, "image_token_id": 9},
        "preprocessor_config": {"size": {"shortest_edge": 12_544, "longest_edge": 9_633_792}},
    },
    "internvl": {
        "config": {"image_token_id": 9, "image_seq_length": 256},
        "preprocessor_config": {"size": {"height": 448, "width": 448}},
        "processor_config": {"image_seq_length": 256},
    },
    "llama4": {
        "config": {"vision_config": {"image_size": 336, "patch_size": 14, "pixel_shuffle_ratio": 0.5}},
        "preprocessor_config": {"size": {"height": 336, "width": 336}},
        "tokenizer": {"added_tokens": [{"id": 77, "content": "<|image|>"}]},
    },
    "gemma4": {"config": {"vision_config": {}}, "preprocessor_config": {}},
    "minicpmv4_6": {"config": {"image_token_id": 9}, "preprocessor_config": {}},
    NEMOTRON.name: {
        "config": {
            "vision_config": {"args": {"model": "vit_huge_patch16_224"}},
            "force_image_size": 512,
            "patch_size": 16,
            "downsample_ratio": 0.5,
            "use_thumbnail": True,
        },
        "tokenizer": {"added_tokens": [{"id": 77, "content": "<image>"}]},
    },
    "kimi_k25": {
        "config": {"use_unified_vision_chunk": True},
        "preprocessor_config": {
            "media_proc_cfg": {
                "patch_size": 14,
                "merge_kernel_size": 2,
                "in_patch_limit": 16_384,
                "patch_limit_on_one_side": 512,
                "fixed_output_tokens": None,
            }
        },
        "tokenizer": {"added_tokens": [{"id": 77, "content": "<|media_pad|>"}]},
    },
    "qwen3_omni_moe": {
        "config": {
            "thinker_config": {
                "image_token_id": 9,
                "audio_token_id": 10,
                "vision_config": {"patch_size": 16, "spatial_merge_size": 2},
            }
        },
        "preprocessor_config": {"patch_size": 16, "min_pixels": 3136, "max_pixels": 12_845_056},
    },
}
GEOMETRY: dict[str, Any] = FOLDERS["kimi_k25"]["preprocessor_config"]["media_proc_cfg"]


@pytest.fixture
def load(write_folder):
    """Return a loader of a family's folder; keyword arguments replace keys of its files."""

    def made(name: str, options: Any = None, **changes: dict[str, Any]) -> Family:
        files = {file: {**values, **changes.get(file, {})} for file, values in FOLDERS[name].items()}
        files["config"]["model_type"] = changes.get("config", {}).get("model_type", name)
        folder: Path = write_folder(**files)
        family = families.load_family(folder, options)
        assert family is not None
        return family

    return made


@pytest.mark.parametrize("name", FOLDERS)
def test_folders_as_published_load_and_are_proved_on_vllm_and_some_on_sglang(load, name):
    family = load(name)
    same = {each.name: each for each in (PIXTRAL, GLM, INTERNVL, LLAMA4, NEMOTRON, KIMI)}.get(name)
    if same is not None:
        assert [family.count(*size) for size in ((1, 1), (999, 1333))] == [
            same.count(*s) for s in ((1, 1), (999, 1333))
        ]
    assert families.is_proved(name, "vllm")
    assert families.is_proved(name, "sglang") == (
        name in ("gemma4", "glm4v", "glm4v_moe", "glm_ocr", "kimi_k25", "mistral3", "qwen3_omni_moe")
    )
    with pytest.raises(ModelFolderError, match="max_pixels"):
        load(name, limits(max_pixels=4))


def test_a_llava_folder_with_a_pixtral_tower_is_pixtral(load):
    vision = {"model_type": "pixtral", "patch_size": 16, "image_size": 1024}
    family = load(
        "mistral3",
        config={"model_type": "llava", "vision_config": vision},
        preprocessor_config={"size": {"longest_edge": 1024}},
        processor_config={"patch_size": 16, "spatial_merge_size": 1},
    )
    assert (family.name, family.count(1024, 1024)) == ("llava", 64 * 65)


def test_a_folder_with_mistrals_own_tokenizer_is_of_no_known_family(load, tmp_path):
    load("mistral3")
    (tmp_path / "tekken.json").write_text("{}")
    assert families.load_family(tmp_path, None) is None


def test_audio_has_a_place_where_the_folder_has_a_tower_for_it(load):
    assert load("gemma4").audio_id is None
    assert load("gemma4", config={"audio_config": {}}).audio_id == 258_881
    assert load("gemma4", config={"audio_config": {}, "audio_token_id": 7}).audio_id == 7
    omni = load("qwen3_omni_moe")
    assert (omni.placeholder_id, omni.audio_id, omni.video_id) == (9, 10, None)
    assert omni.count(640, 480) == 300


def test_a_tokenizer_with_another_placeholder_of_audio_is_refused(codec):
    with pytest.raises(ModelFolderError, match=r"'<\|audio\|>' as None, config.json as 7"):
        replace(GEMMA4, audio_id=7).check(codec)


@pytest.mark.parametrize("name", ["llama4", NEMOTRON.name, "kimi_k25"])
def test_a_family_whose_config_names_no_placeholder_takes_that_of_the_tokenizer(load, name):
    assert load(name).placeholder_id == 77
    with pytest.raises(ModelFolderError, match="no token"):
        load(name, tokenizer={"added_tokens": []})


def test_images_of_nemotron_stand_between_two_tokens_and_its_layers_may_keep_states(codec):
    ids, spans = expanded(NEMOTRON, codec, "<image>", (512, 512))
    assert (ids, spans) == ([IDS["<img>"], *[IDS["<image>"]] * 256, IDS["</img>"]], [(0, 258)])
    assert NEMOTRON.may_have_states
    assert not INTERNVL.may_have_states


@pytest.mark.parametrize("code", ["tokenization.Own", ["tokenization.Own", None]])
@pytest.mark.parametrize("name", [NEMOTRON.name, "kimi_k25"])
def test_a_folder_whose_tokenizer_is_code_of_its_own_is_of_no_known_family(load, tmp_path, name, code):
    load(name)
    for auto_map, known in (({"AutoProcessor": "a.B"}, True), ({"AutoTokenizer": code}, False), ([code, None], False)):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"auto_map": auto_map}))
        assert (families.load_family(tmp_path, None) is not None) == known


def test_a_kimi_needs_a_tokenizer_json_or_code_of_the_published_form(load, tmp_path):
    placeholder = load("kimi_k25").placeholder_id
    (tmp_path / "tokenizer.json").unlink()
    assert families.load_family(tmp_path, None) is None
    shutil.copyfile(KIMI_CODE, tmp_path / "tokenization_kimi.py")
    described = {"auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}}
    described |= {"added_tokens_decoder": {str(placeholder): {"content": "<|media_pad|>"}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(described))
    assert families.load_family(tmp_path, None) is None
    (tmp_path / "tiktoken.model").touch()
    functions = ("encode_tools_to_typescript_style", "_openai_function_to_typescript_style", "_parse_parameter_type")
    (tmp_path / "tool_declaration_ts.py").write_text("".join(f"def {name}(): ...\n" for name in functions))
    loaded = families.load_family(tmp_path, None)
    assert loaded is not None
    assert loaded.placeholder_id == placeholder


def test_a_nemotron_that_resizes_images_to_the_room_in_the_context_is_of_no_known_family(load, write_folder):
    load(NEMOTRON.name)
    sizes = {"min_num_patches": 1024, "max_num_patches": 13_312}
    config = FOLDERS[NEMOTRON.name]["config"] | {"model_type": NEMOTRON.name, "vision_config": {"args": sizes}}
    assert families.load_family(write_folder(config=config), None) is None


@pytest.mark.parametrize(
    ("name", "file", "change", "complaint"),
    [
        ("mistral3", "processor_config", {"patch_size": 16}, "spatial_merge_size"),
        ("mistral3", "preprocessor_config", {"do_resize": False}, "do_resize"),
        ("mistral3", "config", {"vision_config": {"model_type": "clip"}}, "Pixtral"),
        ("glm4v", "preprocessor_config", {"merge_size": 3}, "temporal|merge_size"),
        ("glm4v", "preprocessor_config", {"temporal_patch_size": 4}, "temporal_patch_size"),
        ("glm4v", "preprocessor_config", {"size": {"height": 3}}, "shortest_edge"),
        ("glm4v", "config", {"vision_config": None}, "vision_config"),
        ("internvl", "processor_config", {"image_seq_length": 64}, "image_seq_length"),
        ("internvl", "preprocessor_config", {"size": {"height": 448, "width": 336}}, "square"),
        ("llama4", "preprocessor_config", {"size": {"height": 448, "width": 448}}, "image_size"),
        ("llama4", "config", {"vision_config": {"image_size": 336, "pixel_shuffle_ratio": 0}}, "pixel_shuffle_ratio"),
        ("gemma4", "preprocessor_config", {"max_soft_tokens": 70}, "max_soft_tokens"),
        ("gemma4", "preprocessor_config", {"do_resize": False}, "do_resize"),
        ("gemma4", "config", {"audio_config": {}, "audio_token_id": "x"}, "audio_token_id"),
        ("qwen3_omni_moe", "config", {"thinker_config": None}, "thinker_config"),
        ("minicpmv4_6", "preprocessor_config", {"slice_mode": False}, "slice_mode"),
        ("minicpmv4_6", "preprocessor_config", {"downsample_mode": "2x"}, "downsample_mode"),
        ("kimi_k25", "config", {"use_unified_vision_chunk": None}, "use_unified_vision_chunk"),
        ("kimi_k25", "preprocessor_config", {"media_proc_cfg": None}, "media_proc_cfg"),
        *(
            ("kimi_k25", "preprocessor_config", {"media_proc_cfg": GEOMETRY | {key: value}}, key)
            for key, value in (
                ("fixed_output_tokens", 64),
                ("merge_kernel_size", [2, 1]),
                ("merge_kernel_size", []),
                ("in_patch_limit", None),
                ("patch_limit_on_one_side", 0),
            )
        ),
        (NEMOTRON.name, "config", {"use_thumbnail": False}, "use_thumbnail"),
        (NEMOTRON.name, "config", {"downsample_ratio": 2}, "downsample_ratio"),
        (NEMOTRON.name, "config", {"force_image_size": None}, "force_image_size"),
        (NEMOTRON.name, "config", {"force_image_size": 8}, "no token"),
        (NEMOTRON.name, "config", {"vision_config": {}}, "args"),
    ],
)
def test_files_that_contradict_each_other_are_refused_by_name(load, name, file, change, complaint):
    with pytest.raises(ModelFolderError, match=complaint):
        load(name, **{file: change})
