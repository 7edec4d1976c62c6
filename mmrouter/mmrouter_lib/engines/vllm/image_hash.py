"""Recompute vLLM's identifier of an image without a ``uuid`` (docs/engine-facts/vllm.md#default-image-hash).

It hashes the encoded file, the engine's ``--model`` text and the request's processor options, each with its length and
kind. The router sends a ``uuid`` with every image and does not use this; ``mmrouter replay`` explains requests that
bypassed the router with it.
"""

import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from blake3 import blake3

_NONE, _SEQUENCE, _MAPPING, _LEAF = b"\x00", b"\x01", b"\x02", b"\x03"


def default_identifier(
    image: bytes | None,
    *,
    model: str,
    uuid: str | None = None,
    processor_options: Mapping[str, Any] | None = None,
    media_options: Mapping[str, Any] | None = None,
) -> str:
    """Return the identifier of an image in block hashes and events.

    ``image`` is the encoded file, ``model`` the engine's ``--model`` text; ``processor_options`` and ``media_options``
    are the request's ``mm_processor_kwargs`` and ``media_io_kwargs``. A ``uuid`` replaces the file; without options
    it is the identifier itself. Valid for images that decode to RGB without conversion. Raises ``ValueError``
    without a file and a uuid, and for an option of a type that JSON does not have.
    """
    only = {"image": media_options["image"]} if media_options and media_options.get("image") else None
    factors = {
        name: value for name, value in (("media_io_kwargs", only), ("mm_processor_kwargs", processor_options)) if value
    }
    if uuid is not None and not factors:
        return uuid
    if uuid is not None:
        item = _LEAF + _frame(uuid.encode())
    elif image is not None:
        item = _LEAF + _frame(b"image") + _LEAF + _frame(image)
    else:
        raise ValueError("an image without a uuid is named by its file, and there is no file")
    hashed = {"image": item, "model_id": b"".join(_value(model))}
    hashed |= {name: b"".join(_value(value)) for name, value in factors.items()}
    hasher = blake3()
    for name in sorted(hashed):
        hasher.update(_frame(name.encode()) + hashed[name])
    return hasher.hexdigest()


def _value(value: object) -> Iterator[bytes]:
    match value:
        case None:
            yield _NONE
        case str():
            yield _LEAF + _frame(value.encode())
        case bool():
            yield _LEAF + _frame(bytes([value]))
        case int():
            yield _LEAF + _frame(value.to_bytes(8, "little", signed=True))
        case float():
            yield _LEAF + _frame(struct.pack("<d", value))
        case Mapping():
            yield _MAPPING + len(value).to_bytes(8, "little")
            for key, item in value.items():
                yield _frame(str(key).encode())
                yield from _value(item)
        case Sequence():
            yield _SEQUENCE + len(value).to_bytes(8, "little")
            for item in value:
                yield from _value(item)
        case _:
            raise ValueError(f"an option of type {type(value).__name__} is not modelled")


def _frame(raw: bytes) -> bytes:
    return len(raw).to_bytes(8, "little") + raw
