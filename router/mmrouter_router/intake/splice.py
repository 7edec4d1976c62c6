"""Large images taken out of a body before it is parsed: megabytes of base64 are no business of a JSON parser.

Only one form is taken: a string ``"data:<type>;base64,<data>"`` without an escape, whose data is strict base64. A word
that nobody outside can know stands in for it. Why the rest of the body means the same:

- Where the quote before ``data:`` opens a string, the characters up to the next quote are those of the string, because
  none is a quote, a backslash or a control character. The parser is in the same state behind the word as behind them.
- Where it ends a string instead, ``data:`` stands outside of one, before and after. Neither body is JSON then.
- A quote behind a backslash is left alone.

So what parses with the words in it parses without them, to the same values, each word one string. Whoever parses it
must find every word once, where an image may stand; otherwise, or where it does not parse, the body counts as it came.
"""

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import pybase64

from mmrouter_router.intake.body import Raw

SHORTEST: Final = 16 * 1024
"""Characters of a URI that is worth it."""
_HEAD: Final = re.compile(rb'"data:[A-Za-z0-9.+/-]{0,100};base64,(?!")')
_OPENS: Final = b'"data:'
_FEW: Final = 4096
"""Short or odd URIs of a body that is worth it; looking at millions of them would keep everybody else waiting."""
_STRANGER: Final = secrets.token_hex(16)


@dataclass(frozen=True, slots=True)
class Inline:
    """An image that stood in a body: its bytes, and its base64 as it stands there."""

    data: bytes
    text: memoryview  # empty unless everybody would write it so


@dataclass(frozen=True, slots=True)
class Spliced:
    """A body with words in it, and what they stand for."""

    raw: bytes
    inline: Mapping[str, Inline]


def splice(raw: Raw) -> Spliced | None:
    """Return the body without its large images, ``None`` where there is none."""
    view, pieces, found, done = memoryview(raw), list[bytes | memoryview](), dict[str, Inline](), 0
    left = 0
    at = raw.find(_OPENS)
    while at >= 0 and (end := raw.find(b'"', at + 1)) >= 0:
        if end - at > SHORTEST and (head := _HEAD.match(raw, at)) is not None and (at == 0 or raw[at - 1] != ord("\\")):
            text = view[head.end() : end]
            try:
                data = pybase64.b64decode(text, validate=True)
            except ValueError:
                return None
            word = f"data:,{_STRANGER}.{len(found)}"
            found[word] = Inline(data, text if _canonical(data, text) else text[:0])
            pieces += (view[done : at + 1], word.encode())
            done = end
        elif (left := left + 1) > _FEW:
            return None
        at = raw.find(_OPENS, end + 1)
    return Spliced(b"".join((*pieces, view[done:])), found) if found else None


def _canonical(data: bytes, text: memoryview) -> bool:
    """Whether encoding gives the text again: of the last character some bits may say nothing, and say it anyhow."""
    return pybase64.b64encode(data[-(len(data) % 3 or 3) :]) == text[-4:]
