"""Strict decoder for ``data:`` URIs (RFC 2397). Pure.

Whatever a lenient decoder would skip or guess is an error, because two decoders must not see two images in one URI.
"""

import re
from urllib.parse import unquote_to_bytes

import pybase64

from mmrouter_router.media.types import MediaError

_HEADER_CHARACTERS = 512
_PAYLOAD = re.compile(r"(?:[!-$&-~]++|%[0-9a-fA-F]{2})*+")


def decode(uri: str, max_bytes: int) -> bytes:
    """Return the bytes of a ``data:`` URI, at most ``max_bytes``; sizes are checked before decoding.

    Accepts base64 (padded, standard alphabet, no white space) and percent-encoding. The declared media type is not
    trustworthy and is dropped. Raises ``MediaError``.
    """
    comma = uri.find(",", 0, _HEADER_CHARACTERS)
    if uri[:5].lower() != "data:" or comma < 0:
        raise MediaError("data_uri", "The data: URI has no comma between media type and data.")
    _, separator, last = uri[5:comma].rpartition(";")
    based = bool(separator) and last.strip().lower() == "base64"
    payload = uri[comma + 1 :]
    if "%" in payload or not based:
        _bound(len(payload), (4 if based else 3) * max_bytes + 12, max_bytes)
        if not _PAYLOAD.fullmatch(payload):
            raise MediaError("data_uri", "The data: URI holds a character that must be percent-encoded.")
        raw = unquote_to_bytes(payload)
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


def bound(size: int, max_bytes: int) -> None:
    """Raise ``MediaError`` for more bytes than one medium may have."""
    _bound(size, max_bytes, max_bytes)


def _bound(size: int, limit: int, max_bytes: int) -> None:
    if size > limit:
        raise MediaError("too_large", f"The media is larger than the limit of {max_bytes} bytes.")
