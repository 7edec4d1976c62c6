"""LLaVA-1.5 and LLaVA-NeXT as their authors publish them (``LlavaLlamaForCausalLM``), expanded as by SGLang 0.5.23.

SGLang's scheduler replaces the placeholder of a request's first image. What further images show is dropped without an
error, and their placeholders stay single tokens, unless parts say ``modalities``, which is no field of the API. The
count is LLaVA-NeXT's with two differences: pinpoints are (width, height), and lengths are truncated without rounding
(docs/engine-facts/sglang.md#llava). vLLM has no class for these checkpoints.

The vision tower is a CLIP of its own repository, whose name has its geometry: ``clip-vit-large-patch14-336``.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from mmrouter_lib.families.base.family import (
    Expanded,
    ProcessorLimits,
    PromptImage,
    expand_ids,
    refuse_options,
    register,
)
from mmrouter_lib.families.llava import IMAGE_TOKEN_ID, Llava
from mmrouter_lib.families.llava_next import best_pinpoint, unpadded
from mmrouter_lib.model_folder import find_json, whole_number

if TYPE_CHECKING:
    from mmrouter_lib.prompt.tokenizer import TokenizerCodec

ARCHITECTURE = "LlavaLlamaForCausalLM"
_TOWER = re.compile(r"clip-vit-[a-z]+-patch(\d+)-(\d+)$")


@dataclass(frozen=True, slots=True)
class LlavaOriginal(Llava):
    """``pinpoints`` are (height, width) in pixels, empty where every image becomes one picture."""

    rotates_exif: ClassVar[bool] = False
    name: str = ARCHITECTURE
    pinpoints: tuple[tuple[int, int], ...] = ()

    def count(self, width: int, height: int) -> int:
        """Return the number of placeholder tokens: whole picture + rows of the grid, each with one token more."""
        whole = Llava.count(self, width, height)
        if not self.pinpoints:
            return whole
        side = self.image_size // self.patch_size
        high, wide = (pixels // self.image_size * side for pixels in best_pinpoint(width, height, self.pinpoints))
        rows, columns = unpadded(width, height, wide, high, int)
        return whole + rows * (columns + 1)

    def expand(
        self, codec: "TokenizerCodec", text: str, images: Sequence[PromptImage], *, add_special_tokens: bool
    ) -> Expanded:
        """Return a prompt text's token ids with the first image expanded. Raises :class:`PlaceholderError`."""
        ids = codec.encode(text, add_special_tokens=add_special_tokens)
        return expand_ids(ids, self.placeholder_id, images[:1])


def load(folder: Path, config: dict[str, Any], limits: ProcessorLimits | None) -> LlavaOriginal | None:
    """Return the family of a folder, ``None`` for another tower, mode or tokenizer than those that are modelled.

    Raises :class:`ModelFolderError`.
    """
    tower = _TOWER.search(str(config.get("mm_vision_tower")))
    mode, select = config.get("image_aspect_ratio"), config.get("mm_vision_select_feature")
    placeholder = whole_number(str(folder / "config.json"), config, "image_token_index", IMAGE_TOKEN_ID, least=0)
    text = _added_token(folder, placeholder)
    pinpoints = _pinpoints(config.get("image_grid_pinpoints")) if mode == "anyres" else ()
    if tower is None or mode not in ("pad", "anyres") or select != "patch" or text is None or pinpoints is None:
        return None
    refuse_options(limits, "min_pixels", "max_pixels", "num_crops", family=ARCHITECTURE)
    patch, size = map(int, tower.groups())
    return LlavaOriginal(placeholder, text, size, patch, (size // patch) ** 2, pinpoints=pinpoints)


def _added_token(folder: Path, token: int) -> str | None:
    """Return the text of a token that the tokenizer was given beside its vocabulary; authors' folders may lack it."""
    added = (find_json(folder, "tokenizer.json") or {}).get("added_tokens") or ()
    return next((str(each["content"]) for each in added if each.get("id") == token), None)


def _pinpoints(value: object) -> tuple[tuple[int, int], ...] | None:
    """Return pairs (width, height) as (height, width), ``None`` for a text, as which they may be written."""
    if not isinstance(value, list) or not value:
        return None
    pairs = [tuple(pair) for pair in value if isinstance(pair, list)]
    if len(pairs) < len(value) or not all(len(pair) == 2 and all(isinstance(n, int) for n in pair) for pair in pairs):
        return None
    return tuple((high, wide) for wide, high in pairs)


register(ARCHITECTURE, load, proved_on=("sglang",))
