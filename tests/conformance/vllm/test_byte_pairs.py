"""Folders with ``vocab.json`` and ``merges.txt`` and no tokenizer.json: the tokenizer that vLLM makes of them, part by
part and by the ids of drawn texts. The vocabulary is Qwen3-VL's.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from artefacts import Record, run_tool_or_skip
from conformance.own_code import answer_of
from conformance.test_text_models import SMALL
from conformance.vllm.test_sentencepiece import PROGRAM, drawn_texts, unequal

from mmrouter_lib.engines.text_models import load_text_prompter

PARTS = ("normalizer", "pre_tokenizer", "decoder", "added_tokens")
SOURCE = "internvl_chat"
OLDER = {
    "special_tokens_map.json": {"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>", "<img>"]},
    "added_tokens.json": {"<|endoftext|>": 151_643, "<|im_start|>": 151_644, "<|im_end|>": 151_645, "<tool>": 151_646},
}
"""Files of releases of transformers that wrote no ``added_tokens_decoder``."""
FOLDERS: dict[str, tuple[str, bool, dict[str, Any]]] = {
    "qwen3": ("qwen3", True, {}),
    "qwen2, named tokens": ("qwen2", True, {"bos_token": "<im>", "eos_token": "<|im_end|>", "add_bos_token": True}),
    "qwen2, special tokens as texts": ("qwen2", True, {"split_special_tokens": True}),
    "qwen2, older files": ("qwen2", False, {}),
}
"""Name -> model_type, whether it has ``added_tokens_decoder``, and fields over tokenizer_config.json."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    source, root = Path(run_tool_or_skip("engines.unknown_families", SOURCE)), tmp_path_factory.mktemp("pairs")
    described = json.loads((source / "tokenizer_config.json").read_text())
    made = {}
    for number, (name, (model_type, decoder, fields)) in enumerate(FOLDERS.items()):
        folder = made[name] = root / str(number)
        folder.mkdir()
        for file in ("vocab.json", "merges.txt", "chat_template.jinja"):
            shutil.copyfile(source / file, folder / file)
        kept = {key: value for key, value in described.items() if decoder or key == "tokenizer_class"}
        config = SMALL | {"architectures": ["Qwen3ForCausalLM"], "model_type": model_type, "vocab_size": 151_936}
        files = {"config.json": config, "tokenizer_config.json": kept | fields, **({} if decoder else OLDER)}
        for file, content in files.items():
            (folder / file).write_text(json.dumps(content))
    return made


@pytest.fixture(scope="module")
def vllms(vllm_env: Path, folders: dict[str, Path]) -> dict[str, dict[str, Any]]:
    asked = [{"folder": str(folder), "texts": drawn_texts()} for folder in folders.values()]
    return dict(zip(folders, answer_of(vllm_env, [PROGRAM, "vllm"], asked), strict=True))


@pytest.mark.adopts(engine="vllm", check="tokenizers made of byte pairs")
@pytest.mark.parametrize("name", FOLDERS)
def test_a_tokenizer_made_of_pairs_is_the_one_that_vllm_makes(
    name: str, folders: dict[str, Path], vllms: dict[str, dict[str, Any]], record: Record
) -> None:
    prompter = load_text_prompter("vllm", folders[name])
    mine, theirs = json.loads(prompter.tokenizer.to_str()), vllms[name]["parts"]
    assert {part: mine[part] for part in PARTS} == {part: theirs[part] for part in PARTS}
    wrong = unequal(prompter, vllms[name]["ids"])
    record(f"pairs, {name}: texts, mismatches", [len(drawn_texts()), len(wrong)])
    assert wrong == []
