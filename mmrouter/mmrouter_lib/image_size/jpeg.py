"""JPEG: the segments up to the first scan."""

import re
import struct

from mmrouter_lib.image_size.reader_base import MAX_METADATA, MAX_PADDING, MAX_STEPS, Header, ImageHeaderError

_PADDING = re.compile(rb"\xff{1,%d}+" % (MAX_PADDING + 1))


def read(data: bytes, exif: bool) -> Header:
    """Read the segments; the last frame header counts, as it does for Pillow, which also skips junk between them."""
    header, parts = Header(), list[bytes]()
    at, end, size = 2, len(data), 0
    for _ in range(MAX_STEPS):
        if at + 4 > end:
            break
        if data[at] != 0xFF:
            at = data.find(b"\xff", at)
            if at < 0:
                break
            continue
        marker = data[at + 1]
        if marker == 0xFF:
            padding = _PADDING.match(data, at)
            assert padding is not None
            if padding.end() - at > MAX_PADDING:
                raise ImageHeaderError("the header holds too much padding")
            at = padding.end() - 1
            continue
        if marker == 0 or 0xD0 <= marker <= 0xD9 or marker == 0xC8 or 0xF0 <= marker <= 0xFD:
            at += 2
            continue
        if marker == 0xDA:
            break
        if marker < 0xC0:
            raise ValueError(f"0x{marker:02x} is no marker")
        length = int.from_bytes(data[at + 2 : at + 4], "big")
        if marker == 0xE1 and exif:
            body = data[at + 4 : at + 2 + length]
            if body.startswith(b"Exif\0\0"):
                parts.append(body[6:] if parts else body)
                size += len(body)
                if size > MAX_METADATA:
                    raise ImageHeaderError(f"metadata of more than {MAX_METADATA} bytes")
            elif body.startswith(b"http://ns.adobe.com/xap/1.0/\0"):
                header.xmp = body.partition(b"\0")[2]
        elif marker not in (0xC4, 0xCC) and (0xC0 <= marker <= 0xCF or marker == 0xDE):
            header.height, header.width = struct.unpack_from(">HH", data, at + 5)
        at += 2 + max(length, 2)
    else:
        raise ImageHeaderError(f"more than {MAX_STEPS} segments")
    header.exif = b"".join(parts)
    return header
