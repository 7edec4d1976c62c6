"""Images of a given number of bytes for benchmarks, made on the spot."""

import io
import random
import zlib

from PIL import Image

JPEG_SIDES = (1120, 896)


def padded_png(size: int) -> bytes:
    """Return a PNG of 56x56 pixels and ``size`` bytes: a chunk that decoders skip makes it so large.

    With few pixels, the cost of transport shows and not that of decoding.
    """
    file = io.BytesIO()
    Image.new("RGB", (56, 56), "#3060a0").save(file, "PNG")
    png = file.getvalue()
    head, rest = png[:33], png[33:]  # signature and IHDR
    data = random.Random(size).randbytes(max(0, size - len(png) - 12))
    kind = b"mmRo"
    chunk = len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")
    return head + chunk + rest


def detailed_jpeg(size: int) -> bytes:
    """Return a JPEG of at least ``size`` bytes, with as much detail as a photograph of its dimensions."""
    image = Image.merge("RGB", [Image.effect_noise(JPEG_SIDES, sigma) for sigma in (40, 50, 60)])
    for quality in range(92, 100):
        file = io.BytesIO()
        image.save(file, "JPEG", quality=quality)
        if file.tell() >= size:
            return file.getvalue()
    raise ValueError(f"no quality makes {size} bytes of {JPEG_SIDES}")
