"""Media identity: a hash under which two images, videos or recordings of sound count as the same one.

An identity is a 256-bit BLAKE3 hash, keyed per deployment or per tenant, of the encoded bytes *and* of every option
that changes the pixels the engine computes from them. The same bytes by http, by ``data:`` URI or behind two signed
URLs are one identity; other bytes behind the same URL are another. Bytes that are an image and a video, as an animated
GIF is, or a video and its sound have an identity as each: an engine caches what it made of either under that name
alone. vLLM gets it as ``uuid`` and publishes it verbatim in its events (docs/exactness.md), so a predicted and a
published block carry the same 32 bytes.
"""

import re
from collections.abc import Mapping
from typing import Literal

from blake3 import blake3

KEY_BYTES = 32
IDENTITY_BYTES = 32
SCHEME = "m1"  # version of the identity scheme, as a prefix: identities of two schemes never compare equal

_WIRE = re.compile(rf"{SCHEME}-([0-9a-f]{{64}})")

PIXEL_OPTIONS = frozenset({"min_pixels", "max_pixels", "num_crops", "rgba_background_color"})
"""Names of the options that may change pixels. Any other is an error, because its effect is not modelled."""

OptionValue = bool | int | float | str | tuple[int, ...]
Modality = Literal["image", "video", "audio"]
_DOMAINS: dict[Modality, bytes] = {"image": b"media", "video": b"video", "audio": b"audio"}


def media_identity(
    data: bytes, options: Mapping[str, OptionValue], *, key: bytes, modality: Modality = "image"
) -> bytes:
    """Return the 32-byte identity of an encoded image, video or recording.

    ``data`` is the encoded file (JPEG, PNG, ...), ``options`` the processor options in force, ``key`` 32 secret bytes
    of the deployment or derived from them. Raises ``ValueError`` for empty data, a key of another length, or an option
    that is not in :data:`PIXEL_OPTIONS`.
    """
    if not data:
        raise ValueError("media is empty")
    if len(key) != KEY_BYTES:
        raise ValueError(f"identity key must be {KEY_BYTES} bytes, not {len(key)}")
    unknown = sorted(set(options) - PIXEL_OPTIONS)
    if unknown:
        raise ValueError(f"unknown processor option {unknown[0]!r}: its effect on pixels is not modelled")
    hasher = blake3(key=key)
    hasher.update(framed(_DOMAINS[modality]))
    for name in sorted(options):
        hasher.update(framed(name.encode()))
        hasher.update(framed(_canonical(options[name])))
    hasher.update(framed(b"bytes"))
    hasher.update(data)
    return hasher.digest()


def foreign_identity(identifier: str) -> bytes:
    """Return 32 bytes for an identifier that an engine publishes and the router did not set.

    Images of requests that bypass the router are published with the engine's own hash. Their blocks must stay distinct
    from each other and from the router's, but are never predicted, so the hash needs no key.
    """
    return blake3(b"foreign media identifier:" + identifier.encode("utf-8", "surrogatepass")).digest()


def to_wire(identity: bytes) -> str:
    """Return the text form (``m1-`` + 64 lower hex digits) that engines publish verbatim."""
    if len(identity) != IDENTITY_BYTES:
        raise ValueError(f"an identity is {IDENTITY_BYTES} bytes, not {len(identity)}")
    return f"{SCHEME}-{identity.hex()}"


def from_wire(text: str) -> bytes | None:
    """Return the 32 bytes of a text form that :func:`to_wire` made, ``None`` for any other text."""
    match = _WIRE.fullmatch(text)
    return bytes.fromhex(match[1]) if match else None


def framed(value: bytes) -> bytes:
    """Length-prefix a value, so that no two option lists share one encoding."""
    return len(value).to_bytes(8, "little") + value


def _canonical(value: OptionValue) -> bytes:
    # The type is part of the value: True, 1 and "1" are three different options.
    return f"{type(value).__name__}:{value!r}".encode()
