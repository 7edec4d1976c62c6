"""Test pictures, drawn with Pillow: the same bytes in every run, other bytes for every other argument."""

import base64
from functools import cache
from io import BytesIO

from PIL import Image, ImageDraw

ORIENTATION = 0x0112  # the EXIF tag


@cache
def picture(width: int, height: int, *, seed: int = 1, form: str = "PNG", mode: str = "RGB", turned: int = 1) -> bytes:
    """Return an encoded picture. ``form`` is Pillow's format name, ``turned`` the EXIF orientation (1: not written)."""
    image = _draw(width, height, seed).convert(mode)
    out = BytesIO()
    options: dict[str, object] = {}
    if turned != 1:
        exif = Image.Exif()
        exif[ORIENTATION] = turned
        options["exif"] = exif
    if form == "GIF":
        frames = [_draw(width, height, seed + number).convert(mode) for number in (1, 2)]
        options |= {"save_all": True, "append_images": frames, "duration": 100}
    image.save(out, form, **options)
    return out.getvalue()


def _draw(width: int, height: int, seed: int) -> Image.Image:
    image = Image.new("RGB", (width, height), (seed * 53 % 256, seed * 97 % 256, seed * 29 % 256))
    pen = ImageDraw.Draw(image)
    for number in range(6):
        x, y = (seed * 31 + number * width // 6) % width, (seed * 17 + number * height // 5) % height
        colour = ((number * 40 + seed) % 256, (200 - number * 30) % 256, (seed * 11 + number * 70) % 256)
        pen.rectangle((x, y, min(x + width // 4, width), min(y + height // 3, height)), fill=colour)
    return image


def data_uri(data: bytes) -> str:
    """Return a ``data:`` URI. The type is octet-stream: what an image is, its bytes say, to the engine and to us."""
    return "data:application/octet-stream;base64," + base64.b64encode(data).decode()


def image_part(data: bytes, **fields: object) -> dict[str, object]:
    return {"type": "image_url", "image_url": {"url": data_uri(data), **fields}}


def text_part(text: str) -> dict[str, object]:
    return {"type": "text", "text": text}
