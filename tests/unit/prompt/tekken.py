"""A small model folder with Mistral's own tokenizer."""

import json
from functools import cache
from pathlib import Path

import mistral_common

SOURCE = Path(mistral_common.__file__).parent / "data" / "tekken_240911.json"
KEPT, SPECIAL = 3_000, 20


@cache
def tekken() -> str:
    """Return the tokenizer that the library brings, with its first tokens only: reading all of them takes seconds."""
    whole = json.loads(SOURCE.read_text())
    sizes = {"default_vocab_size": KEPT + SPECIAL, "default_num_special_tokens": SPECIAL}
    made = {"vocab": whole["vocab"][:KEPT], "config": whole["config"] | sizes | {"version": "v7"}}
    return json.dumps({**made, "version": 1, "type": "Tekken"})


def write(folder: Path) -> Path:
    """Write the folder's files and return it."""
    (folder / "tekken.json").write_text(tekken())
    (folder / "config.json").write_text('{"model_type": "mistral"}')
    (folder / "consolidated.safetensors").touch()
    return folder
