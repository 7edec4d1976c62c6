"""Formats that only their decoder can size: what their headers claim is a limit and an estimate."""

import io
import struct

import pytest
from PIL import Image

from mmrouter_lib.image_size import ImageHeaderError, TooManyPixels, claimed_size

FORMATS = {"AVIF": {}, "JPEG2000": {}, "codestream": {"no_jp2": True}}


def encoded(kind: str, width: int, height: int, mode: str = "RGB") -> bytes:
    raw = io.BytesIO()
    form = "AVIF" if kind == "AVIF" else "JPEG2000"
    Image.new(mode, (width, height), "red").save(raw, form, **FORMATS[kind])
    return raw.getvalue()


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(("width", "height"), [(1, 1), (120, 60), (61, 250)])
def test_the_claim_is_what_the_decoder_finds_in_a_plain_image(kind: str, width: int, height: int) -> None:
    size = claimed_size(encoded(kind, width, height), max_pixels=1 << 20)
    assert size is not None
    assert (size.width, size.height) == (width, height)


def test_the_largest_of_several_items_is_the_claim() -> None:
    with_alpha = encoded("AVIF", 64, 48, "RGBA")
    large = with_alpha + b"\0\0\0\x14ispe\0\0\0\0" + struct.pack(">II", 9000, 8000)
    with pytest.raises(TooManyPixels, match="9000x8000"):
        claimed_size(large, max_pixels=64_000_000)


@pytest.mark.parametrize("kind", FORMATS)
def test_more_pixels_than_allowed_are_refused(kind: str) -> None:
    data = encoded(kind, 120, 60)
    assert claimed_size(data, max_pixels=120 * 60) is not None
    with pytest.raises(TooManyPixels):
        claimed_size(data, max_pixels=120 * 60 - 1)


@pytest.mark.parametrize("kind", FORMATS)
def test_a_header_that_ends_before_its_size_cannot_be_read(kind: str) -> None:
    data = encoded(kind, 120, 60)
    for end in range(len(data)):
        try:
            size = claimed_size(data[:end], max_pixels=1 << 20)
        except ImageHeaderError:
            continue
        assert size is None or (size.width, size.height) == (120, 60)
    with pytest.raises(ImageHeaderError):
        claimed_size(data[:14], max_pixels=1 << 20)


@pytest.mark.parametrize("data", [b"", b"\x89PNG\r\n\x1a\n", b"GIF89a", b"\0\0\0\x18ftypheic", b"plain text"])
def test_other_bytes_are_not_its_business(data: bytes) -> None:
    assert claimed_size(data, max_pixels=1) is None
