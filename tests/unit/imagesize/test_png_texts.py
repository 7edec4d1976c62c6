"""Texts of a PNG that hold an orientation, in every kind of chunk, against what Pillow makes of them."""

import zlib

import pytest
from unit.imagesize.test_image_size import XMP, XMP_TEXT, encode, exif, png_chunk, predicted, served


def zipped(text: bytes) -> bytes:
    return b"\0" + zlib.compress(text)


@pytest.mark.parametrize("after_pixels", [False, True])
@pytest.mark.parametrize(
    "chunks",
    [
        [(b"iTXt", XMP_TEXT + b"\0\xff\xff\0" + XMP % 6)],  # one separator too few
        [(b"iTXt", XMP_TEXT + b"\0\0\xff\0\0" + XMP % 6)],  # a language that is not Unicode
        [(b"iTXt", XMP_TEXT + b"\1\1\0\0" + zlib.compress(XMP % 6))],  # an unknown compression
        [(b"iTXt", XMP_TEXT + b"\1\0\0\0" + zlib.compress(XMP % 6))],
        [(b"iTXt", XMP_TEXT + b"\0\0\0\0" + XMP % 6), (b"tEXt", XMP_TEXT + XMP % 1)],
        [(b"tEXt", XMP_TEXT + XMP % 6), (b"iTXt", XMP_TEXT + b"\0\0\xff\0\0" + XMP % 1)],
        [(b"zTXt", XMP_TEXT + zipped(XMP % 8))],
        [(b"tEXt", b"xmp\0" + XMP % 6)],
        [(b"tEXt", b"exif\0" + exif(6).tobytes())],
        [(b"zTXt", b"exif\0" + zipped(exif(6).tobytes())), (b"tEXt", XMP_TEXT + XMP % 6)],
        [(b"eXIf", exif(6).tobytes()[6:]), (b"tEXt", b"exif\0" + exif(1).tobytes())],
        [(b"tEXt", b"exif\0"), (b"tEXt", XMP_TEXT + XMP % 6)],
    ],
)
def test_texts_of_a_png_turn_as_pillow_turns(chunks: list[tuple[bytes, bytes]], after_pixels: bool) -> None:
    plain = encode("PNG")
    at = len(plain) - 12 if after_pixels else 33
    data = plain[:at] + b"".join(png_chunk(kind, body) for kind, body in chunks) + plain[at:]
    assert predicted(data) == served(data)
