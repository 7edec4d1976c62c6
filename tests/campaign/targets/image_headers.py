"""Encoded images: the size that a router predicts from the header against Pillow, which the engines open images with.

An image that the engine serves has the predicted size: after rotation where the engine rotates, and as opened where it
does not. Every disagreement is a prompt that is predicted wrong. An image that the engine serves is not refused, apart
from the documented bounds.
"""

import io
import random
import struct
import warnings
import zlib
from collections.abc import Sequence
from typing import Self

from campaign.mutation import mutated
from campaign.target import BrokenPropertyError, Target
from PIL import Image
from unit.imagesize.test_image_size import XMP, encode, exif, png_chunk, served

from mmrouter_lib.image_size import FORMATS, ImageHeaderError, TooManyPixels, claimed_size, probe, rotates

MAX_PIXELS = 250_000  # of an image that is decoded for comparison
_BOUNDS = ("more than", "too much")  # in the message of a header that is refused for its amount of work


class ImageHeaders(Target):
    """An input: the file."""

    name = "image_headers"
    short = 600
    words = (
        *b"IHDR IDAT IEND eXIf tEXt zTXt iTXt acTL fcTL VP8X EXIF Exif\0\0 MM\0* II*\0 exif\0 xmp\0 XMP".split(b" "),
        *(
            b"\xff\xd8",
            b"\xff\xd9",
            b"\xff\xe1",
            b"\xff\xda",
            b"\xff\xc0",
            b"\xff\xc2",
            b"\xff\xff",
            b"\x2c",
            b"\x21\xf9",
        ),
        *(b"\x01\x12\0\3\0\0\0\1", b"\x12\x01\3\0\1\0\0\0", b'tiff:Orientation="6"', b"tiff:Orientation>8<", b"\x3b"),
        *(b"http://ns.adobe.com/xap/1.0/\0", b"Raw profile type exif\0", b"XML:com.adobe.xmp\0"),
    )

    def __enter__(self) -> Self:
        self._warnings = warnings.catch_warnings()
        self._warnings.__enter__()
        warnings.filterwarnings("ignore", module=r"PIL\.")  # as a router does
        return self

    def __exit__(self, *_: object) -> None:
        self._warnings.__exit__(None, None, None)

    def seeds(self) -> list[bytes]:
        plain = [encode(kind) for kind in FORMATS]
        turned = [encode(kind, exif=exif(number)) for kind in ("JPEG", "PNG", "WEBP", "TIFF") for number in (6, 8, 3)]
        described = [encode(kind, xmp=XMP % 6) for kind in ("JPEG", "WEBP")]
        tags = exif(6).tobytes().removeprefix(b"Exif\0\0")
        png = encode("PNG")
        late = png[:-12] + png_chunk(b"eXIf", tags) + png[-12:]
        text = f"\nexif\n{len(tags):8}\n{tags.hex()}\n".encode()
        old = png[:33] + png_chunk(b"zTXt", b"Raw profile type exif\0\0" + zlib.compress(text)) + png[33:]
        packet = png[:33] + png_chunk(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + XMP % 6) + png[33:]
        frames = [Image.new("P", (9, 5), colour) for colour in (1, 2)]
        moving = [encode_frames(kind, frames) for kind in ("GIF", "PNG", "WEBP", "TIFF")]
        return [
            *plain,
            *turned,
            *described,
            late,
            old,
            packet,
            *moving,
            encode("TIFF", tiffinfo={274: 6, 700: XMP % 8}),
        ]

    def draw(self, source: random.Random, kept: Sequence[bytes]) -> bytes:
        data = mutated(source, kept, self.words)
        return with_checksums(data) if data.startswith(b"\x89PNG") and source.random() < 0.7 else data

    def check(self, data: bytes) -> str:
        outcomes = [self._compare(data, turned=turned) for turned in (True, False)]
        return " / ".join(outcomes)

    def _compare(self, data: bytes, *, turned: bool) -> str:
        refusal, size = "", (0, 0)
        with self.product():
            try:
                if claimed_size(data, max_pixels=MAX_PIXELS) is not None:
                    return "claimed"
                found = probe(data, max_pixels=MAX_PIXELS, exif=turned)
                size = (found.width, found.height)
                if found.turned and turned and not rotates(data):
                    size = size[::-1]
            except TooManyPixels:
                return "too many pixels"
            except ImageHeaderError as error:
                refusal = str(error)
        real = served(data, turned=turned, max_pixels=4 * MAX_PIXELS)
        if real is None:
            return "refused by both" if refusal else "header only"
        if refusal:
            if any(bound in refusal for bound in _BOUNDS) or real[0] * real[1] > MAX_PIXELS:
                return "beyond the bounds"
            raise BrokenPropertyError(f"exif={turned}: {refusal}, but the engine serves {real}")
        if real != size:
            raise BrokenPropertyError(f"exif={turned}: predicted {size}, but the engine serves {real}")
        return f"{found.format}{' turned' if found.turned else ''}"


def encode_frames(kind: str, frames: Sequence[Image.Image]) -> bytes:
    raw = io.BytesIO()
    frames[0].save(raw, kind, save_all=True, append_images=frames[1:])
    return raw.getvalue()


def with_checksums(png: bytes) -> bytes:
    """Return a PNG whose whole chunks have the right checksums, without which a decoder stops at the first change."""
    out, at = bytearray(png), 8
    while at + 12 <= len(png):
        (length,) = struct.unpack_from(">I", png, at)
        end = at + 8 + length
        if end + 4 > len(png):
            break
        out[end : end + 4] = struct.pack(">I", zlib.crc32(png[at + 4 : end]))
        at = end + 4
    return bytes(out)
