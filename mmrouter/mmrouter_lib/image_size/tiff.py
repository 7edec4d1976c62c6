"""TIFF, and the EXIF structures of other formats: read by Pillow, after a check of how much there is to read."""

import io
import struct

from PIL import Image
from PIL.ExifTags import Base
from PIL.TiffImagePlugin import TiffImageFile

from mmrouter_lib.image_size.reader_base import MAX_TAGS, MAX_VALUES, Header, ImageHeaderError, read_metadata

_BYTES = (1, 2, 6, 7)  # types whose values stay one byte string, however many there are


def read(data: bytes, exif: bool) -> Header:
    """Return the size of the first image. It is rotated by the orientation tag, or by an XMP packet without one."""
    check_directory(data)
    with TiffImageFile(io.BytesIO(data)) as image:
        xmp = b"" if Base.Orientation in image.tag_v2 else image.info.get("xmp", b"")
        return Header(*image.size, xmp=read_metadata(xmp, 0, len(xmp)) if isinstance(xmp, bytes) else b"")


def orientation(exif: bytes) -> object:
    """Return the orientation tag of an EXIF structure, ``None`` where it has none, 1 for a broken one.

    Raises :class:`ImageHeaderError` for a structure beyond the bounds.
    """
    check_directory(exif.removeprefix(b"Exif\0\0").removeprefix(b"Exif\0\0"))
    tags = Image.Exif()
    try:
        tags.load(exif)
        return tags.get(Base.Orientation)
    except Exception:
        # A broken EXIF raises many types; vLLM then leaves the image unrotated.
        return 1


def check_directory(data: bytes) -> None:
    """Raise :class:`ImageHeaderError` for a first directory with too many tags, or a tag with too many numbers.

    Whatever is malformed is left to Pillow, as it is to the engine's.
    """
    order = ">" if data.startswith(b"MM") else "<"
    try:
        (at,) = struct.unpack_from(f"{order}I", data, 4)
        (count,) = struct.unpack_from(f"{order}H", data, at)
    except struct.error:
        return
    count = min(count, (len(data) - at - 2) // 12)  # a damaged count may be larger than the data
    if count > MAX_TAGS:
        raise ImageHeaderError(f"a directory holds more than {MAX_TAGS} tags")
    for _, kind, values, _ in struct.iter_unpack(f"{order}HHII", data[at + 2 : at + 2 + 12 * count]):
        if values > MAX_VALUES and kind not in _BYTES and values <= len(data):
            raise ImageHeaderError(f"a tag holds more than {MAX_VALUES} numbers")
