"""Folders without tokenizer.json: their tokenizers on SGLang, by the ids of drawn texts.

The folders are those of ``vllm/test_sentencepiece.py`` and ``vllm/test_byte_pairs.py``.
"""

from pathlib import Path

import pytest
from artefacts import Record
from conformance.conftest import Figure
from conformance.own_code import answer_of
from conformance.vllm import test_byte_pairs, test_sentencepiece
from conformance.vllm.test_sentencepiece import PROGRAM, drawn_texts, unequal

from mmrouter_lib.engines.text_models import load_text_prompter

pairs, pieces = test_byte_pairs.folders, test_sentencepiece.folders


@pytest.mark.adopts(engine="sglang", check="tokenizers made of pairs and pieces")
def test_a_tokenizer_made_of_pairs_or_pieces_has_the_ids_of_sglangs(
    sglang_env: Path, pairs: dict[str, Path], pieces: dict[str, Path], record: Record, figure: Figure
) -> None:
    folders, texts = pairs | pieces, drawn_texts()
    asked = [{"folder": str(folder), "texts": texts} for folder in folders.values()]
    wrong: dict[str, list[str]] = {}
    for (name, folder), theirs in zip(folders.items(), answer_of(sglang_env, [PROGRAM, "sglang"], asked), strict=True):
        wrong[name] = unequal(load_text_prompter("sglang", folder), theirs["ids"])
    record("tokenizers of pairs and pieces, sglang: folders, texts of each", [len(folders), len(texts)])
    figure("folders", len(folders))
    assert len(wrong) == len(folders)
    assert not any(wrong.values()), wrong
