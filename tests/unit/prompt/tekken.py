"""A small model folder with Mistral's own tokenizer."""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import mistral_common

SOURCE = Path(mistral_common.__file__).parent / "data" / "tekken_240911.json"
KEPT, SPECIAL = 3_000, 20


@cache
def tekken(version: str = "v7") -> dict[str, Any]:
    """Return the tokenizer that the library brings, with its first tokens only: reading all of them takes seconds."""
    whole = json.loads(SOURCE.read_text())
    sizes = {"default_vocab_size": KEPT + SPECIAL, "default_num_special_tokens": SPECIAL}
    made = {"vocab": whole["vocab"][:KEPT], "config": whole["config"] | sizes | {"version": version}}
    return {**made, "version": 1, "type": "Tekken"}


def write(folder: Path, images: Mapping[str, int] | None = None, version: str = "v7") -> Path:
    """Write the folder's files and return it. ``images``: their sizes in tekken.json, of a model that takes them."""
    (folder / "tekken.json").write_text(
        json.dumps(tekken(version) | ({} if images is None else {"multimodal": images}))
    )
    (folder / "params.json").write_text(json.dumps({} if images is None else {"vision_encoder": {"hidden_size": 64}}))
    (folder / "config.json").write_text('{"model_type": "mistral"}')
    (folder / "consolidated.safetensors").touch()
    return folder
