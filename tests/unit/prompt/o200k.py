"""A small model folder of gpt-oss: the first tokens of its vocabulary, which the library brings, and its own ones."""

import json
from functools import cache
from pathlib import Path
from typing import Any

from openai_harmony import HarmonyEncodingName, load_harmony_encoding

from mmrouter_lib.prompt.harmony import PATTERN

KEPT = 3_000
SPECIAL = {"startoftext": 199_998, "endoftext": 199_999, "return": 200_002, "constrain": 200_003, "channel": 200_005}
SPECIAL |= {"start": 200_006, "end": 200_007, "message": 200_008, "call": 200_012}
NAMED = {"bos_token": "<|startoftext|>", "eos_token": "<|return|>", "pad_token": "<|endoftext|>"}


def _shown() -> dict[int, str]:
    """Return how byte-level tokenizers write each byte: printable ones as they are, others from U+0100 on."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in kept]
    return {byte: chr(byte) for byte in kept} | {byte: chr(0x100 + at) for at, byte in enumerate(others)}


@cache
def tokenizer() -> dict[str, Any]:
    made, shown = load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS), _shown()
    raw = [made.decode([rank], errors="surrogateescape").encode("utf-8", "surrogateescape") for rank in range(KEPT)]
    vocabulary = {"".join(map(shown.__getitem__, token)): rank for rank, token in enumerate(raw)}
    splits = [(token[:at], token[at:]) for token in vocabulary for at in range(1, len(token))]
    merges = [[left, right] for left, right in splits if left in vocabulary and right in vocabulary]
    names = {f"<|{name}|>": number for name, number in SPECIAL.items()}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    cut = {"type": "Split", "pattern": {"Regex": PATTERN}, "behavior": "Isolated", "invert": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "added_tokens": [{"id": number, "content": name, **flags} for name, number in names.items()],
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [cut, level]},
        "post_processor": level,
        "decoder": level,
        "model": {"type": "BPE", "vocab": vocabulary | names, "merges": merges},
    }


def write(folder: Path, **config: Any) -> Path:
    """Write the folder's files and return it; ``config``: more of config.json."""
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer()))
    described = {"tokenizer_class": "PreTrainedTokenizerFast", **NAMED}
    (folder / "tokenizer_config.json").write_text(json.dumps(described))
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt_oss", **config}))
    return folder
