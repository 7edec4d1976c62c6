"""Images that vLLM reads from a folder instead of the request: what is sent, and how it says that it could not.

``--allowed-local-media-path FOLDER`` lets a chat name files below it; identity and blocks are those of our ``uuid``, as
with bytes (docs/engine-facts/vllm.md#image-uuid). Its answers leave out paths, so what it says is recognised by the
words around them.
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
"""For people who look at the folder: the engine looks at the contents."""

_REFUSED: Final = re.compile(rb"allowed-local-media-path|\[Errno \d+\]")
_STATUSES: Final = frozenset({400, 500})


def file_url(path: PurePath) -> str:
    """Return the URL by which a chat names a file. Raises ``ValueError`` for a path that is not absolute."""
    return path.as_uri()


def is_file_refused(status: int, raw: bytes) -> bool:
    """Whether an engine's error is about a file that it was to read: gone, not readable, or not in its folder.

    vLLM 0.32 answers 500 with the system's own words for a file that it cannot read, and to any file when it was
    started without a folder, 400 for a file outside of it.
    """
    return status in _STATUSES and _REFUSED.search(raw) is not None
