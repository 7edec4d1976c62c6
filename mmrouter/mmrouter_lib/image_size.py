"""Read the size of an encoded image from its header, without decoding pixels or allocating a canvas.

Width and height equal those of Pillow, because the engines open images with Pillow. JPEG, PNG and WebP are scanned
here: Pillow decodes a whole PNG before it reads its EXIF, and allocates a WebP's canvas for its size. Pillow parses the
EXIF blob of every format, so that a malformed one gives the same result here and in the engine. AVIF and JPEG 2000,
whose pixels only a decoder knows, have a claimed size.
"""

import io
import re
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass

from PIL import Image, ImageFile
from PIL.BmpImagePlugin import BmpImageFile
from PIL.ExifTags import Base
from PIL.GifImagePlugin import GifImageFile
from PIL.TiffImagePlugin import TiffImageFile


class ImageHeaderError(ValueError):
    """Bytes that are no image of a known format, or whose header cannot be read."""


class TooManyPixels(ValueError):  # noqa: N818 - the name is part of the library's interface
    """The header claims more pixels than allowed."""


@dataclass(frozen=True, slots=True)
class ImageSize:
    """Width and height in pixels, and the name of the format."""

    width: int
    height: int
    format: str


@dataclass(slots=True)
class _Header:
    """Contents of a header before rotation: ``exif`` is a TIFF structure, ``xmp`` an XML packet."""

    width: int = 0
    height: int = 0
    exif: bytes = b""
    xmp: bytes = b""


_SWAPPED = (5, 6, 7, 8)  # EXIF orientations that exchange width and height

_WEBP_EXIF, _WEBP_XMP = 0x08, 0x04  # flags of an extended WebP; libwebp ignores a metadata chunk whose flag is not set

_XMP_ORIENTATION = re.compile(rb'tiff:Orientation(?:="|>)([0-9])')
_MAX_TEXT = 1 << 20  # Pillow refuses longer compressed texts of a PNG, so a longer one never has an orientation


def probe(data: bytes, *, max_pixels: int, exif: bool) -> ImageSize:
    """Return the size of an encoded image: PNG, JPEG, WebP, GIF, BMP or TIFF; of an animation the first frame's.

    With ``exif`` the size is the displayed one: an EXIF (or XMP) orientation of 5 to 8 exchanges width and height. A
    TIFF is always rotated, because Pillow rotates it on loading. Data that ends after a readable header is no error:
    the engine reports whether the pixels decode.

    Raises :class:`ImageHeaderError` for anything without such a header, :class:`TooManyPixels` when width times
    height is above ``max_pixels``.
    """
    name, read = _recognize(data)
    try:
        header = read(data, exif)
    except Image.DecompressionBombError as error:
        raise TooManyPixels(f"the {name} header claims more pixels than can be decoded") from error
    except Exception as error:
        # Malformed bytes make Pillow and the scans raise struct.error, IndexError, OSError, SyntaxError, OverflowError
        # and others. All of them mean that the header is unreadable.
        raise ImageHeaderError(f"the {name} header cannot be read") from error
    width, height = header.width, header.height
    if width < 1 or height < 1:
        raise ImageHeaderError(f"the {name} header gives an empty image: {width}x{height}")
    if width * height > max_pixels:
        raise TooManyPixels(f"{width}x{height} pixels are more than the {max_pixels} allowed")
    if (header.exif or header.xmp) and _orientation(header) in _SWAPPED:
        width, height = height, width
    return ImageSize(width, height, name)


def _recognize(data: bytes) -> tuple[str, Callable[[bytes, bool], _Header]]:
    for magic, name, read in _MAGIC:
        if data.startswith(magic) and (name != "WEBP" or data[8:12] == b"WEBP"):
            return name, read
    if not data:
        raise ImageHeaderError("there is no image: no bytes")
    raise ImageHeaderError(f"this is not an image of a known format ({', '.join(FORMATS)})")


def _orientation(header: _Header) -> object:
    """Return the orientation as Pillow's ``exif_transpose`` finds it: EXIF, else XMP, else 1. A broken EXIF is 1."""
    if header.exif:
        tags = Image.Exif()
        try:
            tags.load(header.exif)
            value = tags.get(Base.Orientation)
        except Exception:
            # A broken EXIF raises many types; vLLM then leaves the image unrotated.
            return 1
        if value is not None:
            return value
    match = _XMP_ORIENTATION.search(header.xmp)
    return int(match[1]) if match else 1


def _jpeg(data: bytes, exif: bool) -> _Header:
    """Read the segments up to the first scan; the last frame header counts, as it does for Pillow."""
    header = _Header()
    at, end = 2, len(data)
    while at + 4 <= end:
        if data[at] != 0xFF:
            at = data.find(b"\xff", at)
            if at < 0:
                break
            continue
        marker = data[at + 1]
        if marker == 0xFF:
            at += 1
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
                header.exif += body[6:] if header.exif else body
            elif body.startswith(b"http://ns.adobe.com/xap/1.0/\0"):
                header.xmp = body.partition(b"\0")[2]
        elif marker not in (0xC4, 0xCC) and (0xC0 <= marker <= 0xCF or marker == 0xDE):
            header.height, header.width = struct.unpack_from(">HH", data, at + 5)
        at += 2 + max(length, 2)
    return header


def _png(data: bytes, exif: bool) -> _Header:
    """Walk all chunks: an EXIF chunk may stand behind the pixels. Only those that can hold an orientation are read."""
    if data[12:16] != b"IHDR":
        raise ValueError("the first chunk is not IHDR")
    header = _Header(*struct.unpack_from(">II", data, 16))
    if not exif:
        return header
    raw_profile = b""
    at, pixels, animated = 8, False, False
    while at + 8 <= len(data):
        length, kind = struct.unpack_from(">I4s", data, at)
        if kind == b"eXIf":
            header.exif = data[at + 8 : at + 8 + length]
        elif kind in (b"tEXt", b"zTXt", b"iTXt"):
            keyword, text = _png_text(kind, data[at + 8 : at + 8 + length])
            if keyword == b"XML:com.adobe.xmp":
                header.xmp = text
            elif keyword == b"Raw profile type exif":
                raw_profile = text
        elif kind == b"IDAT":
            pixels = True
        elif kind == b"acTL":
            animated = True
        elif kind == b"IEND" or (kind == b"fcTL" and animated and pixels):
            break
        at += 12 + length
    if raw_profile and not header.exif:
        try:
            # ImageMagick's text form: three lines of label and length, then hexadecimal.
            header.exif = bytes.fromhex("".join(raw_profile.decode("latin-1").split("\n")[3:]))
        except ValueError:
            header.xmp = b""  # a broken EXIF: the engine leaves the image unrotated
    return header


def _png_text(kind: bytes, body: bytes) -> tuple[bytes, bytes]:
    """Return keyword and text of a text chunk; the text is empty where it cannot be read."""
    keyword, _, rest = body.partition(b"\0")
    if keyword not in (b"XML:com.adobe.xmp", b"Raw profile type exif"):
        return keyword, b""
    if kind == b"tEXt":
        return keyword, rest
    compressed = kind == b"zTXt" or rest[:1] != b"\0"
    rest = rest[1:] if kind == b"zTXt" else rest[2:].split(b"\0", 2)[-1]
    if not compressed:
        return keyword, rest
    try:
        return keyword, zlib.decompressobj().decompress(rest, _MAX_TEXT)
    except zlib.error:
        return keyword, b""


def _webp(data: bytes, exif: bool) -> _Header:
    """Read the canvas size from the first chunk, and the metadata chunks that only the extended form (VP8X) has."""
    kind = data[12:16]
    if kind == b"VP8 " and data[23:26] == b"\x9d\x01\x2a":
        wide, high = struct.unpack_from("<HH", data, 26)
        return _Header(wide & 0x3FFF, high & 0x3FFF)
    if kind == b"VP8L" and data[20:21] == b"\x2f":
        bits = struct.unpack_from("<I", data, 21)[0]
        return _Header((bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1)
    if kind != b"VP8X" or len(data) < 30:
        raise ValueError("no VP8, VP8L or VP8X header")
    header = _Header(int.from_bytes(data[24:27], "little") + 1, int.from_bytes(data[27:30], "little") + 1)
    flags = data[20]
    if not exif or not flags & (_WEBP_EXIF | _WEBP_XMP):
        return header
    at, end = 12, min(len(data), 8 + int.from_bytes(data[4:8], "little"))
    while at + 8 <= end:
        kind, length = struct.unpack_from("<4sI", data, at)
        if kind == b"EXIF" and flags & _WEBP_EXIF and not header.exif:
            header.exif = data[at + 8 : at + 8 + length]
        elif kind == b"XMP " and flags & _WEBP_XMP and not header.xmp:
            header.xmp = data[at + 8 : at + 8 + length]
        at += 8 + length + (length & 1)
    return header


def _tiff(data: bytes, exif: bool) -> _Header:
    """Read by Pillow's plugin, whose size is rotated by the orientation tag, or by an XMP packet without one."""
    with TiffImageFile(io.BytesIO(data)) as image:
        xmp = b"" if Base.Orientation in image.tag_v2 else image.info.get("xmp", b"")
        return _Header(*image.size, xmp=xmp if isinstance(xmp, bytes) else b"")


def _pillow(plugin: type[ImageFile.ImageFile]) -> Callable[[bytes, bool], _Header]:
    """Return a reader by one of Pillow's own plugins, for formats that have no orientation."""

    def read(data: bytes, exif: bool) -> _Header:
        with plugin(io.BytesIO(data)) as image:
            return _Header(*image.size)

    return read


_MAGIC: tuple[tuple[bytes, str, Callable[[bytes, bool], _Header]], ...] = (
    (b"\xff\xd8\xff", "JPEG", _jpeg),
    (b"\x89PNG\r\n\x1a\n", "PNG", _png),
    (b"RIFF", "WEBP", _webp),
    (b"GIF87a", "GIF", _pillow(GifImageFile)),
    (b"GIF89a", "GIF", _pillow(GifImageFile)),
    (b"BM", "BMP", _pillow(BmpImageFile)),
    (b"II*\0", "TIFF", _tiff),
    (b"MM\0*", "TIFF", _tiff),
)

FORMATS = tuple(dict.fromkeys(name for _, name, _ in _MAGIC))
"""Names of the formats that :func:`probe` reads; vLLM 0.32 accepts all of them."""

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
        name, sizes = "AVIF", _box_sizes(head, b"ispe", ">II", skip=4)  # four bytes of version and flags come first
    elif head.startswith(_JP2_SIGNATURE):
        name, sizes = "JPEG 2000", [(width, height) for height, width in _box_sizes(head, b"ihdr", ">II")]
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


def _box_sizes(head: bytes, box: bytes, layout: str, skip: int = 0) -> list[tuple[int, int]]:
    """Return the sizes in every box of a kind. A chance match in other bytes only makes the claim larger."""
    sizes: list[tuple[int, int]] = []
    at = head.find(box)
    while at >= 0:
        start = at + len(box) + skip
        if start + struct.calcsize(layout) <= len(head):
            first, second = struct.unpack_from(layout, head, start)
            sizes.append((first, second))
        at = head.find(box, at + 1)
    return sizes
