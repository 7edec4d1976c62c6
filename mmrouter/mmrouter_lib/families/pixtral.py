"""Mistral 3 and Pixtral: an image is rows of placeholders, each with a break behind it, the last with an end.

Covers ``mistral3`` (Mistral Small 3.1 and later, Ministral 3, Magistral) and ``llava`` with a Pixtral tower
(Pixtral-12B), in Hugging Face's format. The geometry is that of vLLM 0.32 (``Mistral3HFEncoderInfo``,
``PixtralHFEncoderInfo``) and of transformers 5.19 (``PixtralProcessor``), which agree: an image that is longer than the
limit is scaled down to it with floors, then each side takes as many squares as cover it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from mmrouter_lib.families.base.family import (
    Family,
    ImageSizeError,
    ProcessorLimits,
    PromptImage,
    refuse_options,
    register,
)
from mmrouter_lib.families.base.layout import check_size, size_of, special_id
from mmrouter_lib.model_folder import ModelFolderError, find_json, image_processor, whole_number

if TYPE_CHECKING:
    from mmrouter_lib.prompt.tokenizer import TokenizerCodec

OWN_TOKENIZERS = ("tekken.json", "tokenizer.model.v*")  # of mistral_common, which vLLM prefers
BREAK, END = "[IMG_BREAK]", "[IMG_END]"


@dataclass(frozen=True, slots=True)
class Pixtral(Family):
    """A folder with a Pixtral tower. ``unit`` is the side of the square that one placeholder stands for, ``longest``
    the greatest length of an image, both in pixels.
    """

    name: str
    placeholder_id: int
    unit: int
    longest: int
    placeholder_text: str = "[IMG]"
    media_text: ClassVar[Mapping[str, str]] = MappingProxyType({"image": "[IMG]"})

    def count(self, width: int, height: int) -> int:
        """Return rows x (columns + 1). Raises :class:`ImageSizeError` for an image of which a side would vanish."""
        columns, rows = self._grid(width, height)
        return rows * (columns + 1)

    def tokens(self, codec: "TokenizerCodec", image: PromptImage, number: int) -> Sequence[int]:
        """Return the rows of an image."""
        return self.rows(image, special_id(codec, BREAK), special_id(codec, END))

    def rows(self, image: PromptImage, row_end: int, image_end: int) -> Sequence[int]:
        """Return the token ids of an image; ``row_end`` and ``image_end`` are those of the tokens that end its parts.

        Raises :class:`ImageSizeError`.
        """
        columns, rows = self._grid(*size_of(image))
        return [*([*[self.placeholder_id] * columns, row_end] * rows)[:-1], image_end]

    def check(self, codec: "TokenizerCodec") -> None:
        """Raise :class:`ModelFolderError` for a tokenizer without one of the three tokens."""
        Family.check(self, codec)
        for text in (BREAK, END):
            special_id(codec, text)

    def _grid(self, width: int, height: int) -> tuple[int, int]:
        check_size(width, height)
        ratio = max(width / self.longest, height / self.longest)
        if ratio > 1:
            width, height = math.floor(width / ratio), math.floor(height / ratio)
        if width < 1 or height < 1:
            raise ImageSizeError("nothing would be left of the image's shorter side")
        return (width - 1) // self.unit + 1, (height - 1) // self.unit + 1


def load(folder: Path, config: dict[str, Any], limits: ProcessorLimits | None) -> Pixtral | None:
    """Return the family of a folder, ``None`` with a tokenizer of Mistral's own.

    Raises :class:`ModelFolderError` where files contradict each other.
    """
    if any(True for pattern in OWN_TOKENIZERS for _ in folder.glob(pattern)):
        return None
    return read_geometry(folder, config, limits)


def read_geometry(folder: Path, config: dict[str, Any], limits: ProcessorLimits | None) -> Pixtral:
    """Return the family of a folder in Hugging Face's format, whatever its tokenizer.

    Raises :class:`ModelFolderError` where files contradict each other.
    """
    name, file = str(config["model_type"]), str(folder / "config.json")
    refuse_options(limits, "min_pixels", "max_pixels", "num_crops", family=name)
    vision = config.get("vision_config")
    if not isinstance(vision, dict) or vision.get("model_type", "pixtral") != "pixtral":
        raise ModelFolderError(f"{file}: vision_config must be that of a Pixtral tower")
    merge = whole_number(file, config, "spatial_merge_size", 2) if name == "mistral3" else 1
    patch = whole_number(file, vision, "patch_size", 16)
    processor_file, values = image_processor(folder)
    if values.get("do_resize") is False:
        raise ModelFolderError(f"{processor_file}: do_resize false is not modelled")
    written = find_json(folder, "processor_config.json") or {}
    stated = written.get("patch_size", 16), written.get("spatial_merge_size", 1)
    if stated != (patch, merge):
        raise ModelFolderError(
            f"{folder / 'processor_config.json'}: patch_size and spatial_merge_size {stated} are not those of"
            f" config.json {(patch, merge)}"
        )
    longest = whole_number(processor_file, values.get("size") or {}, "longest_edge", 1024)
    if name != "mistral3" and longest != whole_number(file, vision, "image_size", 1024):
        raise ModelFolderError(f"{processor_file}: longest_edge {longest} is not config.json's image_size")
    key = "image_token_id" if "image_token_id" in config else "image_token_index"
    return Pixtral(name, whole_number(file, config, key, 10), patch * merge, longest)


register("mistral3", load, proved_on=("vllm", "sglang"))
