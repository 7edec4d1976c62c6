"""Resolved media: its bytes, their type by their first bytes, strict ``data:`` URIs (RFC 2397), and refusals. Pure.

Whatever a lenient decoder would skip or guess is an error, because two decoders must not see two images in one URI. The
type labels bytes for the engine and tells web pages from media; ``mmrouter_lib.image_size`` validates images.
"""

import re
from dataclasses import dataclass, field
from typing import Final, Literal
from urllib.parse import unquote_to_bytes

import pybase64

from mmrouter_router.core.errors import RequestError

_NOTHING: Final = memoryview(b"")

Source = Literal["data", "fetch", "cache", "revalidated"]

Refusal = (
    Literal["data_uri", "url", "scheme", "fetch_disabled", "host", "port", "address", "redirect", "timeout", "busy"]
    | Literal["too_large", "request_too_large", "encoding", "status", "unreachable", "empty", "web_page"]
    | Literal["exhausted"]
)


@dataclass(frozen=True, slots=True)
class Media:
    """Encoded media as the engine gets it. ``mime`` is detected from the bytes, not taken from client or origin."""

    data: bytes
    mime: str
    source: Source
    text: memoryview = field(default=_NOTHING, compare=False, repr=False)  # the client's own canonical base64

    def data_uri(self) -> str:
        text = str(self.text, "ascii") if self.text else pybase64.b64encode_as_string(self.data)
        return f"data:{self.mime};base64,{text}"


class MediaError(Exception):
    """Media cannot be resolved. The sentence is for the client and holds no address that the client did not write."""

    def __init__(self, reason: Refusal, sentence: str) -> None:
        super().__init__(sentence)
        self.reason, self.sentence = reason, sentence

    def for_field(self, param: str) -> RequestError:
        """Return the answer to the client: 400 with code ``media_<reason>``, 429 where all fetch slots are busy, or 503
        where the router has no free file descriptors.
        """
        if self.reason == "exhausted":
            return RequestError.exhausted(param)
        code = f"media_{self.reason}"
        if self.reason == "busy":
            return RequestError.busy(self.sentence, param=param, code=code)
        return RequestError.invalid(self.sentence, param=param, code=code)


UNKNOWN = "application/octet-stream"

_PREFIXES = {
    "image/png": (b"\x89PNG\r\n\x1a\n",),
    "image/jpeg": (b"\xff\xd8\xff",),
    "image/gif": (b"GIF87a", b"GIF89a"),
    "image/bmp": (b"BM",),
    "image/tiff": (b"II*\x00", b"MM\x00*"),
    "video/webm": (b"\x1aE\xdf\xa3",),
    "audio/ogg": (b"OggS",),
    "audio/flac": (b"fLaC",),
    "audio/mpeg": (b"ID3", b"\xff\xfb", b"\xff\xf3", b"\xff\xf2"),
}
_RIFF = {b"WEBP": "image/webp", b"WAVE": "audio/wav", b"AVI ": "video/x-msvideo"}
_BRANDS = {
    b"avif": "image/avif",
    b"avis": "image/avif",
    b"heic": "image/heic",
    b"heix": "image/heic",
    b"mif1": "image/heif",
    b"M4A ": "audio/mp4",
    b"qt  ": "video/quicktime",
}
_PAGES = (b"<!doctype html", b"<html", b"<head", b"<body", b"<script", b"<?xml", b"<svg")


def detect(data: bytes) -> str:
    for kind, prefixes in _PREFIXES.items():
        if data.startswith(prefixes):
            return kind
    if data[:4] == b"RIFF":
        return _RIFF.get(data[8:12], UNKNOWN)
    if data[4:8] == b"ftyp":
        return _BRANDS.get(data[8:12], "video/mp4")
    return UNKNOWN


def is_page(data: bytes) -> bool:
    """Return whether the bytes are HTML or XML, which origins often answer in place of an image."""
    return data[:256].lstrip(b"\xef\xbb\xbf \t\r\n").lower().startswith(_PAGES)


_HEADER_CHARACTERS = 512
_INVALID = re.compile(r"[^!-~]|%(?![0-9a-fA-F]{2})")
_PIECE = 64 * 1024  # characters that are decoded at a time, which bounds memory and how long other threads wait
MAX_ESCAPES = 1_000_000


def decode(uri: str, max_bytes: int) -> bytes:
    """Return the bytes of a ``data:`` URI; its declared media type is not trustworthy. Raises ``MediaError``."""
    comma = uri.find(",", 0, _HEADER_CHARACTERS)
    if uri[:5].lower() != "data:" or comma < 0:
        raise MediaError("data_uri", "The data: URI has no comma between media type and data.")
    _, separator, last = uri[5:comma].rpartition(";")
    based = bool(separator) and last.strip().lower() == "base64"
    payload = uri[comma + 1 :]
    if "%" in payload or not based:
        _bound(len(payload), (4 if based else 3) * max_bytes + 12, max_bytes)
        raw = _unquote(payload)
    else:
        _bound(len(payload) // 4 * 3, max_bytes + 2, max_bytes)
        raw = None
    if based:
        try:
            data = pybase64.b64decode(payload if raw is None else raw, validate=True)
        except ValueError as error:  # binascii.Error, or text that is not ASCII
            raise MediaError("data_uri", "The data: URI is not valid base64.") from error
    else:
        assert raw is not None
        data = raw
    bound(len(data), max_bytes)
    if not data:
        raise MediaError("empty", "The data: URI is empty.")
    return data


def _unquote(payload: str) -> bytes:
    if payload.count("%") > MAX_ESCAPES:
        raise MediaError("data_uri", f"The data: URI holds more than {MAX_ESCAPES} percent escapes; send base64.")
    raw, at = bytearray(), 0
    while at < len(payload):
        piece = payload[at : at + _PIECE]
        if at + _PIECE < len(payload) and (escape := piece.rfind("%", _PIECE - 2)) > 0:
            piece = piece[:escape]
        if _INVALID.search(piece):
            raise MediaError("data_uri", "The data: URI holds a character that must be percent-encoded.")
        raw += unquote_to_bytes(piece)
        at += len(piece)
    return bytes(raw)


def bound(size: int, max_bytes: int) -> None:
    _bound(size, max_bytes, max_bytes)


def _bound(size: int, limit: int, max_bytes: int) -> None:
    if size > limit:
        raise MediaError("too_large", f"The media is larger than the limit of {max_bytes} bytes.")
