"""Sample images for the demo and the verification: distinct per seed, a few hundred bytes each."""

import base64
import io
import random

from PIL import Image


def picture(seed: str, width: int = 224, height: int = 224) -> bytes:
    """Return a PNG: a coarse mosaic whose colours follow from ``seed``."""
    colours = random.Random(seed)
    cells = Image.frombytes("RGB", (4, 4), colours.randbytes(48))
    out = io.BytesIO()
    cells.resize((width, height), Image.Resampling.NEAREST).save(out, "PNG")
    return out.getvalue()


def data_uri(png: bytes) -> str:
    """Return a PNG as a ``data:`` URI."""
    return "data:image/png;base64," + base64.b64encode(png).decode()
