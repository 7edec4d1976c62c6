"""GIF: the screen, enlarged to the first frame, as Pillow enlarges it."""

import struct

from mmrouter_lib.image_size.reader_base import MAX_STEPS, Header, ImageHeaderError


def read(data: bytes, exif: bool) -> Header:
    """Skip the blocks in front of the first frame. A GIF has no orientation."""
    header = Header(*struct.unpack_from("<HH", data, 6))
    at, in_extension = 13 + _palette(data[10]), False
    for _ in range(MAX_STEPS):
        byte = data[at]
        at += 1
        if in_extension:  # its blocks begin with their length, and end with an empty one
            in_extension = byte != 0
            at += byte
        elif byte == 0x21:
            in_extension = True
            at += 1
        elif byte == 0x2C:
            left, top, width, height, flags = struct.unpack_from("<HHHHB", data, at)
            _ = data[at + 9 + _palette(flags)]  # the code size stands before the pixels
            header.width, header.height = max(header.width, left + width), max(header.height, top + height)
            return header
        elif byte == 0x3B:
            raise ValueError("a GIF without a frame")
    raise ImageHeaderError(f"more than {MAX_STEPS} blocks")


def _palette(flags: int) -> int:
    """Return the bytes of the palette that a flag announces."""
    return 3 << ((flags & 7) + 1) if flags & 0x80 else 0
