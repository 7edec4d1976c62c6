"""Sizes that AVIF and JPEG 2000 headers claim, against what their encoders wrote."""

import io
import struct

import pytest
from PIL import Image

from mmrouter_lib.image_size import ImageHeaderError, TooManyPixels, claimed_size

CLAIMED = {"AVIF": {}, "JPEG2000": {}, "codestream": {"no_jp2": True}}


def claimed(kind: str, width: int, height: int, mode: str = "RGB") -> bytes:
    raw = io.BytesIO()
    form = "AVIF" if kind == "AVIF" else "JPEG2000"
    Image.new(mode, (width, height), "red").save(raw, form, **CLAIMED[kind])
    return raw.getvalue()


@pytest.mark.parametrize("kind", CLAIMED)
@pytest.mark.parametrize(("width", "height"), [(1, 1), (120, 60), (61, 250)])
def test_the_claim_of_a_plain_image_equals_the_decoders_size(kind: str, width: int, height: int) -> None:
    size = claimed_size(claimed(kind, width, height), max_pixels=1 << 20)
    assert size is not None
    assert (size.width, size.height) == (width, height)


def test_the_largest_of_several_items_is_the_claim() -> None:
    with_alpha = claimed("AVIF", 64, 48, "RGBA")
    large = with_alpha + b"\0\0\0\x14ispe\0\0\0\0" + struct.pack(">II", 9000, 8000)
    with pytest.raises(TooManyPixels, match="9000x8000"):
        claimed_size(large, max_pixels=64_000_000)


@pytest.mark.parametrize("kind", CLAIMED)
def test_more_pixels_than_allowed_are_refused(kind: str) -> None:
    data = claimed(kind, 120, 60)
    assert claimed_size(data, max_pixels=120 * 60) is not None
    with pytest.raises(TooManyPixels):
        claimed_size(data, max_pixels=120 * 60 - 1)


@pytest.mark.parametrize("kind", CLAIMED)
def test_a_header_that_ends_before_its_size_cannot_be_read(kind: str) -> None:
    data = claimed(kind, 120, 60)
    for end in range(len(data)):
        try:
            size = claimed_size(data[:end], max_pixels=1 << 20)
        except ImageHeaderError:
            continue
        assert size is None or (size.width, size.height) == (120, 60)
    with pytest.raises(ImageHeaderError):
        claimed_size(data[:14], max_pixels=1 << 20)


@pytest.mark.parametrize("data", [b"", b"\x89PNG\r\n\x1a\n", b"GIF89a", b"\0\0\0\x18ftypheic", b"plain text"])
def test_other_formats_have_no_claim(data: bytes) -> None:
    assert claimed_size(data, max_pixels=1) is None
