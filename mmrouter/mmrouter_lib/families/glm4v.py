"""GLM-4.1V, 4.5V, 4.6V and GLM-OCR: an image is one run of placeholders, sized like Qwen-VL's for two equal frames.

Covers ``glm4v`` (GLM-4.1V, 4.6V-Flash), ``glm4v_moe`` (4.5V, 4.6V) and ``glm_ocr``. The geometry is ``smart_resize`` of
transformers 5.19 (``Glm4vImageProcessor``, ``Glm46VImageProcessor``): an image that is narrower than a unit is enlarged
first, and the limits count the pixels of both frames that a picture is repeated to.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

from mmrouter_lib.families.base.family import Family, ProcessorLimits, refuse_options, register
from mmrouter_lib.families.base.layout import check_size
from mmrouter_lib.families.qwen_vl import smart_resize
from mmrouter_lib.model_folder import ModelFolderError, image_processor, vision_config, whole_number

_FRAMES = 2
_SMALLEST, _LARGEST = 112 * 112, 28 * 28 * 15_000  # pixels of both frames, the processor classes' own defaults


@dataclass(frozen=True, slots=True)
class Glm4v(Family):
    """A GLM-V folder. ``unit`` is the side in pixels of the square of patches that one placeholder stands for;
    ``least`` and ``most`` limit the pixels of both frames.
    """

    name: str
    placeholder_id: int
    unit: int
    least: int
    most: int
    placeholder_text: str = "<|image|>"
    media_text: ClassVar[Mapping[str, str]] = MappingProxyType(
        {"image": "<|begin_of_image|><|image|><|end_of_image|>", "video": "<|begin_of_video|><|video|><|end_of_video|>"}
    )

    def count(self, width: int, height: int) -> int:
        """Return the number of placeholder tokens. Raises :class:`ImageSizeError` as Qwen-VL's ``smart_resize``."""
        check_size(width, height)
        if min(width, height) < self.unit:
            scale = max(self.unit / height, self.unit / width)
            width, height = int(width * scale), int(height * scale)
        # Halving is exact in floating point, so limits for one frame decide as those for both do.
        wide, high = smart_resize(
            width, height, unit=self.unit, min_pixels=self.least / _FRAMES, max_pixels=self.most / _FRAMES
        )
        return (wide // self.unit) * (high // self.unit)


def load(folder: Path, config: dict[str, Any], limits: ProcessorLimits | None) -> Glm4v:
    """Return the family of a folder. Raises :class:`ModelFolderError` for a geometry that is not modelled."""
    name, file = str(config["model_type"]), str(folder / "config.json")
    refuse_options(limits, "min_pixels", "max_pixels", "num_crops", family=name)
    processor_file, values = image_processor(folder)
    if values.get("do_resize") is False:
        raise ModelFolderError(f"{processor_file}: do_resize false is not modelled")
    vision = vision_config(file, config)
    sides = []
    for key, of_network, default in (
        ("patch_size", "patch_size", 14),
        ("merge_size", "spatial_merge_size", 2),
        ("temporal_patch_size", "temporal_patch_size", _FRAMES),
    ):
        sides.append(whole_number(processor_file, values, key, default))
        if vision.get(of_network, default) != sides[-1]:
            raise ModelFolderError(f"{processor_file}: {key} {sides[-1]} is not that of config.json's vision_config")
    patch, merge, frames = sides
    if frames != _FRAMES:
        raise ModelFolderError(f"{processor_file}: temporal_patch_size {frames} is not modelled, only {_FRAMES}")
    size = values.get("size") or {"shortest_edge": _SMALLEST, "longest_edge": _LARGEST}
    if not isinstance(size, dict):
        raise ModelFolderError(f"{processor_file}: size must hold shortest_edge and longest_edge, not {size!r}")
    least, most = (whole_number(processor_file, size, key) for key in ("shortest_edge", "longest_edge"))
    return Glm4v(name, whole_number(file, config, "image_token_id"), patch * merge, least, most)


for model_type in ("glm4v", "glm4v_moe", "glm_ocr"):
    register(model_type, load, proved_on=("vllm", "sglang"))
