"""LLaVA-1.5: every image becomes one square picture, so every image has the same number of tokens, 576 as published.

vLLM 0.32 starts a prompt with the beginning-of-text token only where the request asks for special tokens, although
``add_bos_token`` is set. Its chat endpoint does not ask, with or without an image (recorded requests of LLaVA-1.5).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmrouter_lib.families.base.clip import ClipFamily, load_tower
from mmrouter_lib.families.base.family import ImageSizeError, ProcessorLimits
from mmrouter_lib.families.base.registry import register

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


# SGLang expands the placeholders of LLaVA in its scheduler, by rules that are not modelled
# (docs/engine-facts/sglang.md#identity-per-family).
register(MODEL_TYPE, load, proved_on=("vllm",))
