"""The segment cache over the real tokenizers: the same ids as without it, for texts made to break it."""

from array import array
from functools import cache
from pathlib import Path

import pytest
from conformance.conftest import model_folder
from conformance.corpus import BLANKS, ODD
from conformance.workload import CODE, EMOJI, SCRIPTS, STORY
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from mmrouter_lib.model_folder import find_json
from mmrouter_lib.prompt.segment_cache import PIECE, SegmentCache
from mmrouter_lib.prompt.text_cuts import cut_tokens, word_ends
from mmrouter_lib.prompt.tokenizer import load_tokenizer

TINY = Path(__file__).resolve().parents[2] / "examples" / "models" / "tiny-qwen2-vl"
CUT_AT = {
    TINY.name: "<|im_end|>",
    "Qwen--Qwen2-VL-2B-Instruct": "<|im_end|>",
    "Qwen--Qwen2.5-VL-7B-Instruct": "<|im_end|>",
    "Qwen--Qwen3-VL-2B-Instruct": "<|im_end|>",
    "llava-hf--llava-1.5-7b-hf": "<image>",
    "llava-hf--llava-v1.6-mistral-7b-hf": "</s>",
    "microsoft--Phi-3-vision-128k-instruct": "<|end|>",
    "openbmb--MiniCPM-V-4": "<|im_end|>",
}
EXAMPLES = 250
PLAIN = [*STORY.split(), *SCRIPTS.split(), *EMOJI.split(), *CODE.split(" "), STORY[:300]]


@cache
def tokenizer(name: str) -> Tokenizer:
    folder = TINY if name == TINY.name else model_folder(name)
    return load_tokenizer(folder, find_json(folder, "tokenizer_config.json") or {})


@cache
def texts(name: str) -> st.SearchStrategy[str]:
    """Texts of the tokenizer's own added tokens, whole and in pieces, with everything that stands beside them badly."""
    added = [token.content for token in tokenizer(name).get_added_tokens_decoder().values()]
    halves = [half for token in added[:30] for half in (token[:-1], token[1:], token[: len(token) // 2])]
    pieces = st.one_of(
        *(st.sampled_from(some) for some in (added, cut_tokens(tokenizer(name)), halves, BLANKS, ODD, PLAIN)),
        st.text(max_size=8),
    )
    return st.lists(pieces, max_size=14).map("".join)


@pytest.mark.parametrize("name", list(CUT_AT))
def test_a_real_tokenizer_gives_the_same_ids_with_and_without_the_cache(name: str) -> None:
    whole = tokenizer(name)
    assert CUT_AT[name] in cut_tokens(whole)
    assert word_ends(whole) is not None
    caches = [
        SegmentCache(whole, shortest=shortest, max_bytes=most, piece=piece)
        for shortest, most, piece in ((1, 1 << 20, PIECE), (1, 3000, PIECE), (60, 1 << 20, 0))
    ]

    @settings(max_examples=EXAMPLES, deadline=None)
    @given(texts(name), texts(name), st.booleans())
    def same(before: str, after: str, special: bool) -> None:
        for text in (before, before + after, before + "\n" + after, after):
            expected = array("I", whole.encode(text, add_special_tokens=special).ids)
            for cached in caches:
                assert cached(text, add_special_tokens=special) == expected, repr(text)

    same()
    assert len(caches[0]) > EXAMPLES // 2
