"""A parsed and checked request, its limits, and the extraction of large inline images before a body is parsed.

Extracting saves the JSON parser megabytes of base64. It takes one form only: a string ``"data:<type>;base64,<data>"``
without escapes, whose data is strict base64. An unguessable placeholder replaces it. The rest keeps its meaning:

- Where the quote before ``data:`` opens a string, all characters up to the next quote belong to it, because none is a
  quote, a backslash or a control character. The parser's state behind the placeholder is that behind the image.
- Where that quote closes a string, ``data:`` is outside of strings, and neither body is JSON.
- A quote behind a backslash is skipped.

So a body that parses with placeholders parses to the same values without them. The caller must find each placeholder
once, as the URL of an image; otherwise, or where parsing fails, it must parse the original body.
"""

import re
import secrets
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Self, TypeAlias

import pybase64

from mmrouter_lib.api import Media as MediaSettings
from mmrouter_lib.api import quantity_bytes
from mmrouter_lib.engines.base.request_fields import CHAT, COMPLETIONS, RESPONSES
from mmrouter_lib.media_identity import Modality
from mmrouter_router.intake.field_check import Reason
from mmrouter_router.intake.json_body import Raw, find_bytes, work_size

MIN_URI: Final = 16 * 1024  # characters of a URI from which extracting it pays
_HEAD: Final = re.compile(rb'"data:[A-Za-z0-9.+/-]{0,100};base64,(?!")')
_OPENS: Final = b'"data:'
MAX_SKIPPED: Final = 4096  # short or unusual URIs before the search ends, to bound the time in the event loop
PLACEHOLDER: Final = f"data:,{secrets.token_hex(16)}."  # of an extracted image, before its number


class InlineImage(NamedTuple):
    """An image of a body: its bytes, and its base64 as a view of the body."""

    data: bytes
    text: memoryview  # empty where it is not canonical base64


class Extracted(NamedTuple):
    """A body with placeholders, and placeholder -> image."""

    raw: bytes
    images: Mapping[str, InlineImage]


def extract_images(raw: Raw) -> Extracted | None:
    """Return the body without its large images, ``None`` where it has none."""
    view, pieces, images, done = memoryview(raw), list[bytes | memoryview](), dict[str, InlineImage](), 0
    skipped = 0
    at = find_bytes(raw, _OPENS)
    while at >= 0 and (end := find_bytes(raw, b'"', at + 1)) >= 0:
        if end - at > MIN_URI and (head := _HEAD.match(raw, at)) is not None and (at == 0 or raw[at - 1] != ord("\\")):
            if (image := decoded_image(view[head.end() : end])) is None:
                return None
            placeholder = f"{PLACEHOLDER}{len(images)}"
            images[placeholder] = image
            pieces += (view[done : at + 1], placeholder.encode())
            done = end
        elif (skipped := skipped + 1) > MAX_SKIPPED:
            return None
        at = find_bytes(raw, _OPENS, end + 1)
    return Extracted(b"".join((*pieces, view[done:])), images) if images else None


def decoded_image(text: memoryview | str) -> InlineImage | None:
    """Return an image by its base64, ``None`` where that is not strict."""
    try:
        view = memoryview(text.encode("ascii")) if isinstance(text, str) else text
        data = pybase64.b64decode(view, validate=True)
    except ValueError:
        return None
    return InlineImage(data, view if _canonical(data, view) else view[:0])


def _canonical(data: bytes, text: memoryview) -> bool:
    """Return whether encoding reproduces the text: unused bits of its last character may be set."""
    return pybase64.b64encode(data[-(len(data) % 3 or 3) :]) == text[-4:]


HEAD_CHARACTERS: Final = 2048  # characters of a prompt's JSON form that identify its beginning
_PROMPT_FIELDS: Final[Mapping[str, str]] = {CHAT: "messages", COMPLETIONS: "prompt", RESPONSES: "input"}

Prompt: TypeAlias = "str | array[int]"  # a text, or token ids (u32)


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a request: bytes of the body; number of images and other media together."""

    max_request_bytes: int = 64 * 1024**2
    max_images: int = 32

    @classmethod
    def of(cls, media: MediaSettings) -> Self:
        return cls(quantity_bytes(media.max_request_bytes), media.max_images)


@dataclass(frozen=True, slots=True)
class ImagePart:
    """An image: ``messages[message].content[part]``, its URL as the client wrote it, and the field of the URL."""

    message: int
    part: int
    url: str
    param: str
    inline: InlineImage | None = None  # extracted from the body; the URL is then its placeholder
    in_source: bool = True  # the URL is in the request's source


class MediaPart(NamedTuple):
    """A video or audio of a chat, an image of a forwarded request that is predicted, and media that no prompt models.

    ``holder[key]``, the field of its URL, is empty until :meth:`embed`: no engine can see a client's URL.
    """

    holder: Any  # an object or an array
    key: str | int
    url: str
    param: str
    kind: Modality
    place: tuple[int, int] | None = None  # of a part of a predicted prompt: indices of message and part
    inline: InlineImage | None = None  # as of an image

    def embed(self, data_uri: str) -> None:
        self.holder[self.key] = data_uri


@dataclass(slots=True)  # not frozen: creation would take ten times as long
class ChatRequest:
    """A checked request; treat it as immutable. ``inexact`` is empty where the prompt is modelled.

    ``removed``: fields that clients may not set. ``prompts``: those of a completion.
    ``response``: fields that the answer to a request of ``/v1/responses`` repeats, where it became this chat.
    ``stored``: whether the engine is to store its response. ``as_chat``: the chat whose prompt the engine makes of a
    forwarded request, ``None`` where that is not modelled; its images are ``media`` with a place.
    ``inexact`` does not tell of videos and audio, which the family may model.
    A completion and a forwarded request have no ``images``, and ``messages`` hold the beginning of the prompt as one
    user message, for affinity only; a forwarded request without ``as_chat`` has a reason.
    """

    model: str
    messages: list[dict[str, Any]]
    media: tuple[MediaPart, ...]
    stream: bool
    max_tokens: int | None
    body: dict[str, Any]
    inexact: tuple[Reason, ...]
    images: tuple[ImagePart, ...] = ()
    removed: tuple[str, ...] = ()
    source: Raw = b""  # the body as parsed: as received, or with placeholders for large images
    endpoint: str = CHAT
    form: tuple[str, tuple[bytes | memoryview, ...]] | None = None  # content type and body, in pieces, of a form
    prompts: tuple[Prompt, ...] = ()
    response: dict[str, Any] | None = None
    stored: bool = False
    as_chat: dict[str, Any] | None = None

    @property
    def work_size(self) -> int:
        """Bytes of plain text that take as long as the body."""
        return work_size(self.source)

    @property
    def text_size(self) -> int:
        """Bytes of the body without its images and a chat's other media."""
        urls = [image.url for image in self.images if image.in_source]
        urls += [part.url for part in self.media if part.place is not None]
        return max(0, len(self.source) - sum(map(len, urls)))

    @property
    def prompt_field(self) -> str:
        """The field that an error in the prompt is about."""
        return "input" if self.response is not None else _PROMPT_FIELDS.get(self.endpoint, "input")
