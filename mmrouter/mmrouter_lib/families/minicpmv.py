"""MiniCPM-V 4.6: the whole picture, then slices of a large one in rows, each between tokens of its own.

Covers ``minicpmv4_6``. Before an image stands its number among the request's images, as text. The geometry is that of
transformers 5.19 (``MiniCPMV4_6ImageProcessor``): as many slices as cover the image's area, up to a limit, or one more
or less, in the grid whose shape is closest to the image's.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from mmrouter_lib.families.base.family import Family, ProcessorLimits, PromptImage, refuse_options, register
from mmrouter_lib.families.base.layout import check_size, size_of
from mmrouter_lib.model_folder import ModelFolderError, image_processor, whole_number

if TYPE_CHECKING:
    from mmrouter_lib.prompt.tokenizer import TokenizerCodec

MODEL_TYPE = "minicpmv4_6"
IMAGE = "<|image_pad|>"
_MERGED = 4  # sides of merged squares, in patches: two merges of 2x2


@dataclass(frozen=True, slots=True)
class MiniCPMV(Family):
    """A MiniCPM-V 4.6 folder. ``patch_size`` and ``slice_side`` are in pixels, ``most`` is the greatest number of
    slices, ``merged`` the patches of one token.
    """

    placeholder_id: int
    patch_size: int
    slice_side: int
    most: int
    merged: int
    placeholder_text: str = IMAGE
    name: str = MODEL_TYPE
    media_text: ClassVar[Mapping[str, str]] = MappingProxyType({"image": IMAGE, "video": "<|video_pad|>"})

    @property
    def may_have_states(self) -> bool:
        return True  # its language model is that of Qwen3.5

    def count(self, width: int, height: int) -> int:
        """Return the tokens of picture and slices and those around them. Raises :class:`ImageSizeError` for no pixels.

        An image's number and the line feed between rows count as one token each.
        """
        check_size(width, height)
        rows, columns, whole, each = self._layout(width, height)
        between = rows - 1 if rows else 0
        return 3 + whole + 2 + rows * columns * (each + 2) + between

    def tokens(self, codec: "TokenizerCodec", image: PromptImage, number: int) -> Sequence[int]:
        """Return an image's number, the whole picture and the rows of slices."""
        rows, columns, whole, each = self._layout(*size_of(image))

        def encode(text: str) -> Sequence[int]:
            return codec.encode(text, add_special_tokens=False)

        begin, end, next_slice = encode("<slice>"), encode("</slice>"), encode("</slice><slice>")
        next_row = encode("</slice>\n<slice>")
        out = [*encode(f"<image_id>{number}</image_id>"), *encode("<image>")]
        out += [*[self.placeholder_id] * whole, *encode("</image>")]
        if rows:
            out += begin
            for at in range(rows * columns):
                if at:
                    out += next_slice if at % columns else next_row
                out += [self.placeholder_id] * each
            out += end
        return out

    def _layout(self, width: int, height: int) -> tuple[int, int, int, int]:
        """Return rows and columns of slices, 0 without any, and the tokens of the whole picture and of each slice."""
        grid = self._grid(width, height)
        if grid is None:
            return 0, 0, self._tokens(*self._resized(width, height, enlarges=True)), 0
        rows, columns = grid
        whole = self._tokens(*self._resized(width, height))
        wide, high = near_multiple(width, columns) / columns, near_multiple(height, rows) / rows
        return rows, columns, whole, self._tokens(*self._resized(wide, high, enlarges=True))

    def _tokens(self, width: int, height: int) -> int:
        return width * height // (self.patch_size**2 * self.merged)

    def _resized(self, width: float, height: float, *, enlarges: bool = False) -> tuple[int, int]:
        if enlarges or width * height > self.slice_side**2:
            ratio = width / height
            height = int(self.slice_side / math.sqrt(ratio))
            width = int(height * ratio)
        unit = self.patch_size * _MERGED
        return near_multiple(width, unit), near_multiple(height, unit)

    def _grid(self, width: int, height: int) -> tuple[int, int] | None:
        """Return the (rows, columns) of slices, ``None`` for an image that becomes one picture."""
        covering = min(math.ceil(width * height / self.slice_side**2), self.most)
        if covering <= 1:
            return None
        shape, best, closest = math.log(width / height), (1, 1), math.inf
        for slices in (covering - 1, covering, covering + 1):
            if slices == 1 or slices > self.most:
                continue
            for rows in (rows for rows in range(1, slices + 1) if slices % rows == 0):
                distance = abs(shape - math.log(slices // rows / rows))
                if distance < closest or (distance == closest and rows > best[0]):
                    best, closest = (rows, slices // rows), distance
        return best


def near_multiple(length: float, unit: int) -> int:
    """Return the multiple of ``unit`` nearest to a length, half to even, at least one."""
    return max(round(length / unit) * unit, unit)


def load(folder: Path, config: dict[str, Any], limits: ProcessorLimits | None) -> MiniCPMV:
    """Return the family of a folder. Raises :class:`ModelFolderError` for a geometry that is not modelled."""
    refuse_options(limits, "min_pixels", "max_pixels", "num_crops", family=MODEL_TYPE)
    file, values = image_processor(folder)
    for key in ("do_resize", "slice_mode"):
        if values.get(key) is False:
            raise ModelFolderError(f"{file}: {key} false is not modelled")
    sides = {"16x": 16, "4x": 4}
    mode = values.get("downsample_mode", "16x")
    if mode not in sides:
        raise ModelFolderError(f"{file}: downsample_mode must be 4x or 16x, not {mode!r}")
    patch, side, most = (
        whole_number(file, values, key, default)
        for key, default in (("patch_size", 14), ("scale_resolution", 448), ("max_slice_nums", 9))
    )
    image = whole_number(str(folder / "config.json"), config, "image_token_id")
    return MiniCPMV(image, patch, side, most, sides[mode])


register(MODEL_TYPE, load, proved_on=("vllm",))
