"""A folder with a vocabulary of tiktoken and code for it, as Kimi's: ids of drawn texts by the tokenizer that vLLM
makes of it, and whole prompts by its own front end. ``processors/test_processors.py`` has prompts with images.

The vocabulary is that of Qwen3-VL, and the code is this project's (``hack/engines/folder_code``).
"""

import json
import random
from dataclasses import replace
from itertools import compress
from pathlib import Path

import pytest
from artefacts import Record, run_tool_or_skip
from conformance.conftest import Figure
from conformance.corpus import text_corpus
from conformance.own_code import answer_of
from conformance.rendering import own_prompts
from conformance.test_text_models import COMPLETIONS, REFUSED_BY_VLLM, SMALL, differences, ours
from conformance.vllm.test_sentencepiece import PROGRAM, drawn_texts
from long_form import IS_LONG

from mmrouter_lib.engines.text_models import load_text_prompter
from mmrouter_lib.prompt import PromptTooLongError
from mmrouter_lib.prompt.vocabularies.tiktoken import WHOLE

FILES = ("tiktoken.model", "tokenization_kimi.py", "tokenizer_config.json", "chat_template.jinja")
DRAWN = 30_000 if IS_LONG else 3_000
FOLDED = ("'s", "'S", "'\u017f", "\u017f", "\u212a", "'LL", "'Ve", "\u2019s", "\u0130", "\u00df", "\u1e9e", "\u01c5")
"""Ends of words, and letters that are equal to others where case does not count."""
HAN = ("\u4e2d", "\u3005", "\u3007", "\u2f00", "\u3400", "\U00020000", "\uf900", "\u30fc", "\u3042", "\u0e31", "\u0301")
ROWS = ("x" * WHOLE.run, " " * WHOLE.run, "x, " * (WHOLE.characters // 3), "\u4e2d\n" * 50_000)
CUT = ("x" * (WHOLE.run + 1), "y\t" + "\n" * (WHOLE.run + 1) + "z", "x, " * (WHOLE.characters // 3 + 1))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text-only model with Kimi's tokenizer."""
    source, made = Path(run_tool_or_skip("engines.unknown_families", "kimi_k25")), tmp_path_factory.mktemp("tiktoken")
    for file in FILES:
        (made / file).write_bytes((source / file).read_bytes())
    config = SMALL | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 151_936}
    (made / "config.json").write_text(json.dumps(config))
    return made


def words() -> list[str]:
    """Return texts around the words of the pattern: cases, endings, numbers, blanks, Han and marks side by side."""
    draw = random.Random(163_840)
    parts = [
        *FOLDED,
        *HAN,
        *"aAbB19 .,'\n\r\t\u00a0",
        "  ",
        "\r\n",
        "<|im_end|>",
        "<|media_pad|>",
        "<|reserved_token_151700|>",
    ]

    def text() -> str:
        return "".join(
            draw.choice(parts)
            if draw.random() < 0.8
            else chr(draw.choice((draw.randrange(0xD7FF), draw.randrange(0xE000, 0x32000))))
            for _ in range(draw.randint(1, 24))
        )

    return [text() for _ in range(DRAWN)]


@pytest.mark.adopts(engine="vllm", check="tokenizers of tiktoken vocabularies")
def test_a_tokenizer_made_of_a_tiktoken_vocabulary_has_the_ids_of_the_folders_own(
    vllm_env: Path, folder: Path, record: Record, figure: Figure
) -> None:
    texts = [*drawn_texts(), *words(), *ROWS]
    (theirs,) = answer_of(vllm_env, [PROGRAM], [{"folder": str(folder), "texts": texts}])
    codec = load_text_prompter("vllm", folder).codec
    made = ([codec.encode(text, add_special_tokens=special).tolist() for special in (False, True)] for text in texts)
    wrong = [text for text, ids, mine in zip(texts, theirs["ids"], made, strict=True) if ids != mine]
    record("tiktoken: texts, mismatches", [len(texts), len(wrong)])
    figure("texts", len(texts))
    figure("mismatches", len(wrong))
    assert wrong == []
    assert len(texts) > DRAWN


@pytest.mark.parametrize("text", CUT)
def test_a_text_that_the_folders_code_cuts_is_not_predicted(folder: Path, text: str) -> None:
    with pytest.raises(PromptTooLongError):
        load_text_prompter("vllm", folder).codec.encode(text, add_special_tokens=False)


@pytest.mark.adopts(engine="vllm", check="prompts of tiktoken vocabularies")
def test_vllms_prompts_of_a_tiktoken_vocabulary_are_the_predicted_ones(
    vllm_env: Path, folder: Path, record: Record, figure: Figure
) -> None:
    drawn = text_corpus()
    options = {"chat_template_kwargs": {"thinking": False}}
    cases = [*drawn, *(replace(one, body=one.body | options) for one in drawn[:40])]
    asked = {"chats": [one.body for one in cases], "completions": COMPLETIONS}
    theirs = own_prompts(vllm_env, {folder: asked})[folder].listed()
    prompter = load_text_prompter("vllm", folder)
    kept = [not prompter.writes_tools or not one.body.get("tools") for one in cases]
    wrong = differences(prompter, [*compress(cases, kept)], [*compress(theirs, kept)], REFUSED_BY_VLLM)
    unpredicted = [ours(prompter, one) for one, is_kept in zip(cases, kept, strict=True) if not is_kept]
    equal = sum(isinstance(answer, list) for answer in compress(theirs, kept)) - len(wrong)
    figure("conversations", equal)
    figure("by affinity", len(unpredicted))
    figure("mismatches", len(wrong))
    record("text prompts, vllm tiktoken: equal, not predicted, mismatches", [equal, len(unpredicted), len(wrong)])
    assert "\n".join(wrong) == ""
    assert equal > 300
    assert all(str(each).startswith(("NotModelledError", "TemplateError")) for each in unpredicted)
    for completion, ids in zip(COMPLETIONS, theirs[len(cases) :], strict=True):
        special = bool(completion["add_special_tokens"])
        assert prompter.completion(str(completion["prompt"]), add_special_tokens=special).ids.tolist() == ids
