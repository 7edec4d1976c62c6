"""Gemma 3: the length of an image, and the newlines around it, which join with those of the text."""

import json

import pytest
from tokenizers import AddedToken, Tokenizer, models
from unit.families.conftest import limits

from mmrouter_lib import families
from mmrouter_lib.families import ModelFolderError, NotModelledError, PlaceholderError, PromptImage
from mmrouter_lib.families.gemma3 import BEGIN, Gemma3
from mmrouter_lib.families.gemma3 import END as ENDED
from mmrouter_lib.families.gemma3 import PICTURE as FILLED
from mmrouter_lib.prompt.tokenizer import TokenizerCodec

WORDS = ["a", "b", "\n", "\n\n", "\n\n\n", "\n\n\n\n"]
A, B, ONE, TWO, THREE, FOUR, START, FILL, END = range(9)
PICTURE = 3
IMAGES = [PromptImage(bytes([number]) * 32, 7) for number in (1, 2)]


@pytest.fixture(scope="module")
def codec() -> TokenizerCodec:
    merges = [("\n", "\n"), ("\n\n", "\n"), ("\n\n", "\n\n")]
    tokenizer = Tokenizer(models.BPE(vocab={word: at for at, word in enumerate(WORDS)}, merges=merges))
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in (BEGIN, FILLED, ENDED)])
    return TokenizerCodec.of(tokenizer, {})


@pytest.fixture
def expand(codec):
    family = Gemma3(START, FILL, END, PICTURE)

    def run(text: str, count: int = 1):
        made = family.expand(codec, text.replace("<>", BEGIN), IMAGES[:count], add_special_tokens=False)
        return made.ids.tolist(), [(span.offset, span.length) for span in made.spans]

    return run


INSIDE = [START, FILL, FILL, FILL, END]


@pytest.mark.parametrize(
    ("text", "ids", "offset"),
    [
        ("a<>b", [A, TWO, *INSIDE, TWO, B], 1),
        ("<>", [TWO, *INSIDE, TWO], 0),
        ("a\n<>b", [A, THREE, *INSIDE, TWO, B], 1),
        ("a\n\n<>b", [A, FOUR, *INSIDE, TWO, B], 1),
        ("a\n\n\n<>b", [A, THREE, TWO, *INSIDE, TWO, B], 2),
        ("<>\n\nb", [TWO, *INSIDE, FOUR, B], 0),
    ],
)
def test_the_newlines_around_an_image_join_with_those_of_the_text(expand, text, ids, offset):
    assert expand(text) == (ids, [(offset, PICTURE + 4)])


@pytest.mark.parametrize(("text", "count"), [("<><>", 2), ("<>\nb", 1)])
def test_images_that_share_a_newline_and_one_before_a_newline_are_not_modelled(expand, text, count):
    with pytest.raises(NotModelledError):
        expand(text, count)


def test_images_with_a_blank_line_between_them_do_not_share_it(expand):
    assert expand("<>\n\n<>", 2) == ([TWO, *INSIDE, FOUR, TWO, *INSIDE, TWO], [(0, 7), (7, 7)])


def test_images_take_the_first_places_and_a_text_without_images_keeps_its_tokens(expand):
    ids, spans = expand("a<>b<>a<>", 2)
    assert (spans, ids[16:]) == ([(1, 7), (9, 7)], [A, START])
    assert expand("a\n<>", 0) == ([A, ONE, START], [])
    with pytest.raises(PlaceholderError, match="a place for 1 images, the request has 2"):
        expand("a<>", 2)


@pytest.mark.parametrize(
    ("text", "ids", "offsets"),
    [
        ("a<>b", [A, TWO, *INSIDE, TWO, B], [3]),
        ("a\n<>\nb", [A, THREE, *INSIDE, THREE, B], [3]),
        ("<><>a<>", [TWO, *INSIDE, FOUR, *INSIDE, TWO, A, START], [2, 8]),
    ],
)
def test_a_text_that_is_tokenized_with_its_images_joins_all_their_newlines(codec, text, ids, offsets):
    images = IMAGES[: len(offsets)]
    made = Gemma3(START, FILL, END, PICTURE).expand_text(
        codec, text.replace("<>", BEGIN), images, add_special_tokens=False
    )
    assert made.ids.tolist() == ids
    places = [(span.offset, span.length, span.identity) for span in made.spans]
    assert places == [(at, PICTURE, image.identity) for at, image in zip(offsets, images, strict=True)]


def test_an_image_without_a_place_or_with_other_tokens_is_not_expanded_in_the_text(codec):
    with pytest.raises(PlaceholderError, match="a place for 1 images, the request has 2"):
        Gemma3(START, FILL, END, PICTURE).expand_text(codec, f"a{BEGIN}", IMAGES, add_special_tokens=False)
    with pytest.raises(NotModelledError):
        Gemma3(START, FILL, A, PICTURE).expand_text(codec, BEGIN, IMAGES[:1], add_special_tokens=False)


@pytest.fixture
def folder(tmp_path):
    def make(processor: dict | None = None, written: dict | None = None, **config):
        files = {"config": {"model_type": "gemma3", "mm_tokens_per_image": 256, **config}}
        files |= {"preprocessor_config": processor or {}, "processor_config": written or {}}
        for name, content in files.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(content))
        return tmp_path

    return make


def test_every_image_has_the_same_length(folder):
    family = families.load_family(folder(), None)
    assert {family.count(*size) for size in ((1, 1), (896, 896), (5000, 20))} == {260}
    assert (family.placeholder_id, family.picture_id, family.end_id) == (255_999, 262_144, 256_000)
    assert all(families.is_proved("gemma3", engine) for engine in ("vllm", "sglang"))


def test_pan_and_scan_is_not_modelled_and_contradictions_are_errors(folder):
    assert families.load_family(folder({"do_pan_and_scan": True}), None) is None
    with pytest.raises(ModelFolderError, match="image_seq_length 64"):
        families.load_family(folder(written={"image_seq_length": 64}), None)
    with pytest.raises(ModelFolderError, match="num_crops"):
        families.load_family(folder(), limits(num_crops=4))
