"""Texts by SGLang's own front end over a folder of Kimi's form; ``test_images.py`` has prompts with images."""

from pathlib import Path

import pytest
from artefacts import Record
from conformance.sglang.test_rendering import REFUSED_BEFORE, Rendering, rendered
from conformance.test_text_models import differences, sglangs_corpus
from conformance.vllm.test_kimi import text_model

from mmrouter_lib.engines.text_models import load_text_prompter


@pytest.mark.long_form
def test_sglangs_prompts_of_a_tiktoken_vocabulary_are_the_predicted_ones(
    sglang_env: Path, tmp_path: Path, record: Record
) -> None:
    folder, cases = text_model(tmp_path), sglangs_corpus()
    (answers,) = rendered(sglang_env, [Rendering(folder, cases, text_only=True)])
    theirs = [each.get("ids") or each for each in answers]
    wrong = differences(load_text_prompter("sglang", folder), cases, theirs, REFUSED_BEFORE)
    equal = sum("ids" in each for each in answers) - len(wrong)
    record("text prompts, sglang kimi: equal, mismatches", [equal, len(wrong)])
    assert "\n".join(wrong) == ""
    assert equal > 300
