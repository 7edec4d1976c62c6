"""Images that vLLM reads from a local folder instead of the request: their URLs, and how a refusal is recognized.

``--allowed-local-media-path FOLDER`` lets a chat name files below it; identity and blocks follow from the ``uuid``, as
with bytes (docs/engine-facts/vllm.md#image-uuid).
"""

import re
from pathlib import PurePath
from typing import Final

MIME_SUFFIXES: Final = {
    "image/png": ".png",
    "image/jpeg": ".jpg",
    "image/webp": ".webp",
    "image/gif": ".gif",
    "image/bmp": ".bmp",
    "image/tiff": ".tiff",
}
"""File suffixes, for people who list the folder: the engine detects the format from the content."""

_REFUSED: Final = re.compile(rb"allowed-local-media-path|\[Errno \d+\]")
_STATUSES: Final = frozenset({400, 500})


def file_url(path: PurePath) -> str:
    """Return the URL by which a chat names a file. Raises ``ValueError`` for a path that is not absolute."""
    return path.as_uri()


def is_file_refused(status: int, raw: bytes) -> bool:
    """Whether an engine's error is about a local file: gone, not readable, or outside of its folder.

    vLLM 0.32 answers 500 with the system's error text for a file that it cannot read, 500 for any file when started
    without a folder, and 400 for a file outside of it.
    """
    return status in _STATUSES and _REFUSED.search(raw) is not None
