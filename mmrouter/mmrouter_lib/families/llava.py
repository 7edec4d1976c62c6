"""LLaVA-1.5: every image becomes one square picture, so every image has the same number of tokens, 576 as published.

vLLM 0.32 puts the beginning-of-text token in front of a prompt only where the request asks for special tokens, although
``add_bos_token`` is set: its chat does not ask (captures of LLaVA-1.5), with or without an image.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmrouter_lib.families.clip import ClipFamily, load_tower
from mmrouter_lib.families.family import ImageSizeError, ProcessorLimits

MODEL_TYPE = "llava"


@dataclass(frozen=True, slots=True)
class Llava(ClipFamily):
    """A LLaVA-1.5 folder; ``tokens`` is what an image of any size becomes."""

    placeholder_id: int
    placeholder_text: str
    tokens: int
    name: str = MODEL_TYPE

    def count(self, width: int, height: int) -> int:
        """Return the number of placeholder tokens: (picture side / patch side)^2."""
        if width < 1 or height < 1:
            raise ImageSizeError(f"an image of {width}x{height} pixels is empty")
        return self.tokens


def load(folder: Path, config: dict[str, Any], limits: ProcessorLimits | None) -> Llava | None:
    """Return the family of a folder, ``None`` where its vision tower is not CLIP (Pixtral has the same model_type)."""
    tower = load_tower(folder, config, limits)
    if tower is None:
        return None
    return Llava(tower.placeholder_id, tower.placeholder_text, tower.base_tokens)
