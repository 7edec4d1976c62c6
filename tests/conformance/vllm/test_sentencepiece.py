"""Folders with ``tokenizer.model`` and no tokenizer.json, and one with older files beside both: the tokenizer that vLLM
makes of them, part by part and by the ids of drawn texts, and whole prompts by its own front end.

The models are those of Llama 2 and Mistral 7B, and others that SentencePiece trains on this repository's documents.
"""

import base64
import json
import random
import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from artefacts import Record
from conformance.conftest import Figure, model_folder
from conformance.corpus import BLANKS, ODD, TEXT, text_corpus
from conformance.own_code import answer_of
from conformance.rendering import own_prompts
from conformance.test_text_models import COMPLETIONS, REFUSED_BY_VLLM, SMALL, differences
from conformance.workload import CODE, EMOJI, SCRIPTS, STORY
from long_form import IS_LONG

from mmrouter_lib.engines.text_models import load_text_prompter
from mmrouter_lib.prompt import AnyPrompter

PROGRAM = Path(__file__).parents[1] / "own_tokenizer.py"
DRAWN = 1500
DOCS = Path(__file__).resolve().parents[3] / "docs"
SOURCES = ("exactness.md", "families.md", "text-models.md", "cache-layouts.md", "architecture.md")
LLAMA2, MISTRAL = "llava-hf--llava-1.5-7b-hf", "llava-hf--llava-v1.6-mistral-7b-hf"
SHORT_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "tokenizer_class", "model_max_length")
TRAINED: dict[str, dict[str, Any]] = {
    "bpe": {"model_type": "bpe", "vocab_size": 1500, "byte_fallback": True, "normalization_rule_name": "identity"},
    "bpe, own tokens": {
        "model_type": "bpe",
        "vocab_size": 1200,
        "user_defined_symbols": ["<tool>", "[INST]", "  "],
        "control_symbols": ["<|im_start|>", "<|im_end|>"],
        "unk_piece": "<unknown>",
        "eos_id": -1,
    },
    "unigram": {"model_type": "unigram", "vocab_size": 900, "byte_fallback": True, "user_defined_symbols": ["<tool>"]},
}
"""Name -> options of SentencePiece's trainer; its default rule of normalization is NFKC."""
FLAGS = {"lstrip": True, "rstrip": False, "normalized": True, "single_word": False}
FAST, LLAMA = {"tokenizer_class": "PreTrainedTokenizerFast"}, {"tokenizer_class": "LlamaTokenizer"}
OLDER = {
    "special_tokens_map.json": {
        "bos_token": {"content": "<s>", **FLAGS},
        "eos_token": "</s>",
        "pad_token": {"content": "[PAD]", **FLAGS},
        "additional_special_tokens": ["<extra>"],
    },
    "added_tokens.json": {"<image>": 32_000, "[PAD]": 32_001, "two words": 32_002},
}
"""Files of releases of transformers that wrote no ``added_tokens_decoder``."""


BESIDE_JSON = "mistral, older files beside tokenizer.json"


def renamed(text: str, number: int) -> dict[str, Any]:
    return {"added_tokens_decoder": {str(number): {"content": text, "special": True, "normalized": False}}}


FOLDERS: dict[str, tuple[str, str, dict[str, Any] | None, dict[str, Any]]] = {
    "llama": (LLAMA2, "llama", {}, {}),
    "mistral": (MISTRAL, "mistral", {}, {}),
    "llama, another model type": (MISTRAL, "new_model", LLAMA, {}),
    "llama, legacy": (LLAMA2, "llama", {"legacy": True, "add_eos_token": True}, {}),
    "llama, no blank": (LLAMA2, "llama", {"add_prefix_space": False, "add_bos_token": False}, {}),
    "llama, special tokens as texts": (LLAMA2, "llama", {"split_special_tokens": True}, {}),
    "llama, older files": (LLAMA2, "llama", None, OLDER),
    "mistral, older files": (MISTRAL, "mistral", None, OLDER),
    BESIDE_JSON: (MISTRAL, "mistral", None, OLDER),
    "bpe": ("bpe", "new_model", FAST | {"add_bos_token": True}, {}),
    "bpe, listed tokens": ("bpe", "new_model", FAST | {"additional_special_tokens": ["<a b>", "harbour"]}, {}),
    "bpe, named tokens": (
        "bpe",
        "new_model",
        FAST | {"bos_token": None, "image_token": "<im>", "add_bos_token": 1},
        {},
    ),
    "bpe, own tokens": ("bpe, own tokens", "new_model", FAST, {}),
    "bpe, own tokens of llama": ("bpe, own tokens", "llama", LLAMA, {}),
    "bpe, renamed token": ("bpe, own tokens", "new_model", FAST | renamed("<call>", 3), {}),
    "unigram of llama": ("unigram", "llama", LLAMA, {}),
}
"""Name -> its tokenizer.model, model_type, fields over tokenizer_config.json (``None``: an older one), and files."""
NAMES = list(FOLDERS) if IS_LONG else ["llama", "bpe, own tokens of llama"]
Made = dict[str, Path]
Folders = Callable[[str], Path]


@pytest.fixture(scope="module")
def folders(vllm_env: Path, tmp_path_factory: pytest.TempPathFactory) -> Made:
    root = tmp_path_factory.mktemp("pieces")
    text = "\n".join((DOCS / name).read_text() for name in SOURCES)
    asked = [{"text": f"{text}\n{SCRIPTS}\n{EMOJI}", "options": options} for options in TRAINED.values()]
    files = dict(zip(TRAINED, answer_of(vllm_env, [PROGRAM, "train"], asked), strict=True))
    made = {}
    for number, name in enumerate(NAMES):
        source, model_type, given, more = FOLDERS[name]
        folder = made[name] = root / str(number)
        folder.mkdir()
        described: dict[str, Any] = {}
        if source in TRAINED:
            (folder / "tokenizer.model").write_bytes(base64.b64decode(files[source]))
        else:
            shutil.copyfile(model_folder(source) / "tokenizer.model", folder / "tokenizer.model")
            described = json.loads((model_folder(source) / "tokenizer_config.json").read_text())
        if name == BESIDE_JSON:
            shutil.copyfile(model_folder(source) / "tokenizer.json", folder / "tokenizer.json")
        if given is None:
            described = {key: described[key] for key in SHORT_NAMES if key in described and key != "pad_token"}
        config = SMALL | {"architectures": ["LlamaForCausalLM"], "model_type": model_type, "vocab_size": 32_064}
        files_of = {"config.json": config, "tokenizer_config.json": {**described, **(given or {})}, **more}
        for file, content in files_of.items():
            (folder / file).write_text(json.dumps(content))
        (folder / "chat_template.jinja").write_text(TEMPLATE)
    return made


TEMPLATE = """{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}<<SYS>>
{{ m.content }}
<</SYS>>
{% elif m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %} {{ m.content }}{{ eos_token }}{% endif %}
{%- endfor %}"""


def drawn_texts() -> list[str]:
    draw = random.Random(20)
    words = [*STORY.split(), *SCRIPTS.split(), *EMOJI.split(), *CODE.split(" ")]
    own = [
        *TEXT,
        "<tool>",
        "<a b>",
        "harbour",
        "<im>",
        "<call>",
        "<|im_start|>",
        "[PAD]",
        "two words",
        "<extra>",
        "<pad>",
    ]
    odd = [*own, *(text[:-1] for text in own), *BLANKS, *ODD, "", "<0x0A>", "▁▁▁"]

    def character() -> str:
        return chr(draw.choice((draw.randrange(0x20, 0x250), draw.randrange(0xD7FF), draw.randrange(0xE000, 0x110000))))

    def piece() -> str:
        return draw.choice((draw.choice(words), draw.choice(words), draw.choice(odd), character()))

    drawn = (draw.choice((" ", " ", "\n", "")).join(piece() for _ in range(draw.randint(0, 30))) for _ in range(DRAWN))
    return [STORY, SCRIPTS, EMOJI, CODE * 5, *odd, *(a + b for a, b in product(own, own[:4])), *drawn]


@pytest.fixture(scope="module")
def vllms(vllm_env: Path, folders: Made) -> dict[str, dict[str, Any]]:
    asked = [{"folder": str(folder), "texts": drawn_texts()} for folder in folders.values()]
    return dict(zip(folders, answer_of(vllm_env, [PROGRAM, "vllm"], asked), strict=True))


PARTS = ("model", "normalizer", "pre_tokenizer", "added_tokens")
"""What decides ids, without what is put around a text; ids prove that."""


@pytest.mark.adopts(engine="vllm", check="tokenizers made of SentencePiece models")
@pytest.mark.parametrize("name", NAMES)
def test_a_tokenizer_made_of_pieces_is_the_one_that_vllm_makes(
    name: str, folders: Made, vllms: dict[str, dict[str, Any]], record: Record
) -> None:
    prompter = load_text_prompter("vllm", folders[name])
    mine, theirs = json.loads(prompter.tokenizer.to_str()), vllms[name]["parts"]
    assert {part: mine[part] for part in PARTS} == {part: theirs[part] for part in PARTS}
    wrong = unequal(prompter, vllms[name]["ids"])
    record(f"pieces, {name}: texts, mismatches", [len(drawn_texts()), len(wrong)])
    assert wrong == []


def unequal(prompter: AnyPrompter, ids: list[list[list[int]]]) -> list[str]:
    """Return the drawn texts with other ids than these, without and with what is put around a text."""

    def both(text: str) -> list[list[int]]:
        return [prompter.codec.encode(text, add_special_tokens=special).tolist() for special in (False, True)]

    texts = drawn_texts()
    assert len(texts) > DRAWN
    return [text for text, theirs in zip(texts, ids, strict=True) if both(text) != theirs]


CHATS = ("llama", "mistral", "llama, older files", "bpe, own tokens of llama", "unigram of llama") if IS_LONG else NAMES


@pytest.mark.adopts(engine="vllm", check="prompts of SentencePiece models")
def test_vllms_prompts_of_folders_without_tokenizer_json_are_the_predicted_ones(
    vllm_env: Path, folders: Made, record: Record, figure: Figure
) -> None:
    cases = text_corpus()
    asked = {"chats": [one.body for one in cases], "completions": COMPLETIONS}
    prompts = own_prompts(vllm_env, {folders[name]: asked for name in CHATS})
    wrong, compared = [], 0
    for name in CHATS:
        prompter, theirs = load_text_prompter("vllm", folders[name]), prompts[folders[name]].listed()
        found = differences(prompter, cases, theirs[: len(cases)], REFUSED_BY_VLLM)
        wrong += [f"{name}, {each}" for each in found]
        compared += sum(isinstance(answer, list) for answer in theirs[: len(cases)])
        for completion, ids in zip(COMPLETIONS, theirs[len(cases) :], strict=True):
            special = bool(completion["add_special_tokens"])
            assert prompter.completion(str(completion["prompt"]), add_special_tokens=special).ids.tolist() == ids
    figure("conversations", compared)
    figure("mismatches", len(wrong))
    record("text prompts, vllm folders of pieces: conversations, mismatches", [compared, len(wrong)])
    assert "\n".join(wrong) == ""
    assert compared > 400 * len(CHATS)
