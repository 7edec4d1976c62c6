"""What the readers of all image formats share: their result, their errors, and the bounds of their work."""

from dataclasses import dataclass
from typing import Final

MAX_STEPS: Final = 4096
"""Segments, chunks or blocks that are read of one header. Cameras write under 100; a depth map of 20 MB in extended XMP
takes 320."""
MAX_PADDING: Final = 64 * 1024
"""Fill bytes between the segments of a JPEG; encoders write at most a few."""
MAX_METADATA: Final = 4 * 1024**2
"""Bytes of one XMP packet or EXIF structure that are searched. Editing programs write up to 1 MB of XMP."""
MAX_TAGS: Final = 1024
"""Entries of one TIFF directory; cameras write under 100, geographic and medical images under 200."""
MAX_VALUES: Final = 16_384
"""Numbers of one TIFF tag: strips or tiles of an image. 64 million pixels in strips of one row have 8,000."""


class ImageHeaderError(ValueError):
    """Bytes that are no image of a known format, or whose header cannot be read within the bounds."""


class TooManyPixels(ValueError):  # noqa: N818 - the name is part of the library's interface
    """The header claims more pixels than allowed."""


@dataclass(frozen=True, slots=True)
class ImageSize:
    """Width and height in pixels, and the name of the format.

    ``turned``: an orientation of 5 to 8 exchanged width and height, which an engine does only where
    :func:`~mmrouter_lib.image_size.rotates`.
    """

    width: int
    height: int
    format: str
    turned: bool = False


@dataclass(slots=True)
class Header:
    """Contents of a header before rotation: ``exif`` is a TIFF structure, ``xmp`` an XML packet."""

    width: int = 0
    height: int = 0
    exif: bytes = b""
    xmp: bytes = b""


def read_metadata(data: bytes, start: int, end: int) -> bytes:
    """Return the bytes of a packet of metadata. Raises :class:`ImageHeaderError` for a long one, before a copy."""
    if end - start > MAX_METADATA:
        raise ImageHeaderError(f"metadata of more than {MAX_METADATA} bytes")
    return data[start:end]
