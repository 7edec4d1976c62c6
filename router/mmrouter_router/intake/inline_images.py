"""Extracts large inline images from a body before it is parsed, which saves the JSON parser megabytes of base64.

Extracts one form only: a string ``"data:<type>;base64,<data>"`` without escapes, whose data is strict base64. An
unguessable placeholder replaces it. The rest of the body keeps its meaning:

- Where the quote before ``data:`` opens a string, all characters up to the next quote belong to it, because none is a
  quote, a backslash or a control character. The parser's state behind the placeholder is that behind the image.
- Where that quote closes a string, ``data:`` is outside of strings, and neither body is JSON.
- A quote behind a backslash is skipped.

So a body that parses with placeholders parses to the same values without them. The caller must find each placeholder
once, as the URL of an image; otherwise, or where parsing fails, it must parse the original body.
"""

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import pybase64

from mmrouter_router.intake.json_body import Raw

MIN_URI: Final = 16 * 1024
"""Characters of a URI from which extracting it pays."""
_HEAD: Final = re.compile(rb'"data:[A-Za-z0-9.+/-]{0,100};base64,(?!")')
_OPENS: Final = b'"data:'
MAX_SKIPPED: Final = 4096
"""Short or unusual URIs after which a body is not searched further, to bound the time in the event loop."""
_SECRET: Final = secrets.token_hex(16)


@dataclass(frozen=True, slots=True)
class InlineImage:
    """An image of a body: its bytes, and its base64 as a view of the body."""

    data: bytes
    text: memoryview  # empty where it is not canonical base64


@dataclass(frozen=True, slots=True)
class Extracted:
    """A body with placeholders, and placeholder -> image."""

    raw: bytes
    images: Mapping[str, InlineImage]


def extract_images(raw: Raw) -> Extracted | None:
    """Return the body without its large images, ``None`` where it has none."""
    view, pieces, images, done = memoryview(raw), list[bytes | memoryview](), dict[str, InlineImage](), 0
    skipped = 0
    at = raw.find(_OPENS)
    while at >= 0 and (end := raw.find(b'"', at + 1)) >= 0:
        if end - at > MIN_URI and (head := _HEAD.match(raw, at)) is not None and (at == 0 or raw[at - 1] != ord("\\")):
            text = view[head.end() : end]
            try:
                data = pybase64.b64decode(text, validate=True)
            except ValueError:
                return None
            placeholder = f"data:,{_SECRET}.{len(images)}"
            images[placeholder] = InlineImage(data, text if _canonical(data, text) else text[:0])
            pieces += (view[done : at + 1], placeholder.encode())
            done = end
        elif (skipped := skipped + 1) > MAX_SKIPPED:
            return None
        at = raw.find(_OPENS, end + 1)
    return Extracted(b"".join((*pieces, view[done:])), images) if images else None


def _canonical(data: bytes, text: memoryview) -> bool:
    """Return whether encoding reproduces the text: unused bits of its last character may be set."""
    return pybase64.b64encode(data[-(len(data) % 3 or 3) :]) == text[-4:]
