"""Qwen2-VL to Qwen3.6: one image processor, read from the folder as transformers 5.19 reads it.

Patches of 14 pixels (from Qwen3-VL on: 16) are merged 2x2, so sides are multiples of 28 (32) pixels. As published,
images are scaled to 3136 to 12845056 pixels, from Qwen3-VL on to 65536 to 16777216.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

from mmrouter_lib.families.base.family import Family, ImageSizeError, ProcessorLimits, refuse_options, register
from mmrouter_lib.model_folder import ModelFolderError, image_processor, whole_number

# The processor class's own defaults, for keys that preprocessor_config.json leaves out.
DEFAULT_PATCH, DEFAULT_MERGE, DEFAULT_MIN_PIXELS, DEFAULT_MAX_PIXELS = 14, 2, 56 * 56, 28 * 28 * 1280

MAX_ASPECT = 200


@dataclass(frozen=True, slots=True)
class QwenVL(Family):
    """A Qwen-VL folder: an image is one unbroken run of placeholders, one per merged square of patches."""

    name: str
    placeholder_id: int
    patch_size: int
    merge_size: int
    min_pixels: int
    max_pixels: int
    placeholder_text: str = "<|image_pad|>"

    media_text: ClassVar[Mapping[str, str]] = MappingProxyType(
        {"image": "<|vision_start|><|image_pad|><|vision_end|>", "video": "<|vision_start|><|video_pad|><|vision_end|>"}
    )

    @property
    def may_have_states(self) -> bool:
        return self.name.startswith("qwen3_5")

    @property
    def pixel_options(self) -> dict[str, int]:
        return {"min_pixels": self.min_pixels, "max_pixels": self.max_pixels}

    def count(self, width: int, height: int) -> int:
        """Return the number of placeholder tokens: (width'/patch)(height'/patch)/merge^2 of the resized image."""
        unit = self.patch_size * self.merge_size
        wide, high = smart_resize(width, height, unit=unit, min_pixels=self.min_pixels, max_pixels=self.max_pixels)
        return (wide // unit) * (high // unit)


def load(folder: Path, config: dict[str, Any], limits: ProcessorLimits | None) -> QwenVL:
    """Return the family of a folder. Raises :class:`ModelFolderError` for a geometry that is not modelled."""
    refuse_options(limits, "num_crops", family=str(config["model_type"]))
    file, processor = image_processor(folder)
    patch = whole_number(file, processor, "patch_size", DEFAULT_PATCH)
    merge = whole_number(file, processor, "merge_size", DEFAULT_MERGE)
    vision = config.get("vision_config")
    if not isinstance(vision, dict):
        raise ModelFolderError(f"{folder / 'config.json'}: vision_config is missing")
    network = (vision.get("patch_size", patch), vision.get("spatial_merge_size", merge))
    if network != (patch, merge):
        raise ModelFolderError(
            f"{file}: patch_size and merge_size {(patch, merge)} are not those of config.json's vision_config {network}"
        )
    if processor.get("do_resize") is False:
        raise ModelFolderError(f"{file}: do_resize false is not modelled")
    low, high = _pixel_limits(file, processor, limits)
    placeholder_id = whole_number(str(folder / "config.json"), config, "image_token_id")
    return QwenVL(str(config["model_type"]), placeholder_id, patch, merge, min_pixels=low, max_pixels=high)


def _pixel_limits(file: str, processor: dict[str, Any], limits: ProcessorLimits | None) -> tuple[int, int]:
    """Return (min, max) pixels: the resource, else ``min_pixels``/``max_pixels``, else ``size``, else the class's own.

    That is also the order where a file has both forms: transformers 5.19 writes the pixel keys into ``size`` on
    loading, and vLLM 0.32 writes the engine's ``--mm-processor-kwargs`` over the result.
    """
    size = processor.get("size")
    if size is None:
        size = {"shortest_edge": DEFAULT_MIN_PIXELS, "longest_edge": DEFAULT_MAX_PIXELS}
    if not isinstance(size, dict) or set(size) - {"shortest_edge", "longest_edge", "min_pixels", "max_pixels"}:
        raise ModelFolderError(f"{file}: size must hold shortest_edge and longest_edge, not {size!r}")
    edges = {"min_pixels": size.get("shortest_edge"), "max_pixels": size.get("longest_edge")}
    found = []
    for key, edge in edges.items():
        if (limit := getattr(limits, key, None)) is not None:
            found.append(whole_number("spec.engine.processor", {key: limit}, key))
        else:
            found.append(whole_number(file, processor if processor.get(key) is not None else {key: edge}, key))
    low, high = found
    if low > high:
        raise ModelFolderError(f"{file}: the least number of pixels, {low}, is above the greatest, {high}")
    return low, high


def smart_resize(width: int, height: int, *, unit: int, min_pixels: float, max_pixels: float) -> tuple[int, int]:
    """Return the (width, height) in pixels that an image is resized to: multiples of ``unit`` near its own shape.

    This is ``smart_resize`` of transformers 5.19 in double precision. The order of the floating-point operations is
    part of the rule, because a last bit decides a floor or a ceiling.

    Each side is rounded to the nearest multiple (half to even). A result of more than ``max_pixels`` is scaled down
    with floors of at least one unit, one of less than ``min_pixels`` is scaled up with ceilings. A side of half a unit
    or less rounds to 0 and so is scaled up: 112x14 at unit 28 and 3136 pixels becomes 168x28, not 112x28.

    Raises :class:`ImageSizeError` for an empty image or one whose sides differ by more than :data:`MAX_ASPECT` times.
    """
    if width < 1 or height < 1:
        raise ImageSizeError(f"an image of {width}x{height} pixels is empty")
    if max(width, height) / min(width, height) > MAX_ASPECT:
        raise ImageSizeError(f"an image of {width}x{height} pixels: its sides differ by more than {MAX_ASPECT} times")
    wide = round(width / unit) * unit
    high = round(height / unit) * unit
    if wide * high > max_pixels:
        shrink = math.sqrt((height * width) / max_pixels)
        wide = max(unit, math.floor(width / shrink / unit) * unit)
        high = max(unit, math.floor(height / shrink / unit) * unit)
    elif wide * high < min_pixels:
        stretch = math.sqrt(min_pixels / (height * width))
        wide = math.ceil(width * stretch / unit) * unit
        high = math.ceil(height * stretch / unit) * unit
    return wide, high


for model_type in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl"):
    register(model_type, load, proved_on=("vllm", "sglang"))
# Qwen3.6 has the type of Qwen3.5. The types with "moe" differ in the language model only.
for model_type in ("qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"):
    register(model_type, load, proved_on=("vllm",))
