"""The segment cache gives the ids of the uncached call, for every text and every tokenizer, or it does not cut."""

from array import array
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors
from tokenizers.trainers import BpeTrainer

from mmrouter_lib.prompt.segment_cache import OWNER, SegmentCache, cut_tokens, texts_that_can_share

WORDS = ["ab <a> aa b_ab  a\nb", "<ab>a <b a_b> ba", "▁a▁b é e\u0301", "A B < > _ \t"]
ALPHABET = "ab<>_ é\u0301\nA"
TEXTS = st.lists(st.text(ALPHABET, max_size=6), max_size=8).map("".join)

NORMALIZERS = {
    "none": None,
    "nfc": normalizers.NFC(),
    "prepend": normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
    "lowercase": normalizers.Lowercase(),
    "strip": normalizers.Strip(),
}
PRE_TOKENIZERS = {
    "none": None,
    "bytes": pre_tokenizers.ByteLevel(add_prefix_space=True),
    "metaspace first": pre_tokenizers.Metaspace(prepend_scheme="first"),
    "metaspace always": pre_tokenizers.Metaspace(prepend_scheme="always"),
    "whitespace": pre_tokenizers.Whitespace(),
}
BOS = processors.TemplateProcessing(single="< $A >", pair="$A $B", special_tokens=[("<", 0), (">", 1)])
POST_PROCESSORS = {
    "none": None,
    "template": BOS,
    "sequence": processors.Sequence([processors.ByteLevel(), BOS]),
    "bert": processors.BertProcessing(("<", 0), (">", 1)),
}


@cache
def vocabulary() -> models.BPE:
    trained = Tokenizer(models.BPE())
    trainer = BpeTrainer(vocab_size=60, special_tokens=["<", ">"], show_progress=False)
    trained.train_from_iterator(WORDS, trainer)
    assert isinstance(trained.model, models.BPE)
    return trained.model


ADDED = st.builds(
    AddedToken,
    st.text(ALPHABET, min_size=1, max_size=4),
    lstrip=st.booleans(),
    rstrip=st.booleans(),
    single_word=st.sampled_from([False, False, False, True]),
    normalized=st.booleans(),
    special=st.booleans(),
)


@st.composite
def tokenizers_and_texts(draw):
    tokenizer = Tokenizer(vocabulary())
    tokenizer.normalizer = NORMALIZERS[draw(st.sampled_from(list(NORMALIZERS)))]
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[draw(st.sampled_from(list(PRE_TOKENIZERS)))]
    tokenizer.post_processor = POST_PROCESSORS[draw(st.sampled_from(list(POST_PROCESSORS)))]
    added = draw(st.lists(ADDED, max_size=4))
    if any(token.lstrip or token.rstrip for token in added):
        # The library itself panics where a token with blanks in it meets one that takes blanks.
        added = [token for token in added if not set(token.content) & set(" \n")]
    tokenizer.add_tokens([*added, AddedToken("<a>", normalized=False)])
    tokenizer.encode_special_tokens = draw(st.sampled_from([False, False, True]))
    parts = st.one_of(st.sampled_from([token.content for token in added] + ["<a>"]), st.text(ALPHABET, max_size=5))
    texts = draw(st.lists(st.lists(parts, max_size=10).map("".join), min_size=1, max_size=4))
    return tokenizer, [*texts, *(before + after for before, after in pairwise(texts))]


def uncached(tokenizer, text, special):
    try:
        return array("I", tokenizer.encode_batch_fast([text], add_special_tokens=special)[0].ids)
    except BaseException as error:
        assume(type(error).__name__ != "PanicException")  # one in 20,000 tokenizers drawn here breaks the library
        raise


@given(tokenizers_and_texts(), st.sampled_from([1, 5]), st.sampled_from([0, 900, 1 << 20]))
def test_any_tokenizer_gives_the_same_ids_with_and_without_the_cache(drawn, shortest, max_bytes):
    tokenizer, texts = drawn
    cached = SegmentCache(tokenizer, shortest=shortest, max_bytes=max_bytes)
    for text in texts:
        for special in (False, True):
            expected = uncached(tokenizer, text, special)
            assert cached(text, add_special_tokens=special) == expected, repr(text)
        assert cached.size_bytes <= max_bytes


def simple(*added, normalizer=None, pre_tokenizer=None, dropout=None):
    tokenizer = Tokenizer(vocabulary())
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, pre_tokenizer
    if dropout is not None:
        tokenizer.model = models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")], dropout=dropout)
    tokenizer.add_tokens(
        [token if isinstance(token, AddedToken) else AddedToken(token, normalized=False) for token in added]
    )
    return tokenizer


@pytest.mark.parametrize(
    ("tokenizer", "cut"),
    [
        (simple("<a>", "<b>"), ["<a>", "<b>"]),
        (simple("<a>", AddedToken("<b>", normalized=True)), ["<a>"]),
        (simple("<a>", AddedToken("<b>", normalized=False, rstrip=True)), ["<a>"]),
        (simple("<a>", AddedToken("<b>", normalized=False, lstrip=True)), ["<a>"]),
        (simple("<a>", AddedToken("b", normalized=False, single_word=True)), []),
        (simple("<a>", "<a>b", "<b>"), ["<b>"]),  # one inside the other
        (simple("<a>", "b<", "_>"), ["_>"]),  # one ends as the other begins
        (simple("<a<"), []),  # overlaps itself
        (simple(" <a>", "<b> "), []),
        (simple("<a>", normalizer=normalizers.Strip()), []),  # not on the list
        (simple("<a>", pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme="first")), []),
        (simple("<a>", pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme="always")), ["<a>"]),
        (simple("<a>", dropout=0.5), []),
        (Tokenizer(models.WordLevel({"a": 0}, unk_token="a")), []),
    ],
)
def test_only_tokens_that_nothing_can_move_are_cut_at(tokenizer, cut):
    assert cut_tokens(tokenizer) == cut


class Counting:
    """A tokenizer that keeps the texts that it is given."""

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer
        self.seen = []

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)

    def encode_batch_fast(self, texts, **options):
        self.seen += texts
        return self._tokenizer.encode_batch_fast(texts, **options)


def test_a_new_turn_is_all_that_is_tokenized_again(tiny):
    turns = [f"<|im_start|>user\nturn {number}{' and so on' * 30}<|im_end|>\n" for number in range(5)]
    tokenizer = Counting(tiny.tokenizer)
    cached = SegmentCache(tokenizer)
    cached("".join(turns[:4]), add_special_tokens=False)
    tokenizer.seen.clear()
    cached("".join(turns), add_special_tokens=False)
    assert tokenizer.seen == ["\n" + turns[4].removesuffix("\n")]  # the line's end was a segment of its own before
    tokenizer.seen.clear()
    cached("".join(turns), add_special_tokens=False)
    assert tokenizer.seen == []


def test_the_least_recently_used_segment_is_evicted_first(tiny):
    texts = [f"{number} {'x' * 400}<|im_end|>" for number in range(3)]
    tokenizer = Counting(tiny.tokenizer)
    cached = SegmentCache(tokenizer)
    cached(texts[0], add_special_tokens=False)
    room = cached.size_bytes * 2
    cached = SegmentCache(tokenizer, max_bytes=room)
    for number in (0, 1, 0, 2):
        cached(texts[number], add_special_tokens=False)
    assert (len(cached), cached.size_bytes) == (2, room)
    tokenizer.seen.clear()
    for number in (2, 0, 1):
        cached(texts[number], add_special_tokens=False)
    assert tokenizer.seen == [texts[1]]


def test_owners_share_no_segment(tiny):
    tokenizer = Counting(tiny.tokenizer)
    cached = SegmentCache(tokenizer)
    text = "x" * 400 + "<|im_end|>"
    for owner in ("red", "blue", "red"):
        before = OWNER.set(owner)
        cached(text, add_special_tokens=False)
        OWNER.reset(before)
    assert tokenizer.seen == [text] * 2


def test_returned_ids_are_copies(tiny):
    cached = SegmentCache(tiny.tokenizer)
    first = cached("hello<|im_end|>", add_special_tokens=False)
    first.append(7)
    assert cached("hello<|im_end|>", add_special_tokens=False) == first[:-1]


def test_threads_share_one_cache(tiny):
    texts = ["".join(f"{number % step}{'x' * 260}<|im_end|>" for number in range(6)) for step in range(1, 9)] * 4
    cached = SegmentCache(tiny.tokenizer, max_bytes=3000)
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda text: cached(text, add_special_tokens=False), texts))
    assert found == [uncached(tiny.tokenizer, text, False) for text in texts]
    assert 0 < cached.size_bytes <= 3000


def test_half_a_surrogate_pair_is_refused_and_not_cached(tiny):
    cached = SegmentCache(tiny.tokenizer)
    for _ in range(2):
        with pytest.raises(TypeError):
            cached("a\ud800b", add_special_tokens=False)
    assert len(cached) == 0


@given(st.sets(st.text("ab<", min_size=1, max_size=5), max_size=8))
def test_texts_share_a_character_where_two_of_them_overlap_or_one_holds_the_other(texts):
    def overlap(one: str, other: str) -> bool:
        shifts = range(1 if one == other else 0, len(one))
        return any(one[shift:].startswith(other) or other.startswith(one[shift:]) for shift in shifts)

    expected = {one for one in texts if any(overlap(one, other) or overlap(other, one) for other in texts)}
    assert texts_that_can_share(texts) == expected
