"""Kimi K2.5 and K2.6: an image is scaled down to a limit of patches and padded to whole squares of them.

Covers ``kimi_k25`` with the tokenizer that its makers publish, or a tokenizer.json. The geometry is that of
vLLM 0.32 (``KimiK25FusedVisionProcessor``) and SGLang 0.5.23 (``navit_resize_config``), which read it from
``media_proc_cfg``.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

from mmrouter_lib.families.base.family import Family, ProcessorLimits, refuse_options, register
from mmrouter_lib.families.base.layout import check_size
from mmrouter_lib.model_folder import (
    ModelFolderError,
    added_token_id,
    find_json,
    has_tokenizer_code,
    read_json,
    whole_number,
)
from mmrouter_lib.tokenizer_code import read_tokenizer_code

MODEL_TYPE = "kimi_k25"
IMAGE = "<|media_pad|>"


@dataclass(frozen=True, slots=True)
class KimiK25(Family):
    """A Kimi K2.5 folder. ``patch_size`` is in pixels, ``merge_size`` the side in patches of the square that one
    placeholder stands for; ``most`` and ``most_on_a_side`` limit the patches of an image.
    """

    placeholder_id: int
    patch_size: int
    merge_size: int
    most: int
    most_on_a_side: int
    placeholder_text: str = IMAGE
    name: str = MODEL_TYPE
    media_text: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "image": "<|media_begin|>image<|media_content|><|media_pad|><|media_end|>",
            "video": "<|kimi_k25_video_placeholder|>",
        }
    )
    one_medium: ClassVar[bool] = True

    def count(self, width: int, height: int) -> int:
        """Return the number of placeholder tokens. Raises :class:`ImageSizeError` for no pixels."""
        check_size(width, height)
        patches = math.prod(max(1.0, side // self.patch_size) for side in (width, height))
        longest, unit = self.most_on_a_side * self.patch_size, self.merge_size * self.patch_size
        scale = min(1.0, math.sqrt(self.most / patches), longest / width, longest / height)
        sides = (min(max(1, int(side * scale)), longest) for side in (width, height))
        return math.prod(-(-side // unit) for side in sides)


def load(folder: Path, config: dict[str, Any], limits: ProcessorLimits | None) -> KimiK25 | None:
    """Return the family of a folder, ``None`` where its tokenizer is code of another form than the published one.

    Raises :class:`ModelFolderError` for a geometry that is not modelled.
    """
    described = find_json(folder, "tokenizer_config.json") or {}
    if read_tokenizer_code(folder, described) is None and (
        has_tokenizer_code(described) or not (folder / "tokenizer.json").is_file()
    ):
        return None
    refuse_options(limits, "min_pixels", "max_pixels", "num_crops", family=MODEL_TYPE)
    if config.get("use_unified_vision_chunk") is not True:
        raise ModelFolderError(f"{folder / 'config.json'}: use_unified_vision_chunk must be true for images")
    file, values = str(folder / "preprocessor_config.json"), read_json(folder, "preprocessor_config.json")
    geometry = values.get("media_proc_cfg")
    if not isinstance(geometry, dict):
        raise ModelFolderError(f"{file}: media_proc_cfg is missing")
    if geometry.get("fixed_output_tokens") is not None:
        raise ModelFolderError(f"{file}: fixed_output_tokens is not modelled")
    merge = geometry.get("merge_kernel_size")
    sides = merge if isinstance(merge, list) and merge else [merge]
    if any(side != sides[0] for side in sides):
        raise ModelFolderError(f"{file}: merge_kernel_size must be a square, not {merge!r}")
    numbers = geometry | {"merge_kernel_size": sides[0]}
    patch, square, most, on_a_side = (
        whole_number(file, numbers, key)
        for key in ("patch_size", "merge_kernel_size", "in_patch_limit", "patch_limit_on_one_side")
    )
    image = added_token_id(folder, IMAGE)
    if image is None:
        raise ModelFolderError(f"{folder}: the tokenizer has no token {IMAGE}")
    return KimiK25(image, patch, square, most, on_a_side)


register(MODEL_TYPE, load, proved_on=("vllm", "sglang"))
