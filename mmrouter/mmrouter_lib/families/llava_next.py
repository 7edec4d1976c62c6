"""LLaVA-NeXT: a small whole picture, and the image over a grid of pictures, without its padding, one newline per row.

The formulas are those of transformers 5.19 (``LlavaNextProcessor``) and vLLM 0.32 in double precision; the order of the
floating-point operations is part of the rule.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmrouter_lib.families.base.clip import ClipFamily, load_tower
from mmrouter_lib.families.base.family import ImageSizeError, ProcessorLimits
from mmrouter_lib.families.base.registry import register
from mmrouter_lib.model_folder import ModelFolderError, image_processor

MODEL_TYPE = "llava_next"
DEFAULT_PINPOINTS = ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))


@dataclass(frozen=True, slots=True)
class LlavaNext(ClipFamily):
    """A LLaVA-NeXT folder. ``pinpoints`` are (height, width) in pixels, in the order in which ties are decided."""

    placeholder_id: int
    placeholder_text: str
    base_tokens: int
    image_size: int
    grid: int
    pinpoints: tuple[tuple[int, int], ...]
    name: str = MODEL_TYPE

    def count(self, width: int, height: int) -> int:
        """Return the number of placeholder tokens: whole picture + rows x columns of the grid + one per row."""
        if width < 1 or height < 1:
            raise ImageSizeError(f"an image of {width}x{height} pixels is empty")
        best_high, best_wide = best_pinpoint(width, height, self.pinpoints)
        rows, columns = unpadded(
            width, height, self.grid * (best_wide // self.image_size), self.grid * (best_high // self.image_size)
        )
        return self.base_tokens + rows * columns + rows


def best_pinpoint(width: int, height: int, pinpoints: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Return the (height, width) that keeps most of the image's pixels, then wastes least; of equal ones the first."""

    def fit(pinpoint: tuple[int, int]) -> tuple[int, int]:
        high, wide = pinpoint
        scale = min(wide / width, high / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        return kept, kept - wide * high

    return max(pinpoints, key=fit)


def unpadded(width: int, height: int, columns: int, rows: int) -> tuple[int, int]:
    """Return the (rows, columns) of patches that are left of a grid when the padding on both sides is cut off.

    The image's own length is truncated to whole patches, after rounding at the seventh digit.
    """
    if width / height > columns / rows:
        used = int(round(height * (columns / width), 7))
        return rows - (rows - used) // 2 * 2, columns
    used = int(round(width * (rows / height), 7))
    return rows, columns - (columns - used) // 2 * 2


def load(folder: Path, config: dict[str, Any], limits: ProcessorLimits | None) -> LlavaNext | None:
    """Return the family of a folder, ``None`` where its vision tower is not CLIP. Raises :class:`ModelFolderError`."""
    tower = load_tower(folder, config, limits)
    if tower is None:
        return None
    file, values = image_processor(folder)
    pinpoints = _pinpoints(str(folder / "config.json"), config, tower.image_size)
    if _pinpoints(file, values, tower.image_size) != pinpoints:
        raise ModelFolderError(f"{file}: image_grid_pinpoints are not those of config.json")
    return LlavaNext(
        placeholder_id=tower.placeholder_id,
        placeholder_text=tower.placeholder_text,
        base_tokens=tower.base_tokens,
        image_size=tower.image_size,
        grid=tower.grid,
        pinpoints=pinpoints,
    )


def _pinpoints(file: str, values: dict[str, Any], side: int) -> tuple[tuple[int, int], ...]:
    value = values.get("image_grid_pinpoints")
    if value is None:
        return DEFAULT_PINPOINTS
    pairs = [tuple(pair) if isinstance(pair, list) else () for pair in value] if isinstance(value, list) else []
    if not pairs or not all(len(pair) == 2 and all(_is_multiple(length, side) for length in pair) for pair in pairs):
        raise ModelFolderError(
            f"{file}: image_grid_pinpoints must be pairs (height, width) of multiples of {side}, not {value!r}"
        )
    return tuple((high, wide) for high, wide in pairs)


def _is_multiple(value: object, side: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0 and value % side == 0


register(MODEL_TYPE, load, proved_on=("vllm",))
