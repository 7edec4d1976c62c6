"""InternVL of its authors: an image's place is a text, whose tokens depend on what stands beside it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from unit.families.conftest import limits

from mmrouter_lib import families
from mmrouter_lib.families import ModelFolderError, NotModelledError, PlaceholderError, PromptImage
from mmrouter_lib.families.internvl import InternVL
from mmrouter_lib.families.internvl_chat import InternVLChat
from mmrouter_lib.prompt.tokenizer import TokenizerCodec

NAMES = ["<IMG_CONTEXT>", "<img>", "</img>"]
JOINED = [(">", "!"), ("!", "<")]  # pairs that are one token side by side, so that they hide the place of an image
CONFIG = {
    "model_type": "internvl_chat",
    "vision_config": {"image_size": 448, "patch_size": 14},
    "downsample_ratio": 0.5,
    "dynamic_image_size": True,
    "use_thumbnail": True,
    "min_dynamic_patch": 1,
    "max_dynamic_patch": 12,
}
TOKENIZER = {"added_tokens": [{"id": 77, "content": NAMES[0]}]}


def made(**flags: bool) -> TokenizerCodec:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: at for at, letter in enumerate(alphabet)}
    vocabulary |= {"".join(pair): len(vocabulary) + at for at, pair in enumerate(JOINED)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=JOINED))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True, **flags) for name in NAMES])
    return TokenizerCodec.of(tokenizer, {})


@pytest.fixture(scope="module")
def codec() -> TokenizerCodec:
    return made()


@pytest.fixture(scope="module")
def family(codec) -> InternVLChat:
    context = codec.token_id(NAMES[0])
    assert context is not None
    return InternVLChat(context, 448, 256, 1, 12)


def image(number: int, count: int = 5) -> PromptImage:
    return PromptImage(bytes([number]) * 32, count)


def shown(family, codec, text, *images):
    """The expanded prompt as a text, and the text of each image's span."""
    done = family.expand(codec, text, images, add_special_tokens=False)
    return codec.decode(done.ids), [codec.decode(done.ids[span.offset : span.end]) for span in done.spans]


WHOLE = f"<img>{NAMES[0] * 3}</img>"


@pytest.mark.parametrize("text", ["Look: <image> and", "<image>", "!<image>", "<image>!"])
def test_the_first_texts_become_images_whatever_stands_beside_them(family, codec, text):
    prompt, spans = shown(family, codec, text, image(1))
    assert prompt == text.replace("<image>", WHOLE, 1)
    assert spans == [WHOLE]


def test_a_text_whose_tokens_hide_one_image_is_tokenized_anew_around_all(family, codec):
    images = [image(1), image(2, 3)]
    done = family.expand(codec, "<image> <image>!?", images, add_special_tokens=False)
    assert codec.decode(done.ids) == f"{WHOLE} <img>{NAMES[0]}</img>!?"
    assert [(span.length, span.identity) for span in done.spans] == [(5, bytes([1]) * 32), (3, bytes([2]) * 32)]


def test_an_image_takes_a_later_text_where_tokens_hide_the_first_one(family, codec):
    assert shown(family, codec, "<image>! <image>?", image(1)) == (f"<image>! {WHOLE}?", [WHOLE])


@given(st.lists(st.sampled_from(["<image>", "!", "?", ">", "<", "a ", "\u0338", "\u00e9", "<img>"]), max_size=12))
def test_a_prompt_without_images_is_its_text_alone(codec, pieces):
    family, text = InternVLChat(0, 448, 256, 1, 12), "".join(pieces)
    done = family.expand(codec, text, [], add_special_tokens=False)
    assert (done.ids, done.spans) == (codec.encode(text, add_special_tokens=False), ())


def test_fewer_texts_than_images_are_refused(family, codec):
    with pytest.raises(PlaceholderError, match="a place for 1 images, the request has 2"):
        family.expand(codec, "one <image>!", [image(1), image(2)], add_special_tokens=False)


def test_a_composed_character_hides_an_image_from_the_engine_and_from_the_router(family, codec):
    with pytest.raises(PlaceholderError, match="a place for 0"):
        family.expand(codec, "<image>\u0338", [image(1)], add_special_tokens=False)


def test_a_typed_token_of_images_is_not_modelled_where_the_engine_searches_for_it(family, codec):
    typed = f"<image>! {NAMES[0]}"
    with pytest.raises(NotModelledError):
        family.expand(codec, typed, [image(1)], add_special_tokens=False)
    assert shown(family, codec, f"<image> {NAMES[0]}", image(1))[1] == [WHOLE]


def test_a_tokenizer_that_does_not_find_the_tokens_of_an_image_in_a_text_is_refused(family, codec):
    family.check(codec)
    with pytest.raises(ModelFolderError, match="does not find them"):
        family.check(made(single_word=True))


@pytest.fixture
def load(write_folder):
    def loaded(tokenizer=TOKENIZER, options=None, described=None, **changes):
        files = {"config": {**CONFIG, **changes}, "tokenizer": tokenizer}
        return families.load_family(write_folder(**files, tokenizer_config=described or {}), options)

    return loaded


def test_a_folder_as_published_counts_as_hugging_faces_format_does(load):
    same = InternVL(77, 448, 256, 1, 12)
    loaded = load()
    sizes = [(1, 1), (448, 448), (900, 448), (10, 900), (1920, 1080)]
    assert [loaded.count(*size) for size in sizes] == [same.count(*size) for size in sizes]
    assert loaded.placeholder_id == 77
    assert families.is_proved("internvl_chat", "vllm")
    assert families.is_proved("internvl_chat", "sglang")


def test_without_dynamic_size_an_image_is_one_tile(load):
    assert load(dynamic_image_size=False).count(4000, 100) == 258


PAIRS = ("vocab.json", "merges.txt")
QWEN = {"tokenizer_class": "Qwen2Tokenizer"}


@pytest.mark.parametrize(
    "changes",
    [
        {"described": {"auto_map": {"AutoTokenizer": ["tokenization.Own", None]}}},
        {"described": {"clean_up_tokenization_spaces": True}},
        {"use_thumbnail": False},
        {"min_dynamic_patch": 4},
        {"max_dynamic_patch": None},
    ],
)
def test_a_folder_with_a_part_that_is_not_modelled_is_of_no_known_family(load, changes):
    assert load(**changes) is None


@pytest.mark.parametrize(
    ("files", "described", "known"),
    [
        (PAIRS, QWEN, True),
        (PAIRS, {"tokenizer_class": "Qwen2TokenizerFast"}, True),
        (PAIRS, QWEN | {"add_prefix_space": True}, False),
        (PAIRS, {"tokenizer_class": "GPT2Tokenizer"}, False),
        (PAIRS, {}, False),
        (PAIRS[:1], QWEN, False),
        (("tokenizer.model",), {"tokenizer_class": "LlamaTokenizer"}, False),
    ],
)
def test_a_folder_without_tokenizer_json_needs_both_files_of_qwens_class(load, tmp_path, files, described, known):
    described = described | {"added_tokens_decoder": {"77": {"content": NAMES[0]}}}
    load(described=described)
    (tmp_path / "tokenizer.json").unlink()
    for file in files:
        (tmp_path / file).touch()
    assert (families.load_family(tmp_path, None) is not None) == known


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"vision_config": None}, "vision_config"),
        ({"downsample_ratio": 1}, "downsample_ratio"),
        ({"vision_config": {"image_size": 14, "patch_size": 14}}, "no token"),
        ({"tokenizer": {}}, "no token <IMG_CONTEXT>"),
        ({"options": limits(num_crops=4)}, "num_crops"),
    ],
)
def test_a_geometry_that_is_not_modelled_is_refused_by_name(load, changes, complaint):
    with pytest.raises(ModelFolderError, match=complaint):
        load(**changes)
