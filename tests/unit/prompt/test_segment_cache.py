"""The segment cache gives the ids of the uncached call, for every text and every tokenizer, or it does not cut."""

import re
from array import array
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise, product

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors
from tokenizers.trainers import BpeTrainer

from mmrouter_lib.prompt.segment_cache import MAX_WHOLE, MAX_WORD, OWNER, PIECE, PromptTooLongError, SegmentCache
from mmrouter_lib.prompt.text_cuts import WINDOW, cut_tokens, occurrences, texts_that_can_share, word_ends

WORDS = ["ab <a> aa b_ab  a\nb", "<ab>a <b a_b> ba", "▁a▁b é e\u0301", "A B < > _ \t", "b, a's b's. 1.1"]
ALPHABET = "ab<>_ é\u0301\nA,.'1"
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PATTERNS = {
    "Qwen2": (QWEN2,),
    "Llama 3": (QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|"),),
    "Tekken": (
        (
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
            r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}"
            r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        ),
    ),
    "Kimi": (
        (
            r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
            r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
            r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
            r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
            r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        ),
    ),
    "DeepSeek-V3": (
        r"\p{N}{1,3}",
        "[一-龥\u3040-\u309f\u30a0-\u30ff]+",
        (
            "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+"
            "|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
        ),
    ),
    "GPT-2": (),
}
"""Regular expressions of words in published folders; none: the one of ``ByteLevel``."""


def words_by(*patterns: str) -> pre_tokenizers.PreTokenizer:
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not patterns)])


NORMALIZERS = {
    "none": None,
    "nfc": normalizers.NFC(),
    "prepend": normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
    "blanks": normalizers.Replace(" ", "▁"),
    "lowercase": normalizers.Lowercase(),
    "strip": normalizers.Strip(),
}
PRE_TOKENIZERS = {
    "none": None,
    "bytes": pre_tokenizers.ByteLevel(add_prefix_space=True),
    "metaspace first": pre_tokenizers.Metaspace(prepend_scheme="first"),
    "metaspace always": pre_tokenizers.Metaspace(prepend_scheme="always"),
    "whitespace": pre_tokenizers.Whitespace(),
    "blanks": pre_tokenizers.Split(" ", "merged_with_previous"),
    **{name: words_by(*patterns) for name, patterns in PATTERNS.items()},
}
BOS = processors.TemplateProcessing(single="< $A >", pair="$A $B", special_tokens=[("<", 0), (">", 1)])
POST_PROCESSORS = {
    "none": None,
    "template": BOS,
    "sequence": processors.Sequence([processors.ByteLevel(), BOS]),
    "bert": processors.BertProcessing(("<", 0), (">", 1)),
}


@cache
def vocabulary(split: str = "none") -> models.BPE:
    """Return a model of tokens that go across words, unless texts are split at its training."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = PRE_TOKENIZERS[split]
    trainer = BpeTrainer(vocab_size=80, special_tokens=["<", ">"], show_progress=False)
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
    tokenizer = Tokenizer(vocabulary(draw(st.sampled_from(["none", "metaspace always", "GPT-2"]))))
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


@given(tokenizers_and_texts(), st.sampled_from([1, 5]), st.sampled_from([0, 900, 1 << 20]), st.sampled_from([0, 3]))
def test_any_tokenizer_gives_the_same_ids_with_and_without_the_cache(drawn, shortest, max_bytes, piece):
    tokenizer, texts = drawn
    cached = SegmentCache(tokenizer, shortest=shortest, max_bytes=max_bytes, piece=piece)
    for text in texts:
        for special in (False, True):
            expected = uncached(tokenizer, text, special)
            assert cached(text, add_special_tokens=special) == expected, repr(text)
        assert cached.size_bytes <= max_bytes


def stripping(text):
    return AddedToken(text, normalized=False, rstrip=True)


def simple(*added, normalizer=None, pre_tokenizer=None, dropout=None, model="none"):
    tokenizer = Tokenizer(vocabulary("metaspace always" if model == "▁" else model))
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


@pytest.mark.parametrize("patterns", PATTERNS.values(), ids=list(PATTERNS))
def test_no_cut_behind_a_word_changes_the_words_of_a_text(patterns):
    """Every text of up to five characters of each kind that the patterns tell apart."""
    tokenizer = simple(pre_tokenizer=words_by(*patterns))
    ends = word_ends(tokenizer)

    def words(text):
        return [word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)]

    cut = 0
    for length in range(1, 6):
        for text in map("".join, product("sL1 \n.'字\x01", repeat=length)):
            pieces = list(ends.pieces(text, 0, length))
            assert "".join(pieces) == text
            assert [word for piece in pieces for word in words(piece)] == words(text), repr(text)
            cut += len(pieces) - 1
    assert cut > 1000


@pytest.mark.parametrize(
    ("tokenizer", "pieces"),
    [
        (simple("<a>", pre_tokenizer=words_by(QWEN2)), ["ab", " cd", ",", " ef's", ".", " 1a", " 2"]),
        (
            simple(pre_tokenizer=words_by(QWEN2), normalizer=NORMALIZERS["nfc"]),
            ["ab", " cd", ",", " ef's", ".", " 1a", " 2"],
        ),
        (simple("d,", pre_tokenizer=words_by(QWEN2)), ["ab", " cd,", " ef's", ".", " 1a", " 2"]),  # it holds that place
        (simple("b ", pre_tokenizer=words_by(QWEN2)), ["ab cd", ",", " ef's", ".", " 1a", " 2"]),
        (simple(AddedToken("é ", normalized=True), pre_tokenizer=words_by(QWEN2), normalizer=NORMALIZERS["nfc"]), None),
        (simple(stripping(","), pre_tokenizer=words_by(QWEN2)), ["ab", " cd", ", ef's", ".", " 1a", " 2"]),
        (simple(stripping(",d"), pre_tokenizer=words_by(QWEN2)), None),
        (simple(pre_tokenizer=words_by(QWEN2), normalizer=normalizers.NFD()), None),
        (simple(pre_tokenizer=words_by(QWEN2 + "|x y")), None),  # not on the list
        (simple(pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True)), None),
        (
            simple(pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme="first"), model="▁"),
            ["ab", " cd,", " ef's.", " 1a", " 2"],
        ),
        (
            simple(pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme="first")),
            ["ab", " cd,", " ef's.", " 1a 2"],
        ),  # has a▁
        (simple(normalizer=NORMALIZERS["blanks"], model="▁"), ["ab", " cd,", " ef's.", " 1a", " 2"]),
        (simple(normalizer=NORMALIZERS["prepend"], model="▁"), ["ab", "cd,", "ef's.", "1a", "2"]),
        (simple("c1", "2.", normalizer=NORMALIZERS["prepend"], model="▁"), ["ab cd,", "ef's. 1a 2"]),
        (simple(pre_tokenizer=words_by(QWEN2), dropout=0.5), None),
    ],
)
def test_only_words_that_nothing_can_move_are_cut_at(tokenizer, pieces):
    ends = word_ends(tokenizer)
    assert (None if ends is None else list(ends.pieces("ab cd, ef's. 1a 2", 0, 20))) == pieces


@given(st.lists(st.sampled_from(["<a>", "<bb>", "<", "a", ">b"]), max_size=40).map("".join), st.integers(1, 9))
def test_tokens_are_found_in_windows_of_any_size(text, window):
    tokens = re.compile("<a>|<bb>")
    found = list(occurrences(tokens, text, 4, window))
    assert found == [match.end() for match in tokens.finditer(text)]


def test_one_call_scans_a_bounded_part_of_a_text_for_tokens():
    class Recorded:
        def finditer(self, text, start, end):
            spans.append((start, end))
            return ()

    spans: list[tuple[int, int]] = []
    assert list(occurrences(Recorded(), "<" * 10 * WINDOW, 9)) == []
    assert len(spans) == 10
    assert max(end - start for start, end in spans) == WINDOW + 9


class Counting:
    """A tokenizer that keeps the texts that it is given."""

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer
        self.seen = []
        self.most = 0  # characters at a time

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)

    def encode_batch_fast(self, texts, **options):
        self.seen += texts
        self.most = max(self.most, sum(map(len, texts)))
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


@pytest.mark.parametrize("text", ["7, " * 300_000, "<|im_end|>" + "word " * 50 * 2000, f"{'x' * 30_000} " * 10])
def test_the_tokenizer_gets_a_bounded_part_of_a_text_at_a_time(tiny, text):
    tokenizer = Counting(tiny.tokenizer)
    assert SegmentCache(tokenizer)(text, add_special_tokens=False) == uncached(tiny.tokenizer, text, False)
    assert PIECE <= tokenizer.most <= 2 * PIECE + MAX_WORD


def test_a_text_that_cannot_be_cut_is_too_long(tiny):
    tokenizer = Counting(tiny.tokenizer)
    with pytest.raises(PromptTooLongError, match="cannot be cut"):
        SegmentCache(tokenizer)("x" * (PIECE + MAX_WORD + 1), add_special_tokens=False)
    assert tokenizer.seen == []


@pytest.mark.parametrize("text", ["x <|im_end|>" * 30, "".join(f"{number}<|im_end|>" for number in range(50))])
def test_tokens_of_equal_and_of_cached_segments_count(tiny, text):
    cached = SegmentCache(tiny.tokenizer, shortest=1, max_tokens=80)
    for part in (text[: len(text) // 2], text[len(text) // 2 :]):
        cached(part, add_special_tokens=False)
    for _ in range(2):
        with pytest.raises(PromptTooLongError, match="more than 80 tokens"):
            cached(text, add_special_tokens=False)


def test_threads_take_turns_at_a_text_that_is_tokenized_as_a_whole():
    running = 0
    most = []

    class Slow(Counting):
        def encode_batch_fast(self, texts, **options):
            nonlocal running
            running += 1
            most.append(running)
            encodings = super().encode_batch_fast(texts, **options)  # releases the interpreter's lock
            running -= 1
            return encodings

    cached = SegmentCache(Slow(simple(pre_tokenizer=pre_tokenizers.Whitespace())))
    with pytest.raises(PromptTooLongError, match="cannot be cut"):
        cached("a" * (MAX_WHOLE + 1), add_special_tokens=False)
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda at: cached("ab " * 100_000 + "a" * at, add_special_tokens=False), range(4)))
    assert len({len(ids) for ids in found}) > 1
    assert most == [1] * 4


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


@pytest.mark.parametrize("whole", [False, True])
def test_half_a_surrogate_pair_is_refused_and_not_cached(tiny, whole):
    cached = SegmentCache(simple(pre_tokenizer=pre_tokenizers.Whitespace()) if whole else tiny.tokenizer)
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
