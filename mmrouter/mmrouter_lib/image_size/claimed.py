"""AVIF and JPEG 2000, whose pixels only a decoder knows: the size that the header claims."""

import struct

from mmrouter_lib.image_size.reader_base import MAX_STEPS, ImageHeaderError, ImageSize, TooManyPixels

_AVIF_BRANDS = (b"avif", b"avis")
_JP2_SIGNATURE = b"\x00\x00\x00\x0cjP  \r\n\x87\n"
_J2K_SIGNATURE = b"\xff\x4f\xff\x51"  # start of codestream, then the marker of the segment that holds the size

_HEADER_BYTES = 1 << 20  # where a size is looked for: boxes of metadata stand in front of the pixels


def claimed_size(data: bytes, *, max_pixels: int) -> ImageSize | None:
    """Return the size that the header of an AVIF or JPEG 2000 image claims, ``None`` for bytes of any other format.

    The claim is good enough for a pixel limit and an estimate of tokens. The processor may see another size: a decoder
    applies rotation, mirroring and cropping or not, by its version. Images of these formats are served, not predicted.
    Of several sizes (an AVIF has one for each item: colour, alpha, tiles, thumbnail) the largest counts.
    Raises :class:`ImageHeaderError` for a header without a size, :class:`TooManyPixels` above ``max_pixels``.
    """
    head = data[:_HEADER_BYTES]
    if head[4:8] == b"ftyp" and head[8:12] in _AVIF_BRANDS:
        name, sizes = "AVIF", _box_sizes(head, b"ispe", skip=4)  # four bytes of version and flags come first
    elif head.startswith(_JP2_SIGNATURE):
        name, sizes = "JPEG 2000", [(width, height) for height, width in _box_sizes(head, b"ihdr")]
    elif head.startswith(_J2K_SIGNATURE):
        name, sizes = "JPEG 2000", []
        if len(head) >= 24:  # the image area on the reference grid: its end less its offset, per axis
            end_x, end_y, offset_x, offset_y = struct.unpack_from(">IIII", head, 8)
            sizes = [(end_x - offset_x, end_y - offset_y)]
    else:
        return None
    if not sizes or min(min(size) for size in sizes) < 1:
        raise ImageHeaderError(f"the {name} header gives no size")
    width, height = max(sizes, key=lambda size: size[0] * size[1])
    if width * height > max_pixels:
        raise TooManyPixels(f"{width}x{height} pixels are more than the {max_pixels} allowed")
    return ImageSize(width, height, name)


def _box_sizes(head: bytes, box: bytes, skip: int = 0) -> list[tuple[int, int]]:
    """Return the sizes in every box of a kind. A chance match in other bytes only makes the claim larger."""
    sizes: list[tuple[int, int]] = []
    at = head.find(box)
    while at >= 0:
        if len(sizes) == MAX_STEPS:
            raise ImageHeaderError(f"the header gives more than {MAX_STEPS} sizes")
        start = at + len(box) + skip
        if start + 8 <= len(head):
            first, second = struct.unpack_from(">II", head, start)
            sizes.append((first, second))
        at = head.find(box, at + 1)
    return sizes
