"""Gemma 4: an image keeps its shape within a budget of soft tokens, between a begin and an end token. Audio, which only
folders with an audio tower take, has its place, but no modelled length.

Covers ``gemma4``. The count is that of vLLM 0.32 (``Gemma4ProcessingInfo``), which the image processor of transformers
5.19 shares: the largest picture of the image's shape within the budget whose sides are whole squares of patches.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from mmrouter_lib.block_keys import Span
from mmrouter_lib.families.base.family import (
    Expanded,
    Family,
    ProcessorLimits,
    PromptImage,
    placeholder_run,
    refuse_options,
    register,
)
from mmrouter_lib.families.base.layout import check_size
from mmrouter_lib.model_folder import ModelFolderError, image_processor, vision_config, whole_number

if TYPE_CHECKING:
    from mmrouter_lib.prompt.tokenizer import TokenizerCodec

MODEL_TYPE = "gemma4"


@dataclass(frozen=True, slots=True)
class Gemma4(Family):
    """A Gemma 4 folder. ``patch_size`` is in pixels, ``pool`` the side in patches of the square that becomes one token,
    ``most`` the greatest number of tokens of an image.
    """

    placeholder_id: int
    begin_id: int
    end_id: int
    patch_size: int
    pool: int
    most: int
    audio_id: int | None = None
    placeholder_text: str = "<|image|>"
    name: str = MODEL_TYPE
    audio_text: ClassVar[str] = "<|audio|>"
    media_text: ClassVar[Mapping[str, str]] = MappingProxyType(
        {"image": "<image_soft_token>", "video": "<|video|>", "audio": "<audio_soft_token>"}
    )

    def count(self, width: int, height: int) -> int:
        """Return the soft tokens of an image and the two around them. Raises :class:`ImageSizeError` for no pixels."""
        check_size(width, height)
        unit, patches = self.patch_size * self.pool, self.most * self.pool**2
        scale = math.sqrt(patches / ((height / self.patch_size) * (width / self.patch_size)))
        high, wide = (max(1, math.floor(side * scale / unit)) for side in (height, width))
        return min(high * wide, self.most) + 2

    def tokens(self, codec: "TokenizerCodec", image: PromptImage, number: int) -> Sequence[int]:
        """Return the image's soft tokens between begin and end, of audio its placeholder."""
        if image.modality == "audio":
            return Family.tokens(self, codec, image, number)
        return [self.begin_id, *placeholder_run("I", self.placeholder_id, number, image)[2:], self.end_id]

    def expand_text(
        self, codec: "TokenizerCodec", text: str, images: Sequence[PromptImage], *, add_special_tokens: bool
    ) -> Expanded:
        """As :meth:`Family.expand_text`: begin and end of an image stay as they are."""
        done = self.expand(codec, text, images, add_special_tokens=add_special_tokens)
        spans = (Span(offset=span.offset + 1, length=span.length - 2, identity=span.identity) for span in done.spans)
        return Expanded(ids=done.ids, spans=tuple(spans))


def load(folder: Path, config: dict[str, Any], limits: ProcessorLimits | None) -> Gemma4:
    """Return the family of a folder. Raises :class:`ModelFolderError` where its files contradict each other."""
    refuse_options(limits, "min_pixels", "max_pixels", "num_crops", family=MODEL_TYPE)
    file, (processor_file, values) = str(folder / "config.json"), image_processor(folder)
    vision = vision_config(file, config)
    if values.get("do_resize") is False:
        raise ModelFolderError(f"{processor_file}: do_resize false is not modelled")
    geometry = []
    for of_network, key, default in (
        ("patch_size", "patch_size", 16),
        ("pooling_kernel_size", "pooling_kernel_size", 3),
        ("default_output_length", "max_soft_tokens", 280),
    ):
        geometry.append(whole_number(file, vision, of_network, default))
        if whole_number(processor_file, values, key, default) != geometry[-1]:
            raise ModelFolderError(f"{processor_file}: {key} is not {geometry[-1]}, config.json's {of_network}")
    image, begin, end = (
        whole_number(file, config, f"{name}_token_id", default)
        for name, default in (("image", 258_880), ("boi", 255_999), ("eoi", 258_882))
    )
    audio = None if config.get("audio_config") is None else whole_number(file, config, "audio_token_id", 258_881)
    patch, pool, most = geometry
    return Gemma4(image, begin, end, patch, pool, most, audio)


register(MODEL_TYPE, load, proved_on=("vllm", "sglang"))
