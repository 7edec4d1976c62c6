"""Folders with a model of SentencePiece; ``tests/conformance/vllm/test_sentencepiece.py`` has real ones."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmrouter_lib.engines.text_models import UnpredictedError, load_text_prompter
from mmrouter_lib.prompt.vocabularies.sentencepiece import NoSentencePieceError, SentencePieceModel

NORMAL, UNKNOWN, CONTROL, TYPED = 1, 2, 3, 4
BPE, UNIGRAM = 2, 1
PIECES = [("<unk>", UNKNOWN), ("<s>", CONTROL), ("</s>", CONTROL), ("<tool>", TYPED)]
PIECES += [(text, NORMAL) for text in ("ab", "▁ab", "▁", "a", "b", "c", "abc")]
BODY = {"messages": [{"role": "user", "content": "ab"}]}


def field(number: int, value: bytes | int) -> bytes:
    if isinstance(value, int):
        return bytes([number << 3 & 127 | 128 * (number > 15), *([number >> 4] if number > 15 else ()), value])
    assert len(value) < 128
    return bytes([number << 3 | 2, len(value)]) + value


def model(pieces: list[tuple[str, int]], kind: int = BPE) -> bytes:
    entries = b"".join(field(1, field(1, text.encode()) + field(3, of)) for text, of in pieces)
    return entries + field(2, field(3, kind))


@pytest.fixture
def folder(tmp_path: Path):
    def make(data: bytes, **described: object) -> Path:
        (tmp_path / "tokenizer.model").write_bytes(data)
        (tmp_path / "config.json").write_text('{"model_type": "llama"}')
        config = {"tokenizer_class": "LlamaTokenizer", "chat_template": "{{ messages[0].content }}", **described}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        return tmp_path

    return make


def ids(folder: Path, text: str) -> list[str]:
    prompter = load_text_prompter("vllm", folder)
    return [prompter.tokenizer.id_to_token(number) for number in prompter.completion(text).ids]


def test_pieces_are_merged_in_their_order_whatever_their_scores(folder):
    made = folder(model(PIECES))
    assert ids(made, "abc") == ["▁ab", "c"]  # "ab" comes before "abc", and a text begins with a blank
    assert ids(made, "ab<tool>ab</s>") == ["▁ab", "<tool>", "ab", "</s>"]


def test_only_the_configuration_puts_tokens_around_a_text(folder):
    assert ids(folder(model(PIECES), add_bos_token=True, add_eos_token=True), "ab") == ["<s>", "▁ab", "</s>"]
    assert ids(folder(model(PIECES), add_bos_token=True, bos_token=None), "ab") == ["▁ab"]


def test_a_class_that_takes_a_tokenizer_as_it_is_puts_no_blank_before_a_text(folder):
    assert ids(folder(model(PIECES), tokenizer_class="PreTrainedTokenizerFast"), "ab ab") == ["ab", "▁ab"]


def reason(folder: Path) -> str:
    with pytest.raises(UnpredictedError) as caught:
        load_text_prompter("vllm", folder)
    return str(caught.value)


def test_what_the_engine_converts_in_another_way_is_not_predicted(folder):
    made = folder(model(PIECES, UNIGRAM))
    assert load_text_prompter("vllm", made).prompt(BODY, ()).ids
    assert reason(folder(model(PIECES, UNIGRAM), tokenizer_class="PreTrainedTokenizerFast")) == "tokenizer:unigram"
    assert reason(folder(model(PIECES), tokenizer_class="GemmaTokenizer")) == "tokenizer:GemmaTokenizer"
    assert reason(folder(b"aGVsbG8= 0\n")) == "tokenizer:tokenizer.model"  # tiktoken's format has the same name
    assert reason(folder(b"")) == "tokenizer:tokenizer.model"


def test_sglang_puts_the_begin_of_a_llama_tokenizer_before_texts(folder):
    made = folder(model(PIECES))
    by_vllm, by_sglang = (load_text_prompter(engine, made) for engine in ("vllm", "sglang"))
    begin = by_sglang.codec.begin_id
    assert by_sglang.completion("ab").ids.tolist() == [begin, *by_vllm.completion("ab").ids]


@given(st.binary(max_size=60), st.integers(0, 200))
def test_a_damaged_file_is_refused_or_has_pieces(noise: bytes, cut: int):
    for data in (noise, model(PIECES)[:cut], model(PIECES)[:cut] + noise):
        try:
            assert SentencePieceModel.read(data).pieces
        except NoSentencePieceError:
            continue
