"""WebP: the canvas of the first chunk, and the metadata that only the extended form (VP8X) has."""

import struct

from mmrouter_lib.image_size.reader_base import MAX_STEPS, Header, ImageHeaderError, read_metadata

_EXIF, _XMP = 0x08, 0x04  # flags of an extended WebP; libwebp ignores a metadata chunk whose flag is not set


def read(data: bytes, exif: bool) -> Header:
    kind = data[12:16]
    if kind == b"VP8 " and data[23:26] == b"\x9d\x01\x2a":
        wide, high = struct.unpack_from("<HH", data, 26)
        return Header(wide & 0x3FFF, high & 0x3FFF)
    if kind == b"VP8L" and data[20:21] == b"\x2f":
        bits = struct.unpack_from("<I", data, 21)[0]
        return Header((bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1)
    if kind != b"VP8X" or len(data) < 30:
        raise ValueError("no VP8, VP8L or VP8X header")
    header = Header(int.from_bytes(data[24:27], "little") + 1, int.from_bytes(data[27:30], "little") + 1)
    flags = data[20]
    if not exif or not flags & (_EXIF | _XMP):
        return header
    at, end = 12, min(len(data), 8 + int.from_bytes(data[4:8], "little"))
    for _ in range(MAX_STEPS):
        if at + 8 > end:
            return header
        kind, length = struct.unpack_from("<4sI", data, at)
        if kind == b"EXIF" and flags & _EXIF and not header.exif:
            header.exif = read_metadata(data, at + 8, at + 8 + length)
        elif kind == b"XMP " and flags & _XMP and not header.xmp:
            header.xmp = read_metadata(data, at + 8, at + 8 + length)
        at += 8 + length + (length & 1)
    raise ImageHeaderError(f"more than {MAX_STEPS} chunks")
