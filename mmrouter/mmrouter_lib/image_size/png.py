"""PNG: all chunks, because metadata may stand behind the pixels."""

import struct
import zlib

from mmrouter_lib.image_size.header import Header, ImageHeaderError, read_metadata

_MAX_CHUNKS = 32_768  # a PNG of 20 MB has 2,560 chunks of the usual 8 KiB
_MAX_TEXTS = 8  # texts that can hold an orientation; writers write one
_MAX_TEXT = 1 << 20  # Pillow refuses longer compressed texts, so a longer one never has an orientation
_XMP, _PROFILE = b"XML:com.adobe.xmp", b"Raw profile type exif"


def read(data: bytes, exif: bool) -> Header:
    """Walk the chunks; only those that can hold an orientation are read."""
    header, profile, texts = Header(), b"", 0
    at, end, pixels, animated = 8, len(data), False, False
    for _ in range(_MAX_CHUNKS):
        if at + 8 > end:
            break
        length, kind = struct.unpack_from(">I4s", data, at)
        if kind == b"IHDR" and not pixels:
            header.width, header.height = struct.unpack_from(">II", data, at + 8)
        elif kind == b"IDAT":
            if not exif:
                break
            pixels = True
        elif kind == b"eXIf":
            header.exif = read_metadata(data, at + 8, at + 8 + length)
        elif kind in (b"tEXt", b"zTXt", b"iTXt"):
            # A keyword is at most 79 bytes long.
            keyword = data[at + 8 : at + 8 + min(length, 80)].partition(b"\0")[0]
            if keyword in (_XMP, _PROFILE):
                texts += 1
                if texts > _MAX_TEXTS:
                    raise ImageHeaderError(f"more than {_MAX_TEXTS} texts with an orientation")
                text = _text(kind, read_metadata(data, at + 9 + len(keyword), at + 8 + length))
                if keyword == _XMP:
                    header.xmp = text
                else:
                    profile = text
        elif kind == b"acTL":
            animated = True
        elif kind == b"IEND" or (kind == b"fcTL" and animated and pixels):
            break
        at += 12 + length
    else:
        raise ImageHeaderError(f"more than {_MAX_CHUNKS} chunks")
    if exif and profile and not header.exif:
        try:
            # ImageMagick's text form: three lines of label and length, then hexadecimal.
            digits = "".join(profile.decode("latin-1").split("\n", 3)[3:])
            header.exif = bytes.fromhex(digits.replace("\n", ""))
        except ValueError:
            header.xmp = b""  # a broken EXIF: the engine leaves the image unrotated
    return header


def _text(kind: bytes, rest: bytes) -> bytes:
    """Return the text of a chunk behind its keyword, empty where it cannot be read."""
    if kind == b"tEXt":
        return rest
    compressed = kind == b"zTXt" or rest[:1] != b"\0"
    rest = rest[1:] if kind == b"zTXt" else rest[2:].split(b"\0", 2)[-1]
    if not compressed:
        return rest
    try:
        return zlib.decompressobj().decompress(rest, _MAX_TEXT)
    except zlib.error:
        return b""
