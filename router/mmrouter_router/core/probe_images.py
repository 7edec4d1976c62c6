"""Synthetic images and unique texts for the requests with which a router probes engines, encoders and renderers."""

import io
import secrets

from PIL import Image

SIDE = 64
"""Width and height in pixels: a handful of tokens in every family."""
COLOURS = ("#c02030", "#2030c0")


def small_pictures() -> tuple[bytes, ...]:
    """Return the images as PNG files: the same on every router."""
    pictures = []
    for colour in COLOURS:
        file = io.BytesIO()
        Image.new("RGB", (SIDE, SIDE), colour).save(file, "PNG")
        pictures.append(file.getvalue())
    return tuple(pictures)


def new_nonce() -> str:
    """Return a text that no prompt had before."""
    return secrets.token_hex(8)
