"""InternVL 3 and 3.5 in Hugging Face's format: square tiles and, beside several, the whole picture as one more.

Covers ``internvl`` (the checkpoints named ``-hf``). Each tile has as many tokens, and the image one token in front and
one behind. The grid is that of transformers 5.19 (``GotOcr2ImageProcessor``): the ratio of its sides is closest to the
image's, and of equally close ones the last that is not more than twice the image's area. The authors' own format is
``internvl_chat.py``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from mmrouter_lib.families.base.family import (
    Family,
    ProcessorLimits,
    PromptImage,
    placeholder_run,
    refuse_options,
    register,
)
from mmrouter_lib.families.base.layout import check_size, special_id
from mmrouter_lib.model_folder import ModelFolderError, find_json, image_processor, whole_number

if TYPE_CHECKING:
    from mmrouter_lib.prompt.tokenizer import TokenizerCodec

MODEL_TYPE = "internvl"
BEGIN, END = "<img>", "</img>"


@dataclass(frozen=True, slots=True)
class InternVL(Family):
    """An InternVL folder. ``tile`` is a tile's side in pixels, ``tile_tokens`` what it becomes; ``least`` and ``most``
    limit the tiles of an image, the whole picture apart.
    """

    placeholder_id: int
    tile: int
    tile_tokens: int
    least: int
    most: int
    placeholder_text: str = "<IMG_CONTEXT>"
    name: str = MODEL_TYPE
    media_text: ClassVar[Mapping[str, str]] = MappingProxyType({"image": "<IMG_CONTEXT>", "video": "<video>"})

    def count(self, width: int, height: int) -> int:
        """Return the tokens of all tiles and the two around them. Raises :class:`ImageSizeError` for no pixels."""
        check_size(width, height)
        columns, rows = grid(width, height, self.tile, self.least, self.most)
        tiles = columns * rows
        return (tiles + (tiles > 1)) * self.tile_tokens + 2

    def tokens(self, codec: "TokenizerCodec", image: PromptImage, number: int) -> Sequence[int]:
        """Return the image's placeholders between begin and end."""
        run = placeholder_run("I", self.placeholder_id, number, image)
        return [special_id(codec, BEGIN), *run[2:], special_id(codec, END)]

    def check(self, codec: "TokenizerCodec") -> None:
        """Raise :class:`ModelFolderError` for a tokenizer without one of the three tokens."""
        Family.check(self, codec)
        for text in (BEGIN, END):
            special_id(codec, text)


def grid(width: int, height: int, tile: int, least: int, most: int) -> tuple[int, int]:
    """Return the (columns, rows) of tiles that an image is cut into."""
    ratio, area = width / height, width * height
    best, closest = (1, 1), float("inf")
    for columns, rows in _grids(least, most):
        distance = abs(ratio - columns / rows)
        if distance < closest or (distance == closest and area > 0.5 * tile * tile * columns * rows):
            best, closest = (columns, rows), distance
    return best


@lru_cache(maxsize=8)
def _grids(least: int, most: int) -> list[tuple[int, int]]:
    sides = range(1, most + 1)
    pairs = [(columns, rows) for columns in sides for rows in sides if least <= columns * rows <= most]
    return sorted(pairs, key=lambda pair: pair[0] * pair[1])


def tile_tokens(file: str, config: dict[str, Any], tile: int, patch: int) -> int:
    """Return the tokens of a tile by config.json's ``downsample_ratio``; ``tile`` and ``patch`` are sides in pixels.

    Raises :class:`ModelFolderError` for a ratio that leaves none.
    """
    ratio = config.get("downsample_ratio")
    if not isinstance(ratio, float) or not 0 < ratio <= 1:
        raise ModelFolderError(f"{file}: downsample_ratio must be above 0 and at most 1, not {ratio!r}")
    tokens = int((tile // patch) ** 2 * ratio**2)
    if tokens < 1:
        raise ModelFolderError(f"{file}: a tile becomes no token")
    return tokens


def load(folder: Path, config: dict[str, Any], limits: ProcessorLimits | None) -> InternVL:
    """Return the family of a folder. Raises :class:`ModelFolderError` where its files contradict each other."""
    refuse_options(limits, "min_pixels", "max_pixels", "num_crops", family=MODEL_TYPE)
    file, (processor_file, values) = str(folder / "config.json"), image_processor(folder)
    if values.get("do_resize") is False:
        raise ModelFolderError(f"{processor_file}: do_resize false is not modelled")
    size = values.get("size") or {}
    sides = {whole_number(processor_file, size, key) for key in ("height", "width")}
    if len(sides) != 1:
        raise ModelFolderError(f"{processor_file}: size must be a square, not {size!r}")
    written = find_json(folder, "processor_config.json") or {}
    tokens = whole_number(str(folder / "processor_config.json"), written, "image_seq_length", 256)
    if whole_number(file, config, "image_seq_length", 256) != tokens:
        raise ModelFolderError(f"{folder / 'processor_config.json'}: image_seq_length {tokens} is not config.json's")
    least = whole_number(processor_file, values, "min_patches", 1)
    most = whole_number(processor_file, values, "max_patches", 12)
    return InternVL(whole_number(file, config, "image_token_id", 151_667), sides.pop(), tokens, least, most)


register(MODEL_TYPE, load, proved_on=("vllm",))
