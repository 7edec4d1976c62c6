"""Llama 4: an image is a grid of square tiles, with separators between them, and the whole picture behind them.

Covers ``llama4`` (Scout, Maverick). An image that fits one tile has the whole picture only. The grid is that of
transformers 5.19 (``Llama4ImageProcessor``) as vLLM 0.32 calls it: the least enlargement that some grid offers, else
the least reduction, and of the grids that offer it the smallest. Scales are compared in single precision, as there.
"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from mmrouter_lib.families.base.family import Family, ProcessorLimits, PromptImage, refuse_options, register
from mmrouter_lib.families.base.layout import check_size, size_of, special_id
from mmrouter_lib.model_folder import ModelFolderError, added_token_id, image_processor, vision_config, whole_number

if TYPE_CHECKING:
    from mmrouter_lib.prompt.tokenizer import TokenizerCodec

MODEL_TYPE = "llama4"
IMAGE = "<|image|>"
BEGIN, END, PATCH, BETWEEN, ROW = (
    *("<|image_start|>", "<|image_end|>", "<|patch|>", "<|tile_x_separator|>"),
    "<|tile_y_separator|>",
)


@dataclass(frozen=True, slots=True)
class Llama4(Family):
    """A Llama 4 folder. ``tile`` is a tile's side in pixels, ``tile_tokens`` what it becomes, ``most`` the greatest
    number of tiles; ``enlarges``: whether the largest grid is taken and not the closest.
    """

    placeholder_id: int
    tile: int
    tile_tokens: int
    most: int
    enlarges: bool = False
    placeholder_text: str = IMAGE
    name: str = MODEL_TYPE
    media_text: ClassVar[Mapping[str, str]] = MappingProxyType({"image": IMAGE})

    def count(self, width: int, height: int) -> int:
        """Return the tokens of tiles, separators and whole picture. Raises :class:`ImageSizeError` for no pixels."""
        rows, columns = self._grid(width, height)
        tiles = rows * columns
        separated = tiles * (self.tile_tokens + 1) if tiles > 1 else 0  # each tile has one behind it
        return separated + self.tile_tokens + 3

    def tokens(self, codec: "TokenizerCodec", image: PromptImage, number: int) -> Sequence[int]:
        """Return the rows of tiles of an image, then the whole picture."""
        rows, columns = self._grid(*size_of(image))
        begin, end, patch, between, row = (special_id(codec, text) for text in (BEGIN, END, PATCH, BETWEEN, ROW))
        tile = [patch] * self.tile_tokens
        line = [*[*tile, between] * (columns - 1), *tile, row]
        grid = line * rows if rows * columns > 1 else []
        return [begin, *grid, self.placeholder_id, *tile, end]

    def check(self, codec: "TokenizerCodec") -> None:
        """Raise :class:`ModelFolderError` for a tokenizer without one of the tokens of images."""
        Family.check(self, codec)
        for text in (BEGIN, END, PATCH, BETWEEN, ROW):
            special_id(codec, text)

    def _grid(self, width: int, height: int) -> tuple[int, int]:
        check_size(width, height)
        sides = range(1, self.most + 1)
        grids = [(rows, columns) for rows in sides for columns in sides if rows * columns <= self.most]

        def scale(grid: tuple[int, int]) -> float:
            return min(single(grid[0] * self.tile / height), single(grid[1] * self.tile / width))

        scales = {grid: scale(grid) for grid in grids}
        enlarging = [each for each in scales.values() if each >= 1]
        chosen = (max if self.enlarges else min)(enlarging) if enlarging else max(scales.values())
        return min((grid for grid in grids if scales[grid] == chosen), key=lambda grid: grid[0] * grid[1])


def single(value: float) -> float:
    """Return the number of single precision nearest to a quotient of whole numbers."""
    nearest: float = struct.unpack("f", struct.pack("f", value))[0]
    return nearest


def load(folder: Path, config: dict[str, Any], limits: ProcessorLimits | None) -> Llama4:
    """Return the family of a folder. Raises :class:`ModelFolderError` where its files contradict each other."""
    refuse_options(limits, "min_pixels", "max_pixels", "num_crops", family=MODEL_TYPE)
    file, (processor_file, values) = str(folder / "config.json"), image_processor(folder)
    vision = vision_config(file, config)
    side, patch = (whole_number(file, vision, *pair) for pair in (("image_size", 448), ("patch_size", 14)))
    size = values.get("size") or {"height": 336, "width": 336}
    if size != {"height": side, "width": side} or side % patch:
        raise ModelFolderError(
            f"{processor_file}: size {size!r} must be the square of config.json's image_size {side}, whole patches"
        )
    ratio = vision.get("pixel_shuffle_ratio", 0.5)
    if not isinstance(ratio, float) or not 0 < ratio <= 1:
        raise ModelFolderError(f"{file}: pixel_shuffle_ratio must be above 0 and at most 1, not {ratio!r}")
    tokens = (side // patch) ** 2 // round(1 / ratio**2)
    image = added_token_id(folder, IMAGE)
    if image is None:
        raise ModelFolderError(f"{folder / 'tokenizer.json'}: the tokenizer has no token {IMAGE}")
    most = whole_number(processor_file, values, "max_patches", 16)
    return Llama4(image, side, tokens, most, values.get("resize_to_max_canvas") is True)


register(MODEL_TYPE, load, proved_on=("vllm",))
