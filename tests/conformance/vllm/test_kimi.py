"""A folder of Kimi's form: ids of drawn texts by the tokenizer that vLLM makes of it, texts of drawn tools by the
published code, and whole prompts by vLLM's own front end. ``processors/test_processors.py`` has prompts with images.

The vocabulary is that of Qwen3-VL, and the tokenizer's code this project's (``hack/engines/folder_code``). The code
that writes tools is Kimi's own, of which a package has a copy.
"""

import json
import random
import runpy
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from artefacts import Record, run_tool_or_skip
from conformance.conftest import Figure
from conformance.corpus import text_corpus
from conformance.own_code import answer_of
from conformance.rendering import own_prompts
from conformance.test_text_models import COMPLETIONS, REFUSED_BY_VLLM, SMALL, differences
from conformance.vllm.test_sentencepiece import PROGRAM, drawn_texts
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from long_form import IS_LONG

from mmrouter_lib.engines.text_models import load_text_prompter
from mmrouter_lib.prompt import PromptTooLongError
from mmrouter_lib.prompt.tokenizer import TokenizerCodec
from mmrouter_lib.prompt.typescript_tools import sort_deeply, write_tools

FILES = (
    "tiktoken.model",
    "tokenization_kimi.py",
    "tool_declaration_ts.py",
    "tokenizer_config.json",
    "chat_template.jinja",
)
DRAWN = 30_000 if IS_LONG else 3_000
TOOLS = 20_000 if IS_LONG else 600
FOLDED = ("'s", "'S", "'\u017f", "\u017f", "\u212a", "'LL", "'Ve", "\u2019s", "\u0130", "\u00df", "\u1e9e", "\u01c5")
"""Ends of words, and letters that are equal to others where case does not count."""
HAN = ("\u4e2d", "\u3005", "\u3007", "\u2f00", "\u3400", "\U00020000", "\uf900", "\u30fc", "\u3042", "\u0e31", "\u0301")
ROW, TEXT = 25_000, 400_000
ROWS = ("x" * ROW, " " * ROW, "x, " * (TEXT // 3), "\u4e2d\n" * 50_000)
CUT = (
    "x" * 20_000 + "<|reserved_token_151700|>" + "x" * 20_000,
    *("x" * (ROW + 1), "y\t" + "\n" * (ROW + 1) + "z", "x, " * (TEXT // 3 + 1)),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_model(tmp_path_factory.mktemp("kimi"))


def text_model(made: Path) -> Path:
    """Make a text-only model with Kimi's tokenizer in a folder."""
    source = Path(run_tool_or_skip("engines.unknown_families", "kimi_k25"))
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


@pytest.mark.adopts(engine="vllm", check="tokens of Kimi K2.5")
def test_a_tokenizer_made_of_a_tiktoken_vocabulary_has_the_ids_of_the_folders_own(
    vllm_env: Path, folder: Path, record: Record, figure: Figure
) -> None:
    texts = [*drawn_texts(), *words(), *ROWS]
    (theirs,) = answer_of(vllm_env, [PROGRAM, "vllm"], [{"folder": str(folder), "texts": texts}])
    codec = load_text_prompter("vllm", folder).codec
    made = ([codec.encode(text, add_special_tokens=special).tolist() for special in (False, True)] for text in texts)
    wrong = [text for text, ids, mine in zip(texts, theirs["ids"], made, strict=True) if ids != mine]
    record("tokens of kimi: texts, mismatches", [len(texts), len(wrong)])
    figure("texts", len(texts))
    figure("mismatches", len(wrong))
    assert wrong == []
    assert len(texts) > DRAWN


def test_a_text_that_the_folders_code_cuts_is_not_predicted(vllm_env: Path, folder: Path) -> None:
    codec = load_text_prompter("vllm", folder).codec
    unlimited = TokenizerCodec.of(codec.tokenizer, {})
    (theirs,) = answer_of(vllm_env, [PROGRAM, "vllm"], [{"folder": str(folder), "texts": list(CUT)}])
    cut = 0
    for text, (ids, _) in zip(CUT, theirs["ids"], strict=True):
        cut += unlimited.encode(text, add_special_tokens=False).tolist() != ids
        with pytest.raises(PromptTooLongError):
            codec.encode(text, add_special_tokens=False)
    assert cut, "no limit changes a token"


VALUES = (
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats(-2, 2) | st.sampled_from(["", "a", 'b"c', "\u4e2d\n"])
)
KINDS = ("string", "number", "integer", "boolean", "null", "array", "object")
NAMES = st.sampled_from("abcdefgh") | st.sampled_from(["Ab", "a_b", "aB"])
NOTES = st.fixed_dictionaries(
    {},
    optional={
        "description": st.sampled_from(["", "one", "two\nlines", "\n", "a\n\nb", None]),
        "default": VALUES | st.lists(VALUES, max_size=2) | st.dictionaries(NAMES, VALUES, max_size=2),
        **dict.fromkeys(("maxLength", "minLength", "pattern", "maximum", "minimum", "minItems", "maxItems"), VALUES),
    },
)
REFERENCES = st.sampled_from(["#", "#/$defs/a", "#/$defs/b", "#/$defs/x/a", "#/definitions/a"])


def objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {"type": st.just("object")},
        optional={
            "properties": st.dictionaries(NAMES, inner, max_size=4),
            "required": st.lists(NAMES, max_size=4) | st.none(),
            "additionalProperties": st.sampled_from([True, False, None, {}, 1]) | inner,
            "$defs": st.dictionaries(NAMES, inner, max_size=2) | st.none(),
        },
    )


def with_notes(*parts: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    return st.builds(lambda part, notes: notes | part, st.one_of(*parts), NOTES)


SCHEMAS: st.SearchStrategy[Any] = st.recursive(
    with_notes(
        st.builds(lambda kind: {"type": kind}, st.sampled_from((*KINDS, "file", None, 7))),
        st.builds(lambda kinds: {"type": kinds}, st.lists(st.sampled_from((*KINDS, "file")), max_size=3)),
        st.builds(lambda values: {"enum": values}, st.lists(VALUES, max_size=3)),
        st.builds(
            lambda values, kind: {"enum": values, "type": kind},
            st.lists(VALUES, max_size=2),
            st.sampled_from((*KINDS, ["string"], ["null", "string"], ["string", "null"], ["string", "number"], [])),
        ),
        st.builds(lambda reference: {"$ref": reference}, REFERENCES),
    )
    | st.sampled_from([True, False, {}, None, "type", ["type"], 3]),
    lambda inner: with_notes(
        objects(inner),
        st.builds(lambda items: {"type": "array", "items": items}, inner),
        st.builds(lambda types: {"anyOf": types}, st.lists(inner, max_size=3)),
    ),
    max_leaves=12,
)
FUNCTIONS = st.fixed_dictionaries(
    {"name": NAMES},
    optional={
        "description": st.sampled_from(["", "Does it.", "two\nlines", None]),
        "parameters": objects(SCHEMAS) | st.sampled_from([None, {}, [], ["a"], "x"]),
    },
)


@pytest.mark.adopts(engine="vllm", check="tools of Kimi K2.5")
def test_tools_are_written_as_the_published_code_writes_them(folder: Path, record: Record, figure: Figure) -> None:
    written: dict[str, Any] = runpy.run_path(str(folder / "tool_declaration_ts.py"))
    compared: Counter[str] = Counter()

    @settings(max_examples=TOOLS, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(FUNCTIONS | st.just({}), min_size=1, max_size=3))
    def compare(functions: list[dict[str, Any]]) -> None:
        tools = sort_deeply([{"type": "function", "function": each} for each in functions])
        try:
            theirs = written["encode_tools_to_typescript_style"](tools)
        except Exception:  # as the tokenizer's code does, which gives the template the tools alone then
            theirs = None
        assert write_tools(tools) == theirs
        compared["refused" if theirs is None else "written"] += 1

    compare()
    record("tools of kimi: written, refused by both", [compared["written"], compared["refused"]])
    figure("tools", compared["written"])
    figure("refused by both", compared["refused"])
    assert min(compared.values()) > TOOLS // 20


@pytest.mark.adopts(engine="vllm", check="prompts of Kimi K2.5")
def test_vllms_prompts_of_a_tiktoken_vocabulary_are_the_predicted_ones(
    vllm_env: Path, folder: Path, record: Record, figure: Figure
) -> None:
    drawn = text_corpus()
    options = {"chat_template_kwargs": {"thinking": False}}
    cases = [*drawn, *(replace(one, body=one.body | options) for one in drawn[:40])]
    asked = {"chats": [one.body for one in cases], "completions": COMPLETIONS}
    theirs = own_prompts(vllm_env, {folder: asked})[folder].listed()
    prompter = load_text_prompter("vllm", folder)
    wrong = differences(prompter, cases, theirs[: len(cases)], REFUSED_BY_VLLM)
    equal = sum(isinstance(answer, list) for answer in theirs[: len(cases)]) - len(wrong)
    with_tools = sum(
        isinstance(answer, list) and bool(one.body.get("tools")) for one, answer in zip(cases, theirs, strict=False)
    )
    figure("conversations", equal)
    figure("with tools", with_tools)
    figure("mismatches", len(wrong))
    record("text prompts, vllm kimi: equal, of them with tools, mismatches", [equal, with_tools, len(wrong)])
    assert "\n".join(wrong) == ""
    assert equal > 300
    assert with_tools > 20
    for completion, ids in zip(COMPLETIONS, theirs[len(cases) :], strict=True):
        special = bool(completion["add_special_tokens"])
        assert prompter.completion(str(completion["prompt"]), add_special_tokens=special).ids.tolist() == ids
