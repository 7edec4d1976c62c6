"""Formats that engines decode and whose pixels only their decoder knows: AVIF and JPEG 2000.

Their headers claim a size, which is good enough for a pixel limit and for an estimate of the tokens. What the processor
sees may differ: rotation, mirroring and cropping are properties that a decoder applies or not, by its version. Images
of these formats are therefore served and never predicted.
"""

import struct

from mmrouter_lib.image_size import ImageHeaderError, ImageSize, TooManyPixels

_AVIF_BRANDS = (b"avif", b"avis")
_JP2_SIGNATURE = b"\x00\x00\x00\x0cjP  \r\n\x87\n"
_J2K_SIGNATURE = b"\xff\x4f\xff\x51"
"""Start of codestream, then the marker of the segment that holds the size."""

_HEADER_BYTES = 1 << 20
"""Where a size is looked for: boxes of metadata stand in front of the pixels."""


def claimed_size(data: bytes, *, max_pixels: int) -> ImageSize | None:
    """Return the size that the header of an AVIF or JPEG 2000 image claims, ``None`` for bytes of any other format.

    Of several sizes (an AVIF has one for each of its items: colour, alpha, tiles, thumbnail) the largest counts.
    Raises :class:`~mmrouter_lib.image_size.ImageHeaderError` for a header without a size,
    :class:`~mmrouter_lib.image_size.TooManyPixels` when width times height is above ``max_pixels``.
    """
    head = data[:_HEADER_BYTES]
    if head[4:8] == b"ftyp" and head[8:12] in _AVIF_BRANDS:
        name, sizes = "AVIF", _sizes(head, b"ispe", ">II", skip=4)  # four bytes of version and flags come first
    elif head.startswith(_JP2_SIGNATURE):
        name, sizes = "JPEG 2000", [(width, height) for height, width in _sizes(head, b"ihdr", ">II")]
    elif head.startswith(_J2K_SIGNATURE):
        name, sizes = "JPEG 2000", _codestream_size(head)
    else:
        return None
    if not sizes or min(min(size) for size in sizes) < 1:
        raise ImageHeaderError(f"the {name} header gives no size")
    width, height = max(sizes, key=lambda size: size[0] * size[1])
    if width * height > max_pixels:
        raise TooManyPixels(f"{width}x{height} pixels are more than the {max_pixels} allowed")
    return ImageSize(width, height, name)


def _sizes(head: bytes, box: bytes, layout: str, skip: int = 0) -> list[tuple[int, int]]:
    """Return what every box of a kind says. A chance match in other bytes only makes the claim larger."""
    found: list[tuple[int, int]] = []
    at = head.find(box)
    while at >= 0:
        start = at + len(box) + skip
        if start + struct.calcsize(layout) <= len(head):
            first, second = struct.unpack_from(layout, head, start)
            found.append((first, second))
        at = head.find(box, at + 1)
    return found


def _codestream_size(head: bytes) -> list[tuple[int, int]]:
    """The image area on the reference grid: its end less its offset, per axis."""
    if len(head) < 24:
        return []
    end_x, end_y, offset_x, offset_y = struct.unpack_from(">IIII", head, 8)
    return [(end_x - offset_x, end_y - offset_y)]
