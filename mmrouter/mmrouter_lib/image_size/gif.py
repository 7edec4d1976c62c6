"""GIF: the screen, enlarged to the first frame, as Pillow enlarges it."""

import struct

from mmrouter_lib.image_size.header import Header, Steps


def read(data: bytes, exif: bool) -> Header:
    """Skip the blocks in front of the first frame. A GIF has no orientation."""
    header, steps = Header(*struct.unpack_from("<HH", data, 6)), Steps("blocks")
    at = 13 + _palette(data[10])
    while (introducer := data[at]) != 0x3B:
        steps.take()
        at += 1
        if introducer == 0x21:
            at = _skip_blocks(data, at + 1, steps)
        elif introducer == 0x2C:
            left, top, width, height, flags = struct.unpack_from("<HHHHB", data, at)
            _ = data[at + 9 + _palette(flags)]  # the code size stands before the pixels
            header.width, header.height = max(header.width, left + width), max(header.height, top + height)
            return header
    raise ValueError("a GIF without a frame")


def _palette(flags: int) -> int:
    """Return the bytes of the palette that a flag announces."""
    return 3 << ((flags & 7) + 1) if flags & 0x80 else 0


def _skip_blocks(data: bytes, at: int, steps: Steps) -> int:
    """Return where the blocks of an extension end. Their length is a byte, 0 at the end."""
    while at < len(data) and (length := data[at]):
        steps.take()
        at += 1 + length
    return at + 1
