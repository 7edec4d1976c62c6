"""Resolved media, and the errors of resolving it."""

from dataclasses import dataclass, field
from typing import Final, Literal

import pybase64

from mmrouter_router.core.errors import RequestError

_NOTHING: Final = memoryview(b"")

Source = Literal["data", "fetch", "cache", "revalidated"]

Refusal = Literal[
    "data_uri",
    "url",
    "scheme",
    "fetch_disabled",
    "host",
    "port",
    "address",
    "redirect",
    "too_large",
    "request_too_large",
    "encoding",
    "status",
    "unreachable",
    "timeout",
    "empty",
    "web_page",
    "busy",
]


@dataclass(frozen=True, slots=True)
class Media:
    """Encoded media as the engine gets it. ``mime`` is detected from the bytes, not taken from client or origin."""

    data: bytes
    mime: str
    source: Source
    text: memoryview = field(default=_NOTHING, compare=False, repr=False)
    """The client's own base64 of the bytes, empty where it did not send canonical base64."""

    def data_uri(self) -> str:
        """Return the bytes as a ``data:`` URI."""
        text = str(self.text, "ascii") if self.text else pybase64.b64encode_as_string(self.data)
        return f"data:{self.mime};base64,{text}"


class MediaError(Exception):
    """Media cannot be resolved. The sentence is for the client and holds no address that the client did not write."""

    def __init__(self, reason: Refusal, sentence: str) -> None:
        super().__init__(sentence)
        self.reason = reason
        self.sentence = sentence

    def for_field(self, param: str) -> RequestError:
        """Return the answer to the client: 400 with code ``media_<reason>``, or 429 where all fetch slots are busy."""
        code = f"media_{self.reason}"
        if self.reason == "busy":
            return RequestError.busy(self.sentence, param=param, code=code)
        return RequestError.invalid(self.sentence, param=param, code=code)
