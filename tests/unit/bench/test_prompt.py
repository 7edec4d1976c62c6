"""The tokenization benchmark: both sides tokenize the same, or there is no figure."""

import pytest

from bench.placing import tokenization


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(tokenization, "PROMPT_TOKENS", 400)
    monkeypatch.setattr(tokenization, "TURNS", 2)


def test_the_rows_of_a_tokenizer_name_the_uncached_call_as_their_peer():
    p50, p99, ratio = tokenization.measure("tiny", tokenization.TINY)
    assert p50.value > 0
    assert p99.value >= p50.value
    assert ratio.peer.startswith("the whole text: p50 ")


def test_a_cache_that_gives_other_ids_is_no_figure(monkeypatch):
    class Forgetful(tokenization.SegmentCache):
        def __call__(self, text, *, add_special_tokens):
            return super().__call__(text[1:], add_special_tokens=add_special_tokens)

    monkeypatch.setattr(tokenization, "SegmentCache", Forgetful)
    with pytest.raises(tokenization.AnswersDifferError):
        tokenization.measure("tiny", tokenization.TINY)


def test_a_real_tokenizer_that_is_not_there_is_said_to_be_missing(monkeypatch, tmp_path):
    monkeypatch.setattr(tokenization, "REAL", tmp_path / "Qwen")
    assert tokenization.run()[-1].peer == "not run: no folder Qwen"
