"""LLaVA-NeXT: the picture of LLaVA-1.5, and the image over a grid of pictures without its padding, a newline per row.

Its formulas are those of transformers 5.19 (``LlavaNextProcessor``) and vLLM 0.32 in double precision; the order of the
floating-point operations is part of the rule.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mmrouter_lib.families import llava
from mmrouter_lib.families.base.family import ProcessorLimits, register
from mmrouter_lib.families.llava import Llava
from mmrouter_lib.model_folder import ModelFolderError, image_processor

DEFAULT_PINPOINTS = ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))


@dataclass(frozen=True, slots=True)
class LlavaNext(Llava):
    """A LLaVA-NeXT folder. ``pinpoints`` are (height, width) in pixels, in the order in which ties are decided."""

    pinpoints: tuple[tuple[int, int], ...] = DEFAULT_PINPOINTS

    def count(self, width: int, height: int) -> int:
        """Return the number of placeholder tokens: whole picture + rows x columns of the grid + one per row."""
        whole = Llava.count(self, width, height)
        side = self.image_size // self.patch_size  # patches along one side of a picture
        high, wide = (pixels // self.image_size * side for pixels in best_pinpoint(width, height, self.pinpoints))
        rows, columns = unpadded(width, height, wide, high)
        return whole + rows * columns + rows


def best_pinpoint(width: int, height: int, pinpoints: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Return the (height, width) that keeps most of the image's pixels, then wastes least; of equal ones the first."""

    def fit(pinpoint: tuple[int, int]) -> tuple[int, int]:
        high, wide = pinpoint
        scale = min(wide / width, high / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        return kept, kept - wide * high

    return max(pinpoints, key=fit)


def rounded(length: float) -> int:
    """Truncate a length to whole patches, after rounding at the seventh digit."""
    return int(round(length, 7))


def unpadded(
    width: int, height: int, columns: int, rows: int, truncated: Callable[[float], int] = rounded
) -> tuple[int, int]:
    """Return the (rows, columns) of patches that are left of a grid when the padding on both sides is cut off.

    ``truncated``: the whole patches of the image's own length.
    """
    if width / height > columns / rows:
        used = truncated(height * (columns / width))
        return rows - (rows - used) // 2 * 2, columns
    used = truncated(width * (rows / height))
    return rows, columns - (columns - used) // 2 * 2


def load(folder: Path, config: dict[str, Any], limits: ProcessorLimits | None) -> LlavaNext | None:
    """Return the family of a folder, ``None`` where its vision tower is not CLIP. Raises :class:`ModelFolderError`."""
    if (whole := llava.load(folder, config, limits)) is None:
        return None
    processor_file, values = image_processor(folder)
    pinpoints = _pinpoints(str(folder / "config.json"), config, whole.image_size)
    if _pinpoints(processor_file, values, whole.image_size) != pinpoints:
        raise ModelFolderError(f"{processor_file}: image_grid_pinpoints are not those of config.json")
    return LlavaNext(**asdict(whole), pinpoints=pinpoints)


def _pinpoints(file: str, values: dict[str, Any], side: int) -> tuple[tuple[int, int], ...]:
    if (value := values.get("image_grid_pinpoints")) is None:
        return DEFAULT_PINPOINTS
    pairs = [tuple(pair) if isinstance(pair, list) else () for pair in value] if isinstance(value, list) else []
    if not pairs or not all(len(pair) == 2 and all(_is_multiple(length, side) for length in pair) for pair in pairs):
        raise ModelFolderError(
            f"{file}: image_grid_pinpoints must be pairs (height, width) of multiples of {side}, not {value!r}"
        )
    return tuple((high, wide) for high, wide in pairs)


def _is_multiple(value: object, side: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0 and value % side == 0


# SGLang expands its placeholders as it does those of LLaVA-1.5.
register("llava_next", load, proved_on=("vllm",))
