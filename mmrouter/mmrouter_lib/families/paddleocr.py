"""PaddleOCR-VL: an image is one run of placeholders, sized like Qwen-VL's, with narrow images enlarged first.

Covers ``paddleocr_vl`` (PaddleOCR-VL, 1.5). The geometry is that of vLLM 0.32 (``PaddleOCRVLProcessingInfo``), which
the image processor of transformers 5.19 has too, but for images of which vLLM would leave nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

from mmrouter_lib.families.base.family import Family, ProcessorLimits, refuse_options, register
from mmrouter_lib.families.base.layout import check_size
from mmrouter_lib.families.qwen_vl import MAX_ASPECT, pixel_limits, smart_resize
from mmrouter_lib.model_folder import ModelFolderError, image_processor, vision_config, whole_number

MODEL_TYPE = "paddleocr_vl"
_LIMITS = (384 * 384, 1536 * 1536)  # pixels, the processor class's own defaults


@dataclass(frozen=True, slots=True)
class PaddleOCRVL(Family):
    """A PaddleOCR-VL folder. ``unit`` is the side in pixels of the square of patches that one placeholder stands for;
    ``min_pixels`` and ``max_pixels`` limit the pixels of an image. ``video_token_id`` stands for a video, which is not
    modelled.
    """

    placeholder_id: int
    unit: int
    min_pixels: int
    max_pixels: int
    video_token_id: int = 100_296
    placeholder_text: str = "<|IMAGE_PLACEHOLDER|>"
    name: str = MODEL_TYPE
    media_text: ClassVar[Mapping[str, str]] = MappingProxyType(
        {"image": "<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>"}
    )

    @property
    def pixel_options(self) -> dict[str, int]:
        return {"min_pixels": self.min_pixels, "max_pixels": self.max_pixels}

    def count(self, width: int, height: int) -> int:
        """Return the number of placeholder tokens. Raises :class:`ImageSizeError` as Qwen-VL's ``smart_resize``."""
        check_size(width, height)
        if height < self.unit:
            width, height = round(width * self.unit / height), self.unit
        if width < self.unit:
            width, height = self.unit, round(height * self.unit / width)
        wide, high = smart_resize(width, height, unit=self.unit, min_pixels=self.min_pixels, max_pixels=self.max_pixels)
        return (wide // self.unit) * (high // self.unit)


def load(folder: Path, config: dict[str, Any], limits: ProcessorLimits | None) -> PaddleOCRVL | None:
    """Return the family of a folder, ``None`` where the limits of pixels depend on whether its own code is trusted.
    Raises :class:`ModelFolderError` for a geometry that is not modelled.
    """
    refuse_options(limits, "num_crops", family=MODEL_TYPE)
    file, (processor_file, values) = str(folder / "config.json"), image_processor(folder)
    if "auto_map" in values and None in (values.get("min_pixels"), values.get("max_pixels")):
        return None
    if values.get("do_resize") is False:
        raise ModelFolderError(f"{processor_file}: do_resize false is not modelled")
    vision, sides = vision_config(file, config), []
    for key, of_network, default in (("patch_size", "patch_size", 14), ("merge_size", "spatial_merge_size", 2)):
        sides.append(whole_number(processor_file, values, key, default))
        if whole_number(file, vision, of_network, default) != sides[-1]:
            raise ModelFolderError(f"{processor_file}: {key} {sides[-1]} is not that of config.json's vision_config")
    low, high = pixel_limits(processor_file, values, limits, _LIMITS)
    unit = sides[0] * sides[1]
    if high <= MAX_ASPECT * unit**2:
        raise ModelFolderError(
            f"{processor_file}: with at most {high} pixels vLLM may leave nothing of a thin image; "
            f"more than {MAX_ASPECT * unit**2} are modelled"
        )
    image, video = (
        whole_number(file, config, f"{kind}_token_id", default)
        for kind, default in (("image", 100_295), ("video", 100_296))
    )
    return PaddleOCRVL(image, unit, low, high, video)


register(MODEL_TYPE, load, proved_on=("vllm", "sglang"))
