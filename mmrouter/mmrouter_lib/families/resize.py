"""The resize rule of the Qwen-VL image processors.

Formula: facts on routing 2.3, as ``smart_resize`` of transformers 5.19 computes it in double precision; the order of
the floating-point operations is part of the rule, because a last bit decides a floor or a ceiling.
"""

import math

from mmrouter_lib.families.family import ImageSizeError

MAX_ASPECT = 200


def smart_resize(width: int, height: int, *, unit: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """Return the (width, height) in pixels that an image is resized to: multiples of ``unit`` near its own shape.

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
