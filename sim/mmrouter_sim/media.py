"""Load, decode and name the images of a request, and cache processed ones.

Engines in a deployment have no egress, so an image is a ``data:`` URI or a file below ``--allowed-local-media-path``.
http is refused, the only difference from the real engine. The name of an image is the ``uuid`` of its content part, or
else the engine's own hash of the file (docs/engine-facts/vllm.md#image-uuid).
"""

import binascii
import io
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pybase64
from blake3 import blake3
from PIL import Image, UnidentifiedImageError

from mmrouter_sim.errors import RequestError

_LEAF = b"\x03"
_ORIENTATION = 0x0112
_SIDEWAYS = frozenset({5, 6, 7, 8})  # EXIF orientations that swap width and height

BYTES_PER_TOKEN = 4800
"""Bytes of the processor's output per visual token in its cache: four patches of 1.2 KB.

See docs/engine-facts/vllm.md#renderer.
"""


@dataclass(frozen=True, slots=True)
class Picture:
    """A decoded image: its size in pixels for the processor, and the mode of the file."""

    width: int
    height: int
    mode: str


def load(url: str, root: Path | None) -> bytes:
    """Return the encoded bytes behind a URL. Raises :class:`RequestError` (400) if it is forbidden or unreadable."""
    scheme = url.partition(":")[0].lower()
    if scheme == "file":
        return _from_file(url, root)
    if scheme != "data":
        raise RequestError("The URL must be either a data or a file URL: this engine fetches nothing over the network.")
    head, comma, payload = url.partition(",")
    if not comma or not head.endswith(";base64"):
        raise RequestError("Only base64 data URLs are supported.")
    try:
        return pybase64.b64decode(payload, validate=True)
    except binascii.Error as error:
        raise RequestError(f"Invalid base64 in the data URL: {error}") from error


def _from_file(url: str, root: Path | None) -> bytes:
    if root is None:
        raise RequestError("Cannot load local files without `--allowed-local-media-path`.", status=500)
    path = Path(unquote(urlsplit(url).path)).resolve()
    if not path.is_relative_to(root):
        raise RequestError("The file path <path> must be a subpath of `--allowed-local-media-path <path>`.")
    try:
        return path.read_bytes()
    except OSError as error:
        # Like any unexpected error of the engine, without paths.
        raise RequestError(f"[Errno {error.errno}] {error.strerror}: '<path>'", status=500) from error


def decode(data: bytes, *, rotates: bool) -> Picture:
    """Decode an image whole. ``rotates``: the processor applies the EXIF orientation. Raises :class:`RequestError`: 400
    for what is no image or a damaged one, 500 for a header that claims more pixels than the decoder takes, as the
    engine answers them (docs/engine-facts/vllm.md#requests-that-end-the-engine).
    """
    try:
        with Image.open(io.BytesIO(data)) as image:
            width, height = image.size
            if rotates and image.getexif().get(_ORIENTATION) in _SIDEWAYS:
                width, height = height, width
            image.load()
            return Picture(width, height, image.mode)
    except Image.DecompressionBombError as error:
        raise RequestError(str(error), status=500) from error
    except UnidentifiedImageError as error:
        raise RequestError("Failed to load image: cannot identify image file") from error
    except (OSError, SyntaxError, ValueError) as error:  # what Pillow's readers raise for damaged files
        raise RequestError(f"Failed to load image: {error}") from error


def default_identifier(model: str, data: bytes, mode: str = "RGB") -> str:
    """Return the engine's own name of an image: BLAKE3 of the encoded bytes and of the engine's model argument. The
    form for RGB files is verified against a real engine. For files of another mode the engine adds how it converts them
    in a form that is not known here, so the mode goes in and the name is only as distinct as the engine's.
    """
    hasher = blake3()
    hasher.update(_frame(b"image") + _LEAF + _frame(b"image") + _LEAF)
    if mode != "RGB":
        hasher.update(_frame(b"io_config") + _LEAF + _frame(mode.encode()) + _LEAF)
    hasher.update(_frame(data))
    hasher.update(_frame(b"model_id") + _LEAF + _frame(model.encode()))
    return hasher.hexdigest()


def _frame(value: bytes) -> bytes:
    return len(value).to_bytes(8, "little") + value


class RecentImages(OrderedDict[str, int]):
    """Visual tokens of images by identifier, at most ``room`` tokens in all; the least recently used are dropped first.
    An image that is known by its identifier is not looked at again, whatever bytes come with it
    (docs/engine-facts/vllm.md#image-uuid).
    """

    def __init__(self, room: int) -> None:
        super().__init__()
        self._room = room

    def use(self, identifier: str) -> int | None:
        """Mark an image as used; return its tokens if it is known."""
        if identifier in self:
            self.move_to_end(identifier)
        return self.get(identifier)

    def put(self, identifier: str, tokens: int) -> None:
        """Add an image, unless it alone exceeds the room."""
        if tokens <= self._room:
            self[identifier] = tokens
            while sum(self.values()) > self._room:
                self.popitem(last=False)
