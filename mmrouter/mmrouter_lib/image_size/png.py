"""PNG: all chunks, because metadata may stand behind the pixels."""

import re
import struct
import zlib

from mmrouter_lib.image_size.reader_base import Header, ImageHeaderError, read_metadata

_KIND = re.compile(rb"\w{4}")
_MAX_CHUNKS = 32_768  # a PNG of 20 MB has 2,560 chunks of the usual 8 KiB
_MAX_TEXTS = 8  # texts that can hold an orientation; writers write one
_MAX_TEXT = 1 << 20  # Pillow refuses longer compressed texts, so a longer one never has an orientation
_XMP, _PROFILE, _EXIF, _PACKET = b"XML:com.adobe.xmp", b"Raw profile type exif", b"exif", b"xmp"
_NAMED = frozenset((_XMP, _PROFILE, _EXIF, _PACKET))
"""Names of texts in which Pillow looks for an orientation, in any kind of text chunk."""

Named = dict[bytes, bytes | None]
"""Name -> its last text; ``None``: Pillow cannot use the text, so the image is not rotated."""


def read(data: bytes, exif: bool) -> Header:
    """Walk the chunks; only those that can hold an orientation are read."""
    header, named, texts = Header(), Named(), 0
    at, end, pixels, animated = 8, len(data), False, False
    for _ in range(_MAX_CHUNKS):
        if at + 8 > end:
            break
        length, kind = struct.unpack_from(">I4s", data, at)
        if _KIND.match(kind) is None:  # Pillow reads nothing behind a chunk that is none
            break
        if kind == b"IHDR" and not pixels:
            header.width, header.height = struct.unpack_from(">II", data, at + 8)
        elif kind == b"IDAT":
            if not exif:
                break
            pixels = True
        elif kind == b"eXIf" and exif:
            named[_EXIF] = read_metadata(data, at + 8, at + 8 + length)
        elif kind in (b"tEXt", b"zTXt", b"iTXt") and exif:
            # A keyword is at most 79 bytes long.
            keyword = data[at + 8 : at + 8 + min(length, 80)].partition(b"\0")[0]
            if keyword in _NAMED:
                texts += 1
                if texts > _MAX_TEXTS:
                    raise ImageHeaderError(f"more than {_MAX_TEXTS} texts with an orientation")
                rest = read_metadata(data, at + 9 + len(keyword), at + 8 + length)
                if kind == b"iTXt":
                    _add_international(named, keyword, rest)
                elif kind == b"zTXt":
                    _add(named, keyword, _inflated(rest[1:]) or b"")
                elif keyword == _EXIF:
                    named[keyword] = rest
                else:
                    _add(named, keyword, rest)
        elif kind == b"acTL":
            animated = True
        elif kind == b"IEND" or (kind == b"fcTL" and animated and pixels):
            break
        at += 12 + length
    else:
        raise ImageHeaderError(f"more than {_MAX_CHUNKS} chunks")
    header.exif, header.xmp = _metadata(named)
    return header


def _add(named: Named, keyword: bytes, text: bytes) -> None:
    """Keep a text of a chunk, which is no bytes to Pillow."""
    named[keyword] = text if keyword in (_XMP, _PROFILE) else None


def _add_international(named: Named, keyword: bytes, rest: bytes) -> None:
    """Keep the text of an iTXt chunk: compression flag and method, language, translated keyword, text."""
    parts = rest[2:].split(b"\0", 2)
    if len(parts) < 3:
        return
    if rest[0]:
        inflated = None if rest[1] else _inflated(parts[2])
        if inflated is None:
            return
        parts[2] = inflated
    if keyword == _XMP:
        named[_PACKET] = parts[2]
    try:
        for part in parts:
            part.decode()
    except UnicodeDecodeError:
        return
    _add(named, keyword, parts[2])


def _inflated(data: bytes) -> bytes | None:
    try:
        return zlib.decompressobj().decompress(data, _MAX_TEXT)
    except zlib.error:
        return None


def _metadata(named: Named) -> tuple[bytes, bytes]:
    """Return the EXIF structure and the XMP packet that decide; both empty where the engine leaves the image alone."""
    exif, profile = named.get(_EXIF, b""), named.get(_PROFILE)
    if exif is None:
        return b"", b""
    if _EXIF not in named and profile is not None:
        try:
            # ImageMagick's text form: three lines of label and length, then hexadecimal.
            exif = bytes.fromhex("".join(profile.decode("latin-1").split("\n")[3:]))
        except ValueError:
            return b"", b""
    return exif, named.get(_XMP) or named.get(_PACKET) or b""
