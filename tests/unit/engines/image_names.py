"""vLLM's own identifier of an image without a ``uuid`` (docs/engine-facts/vllm.md#default-image-hash).

The router sends a ``uuid`` with every image, so only captures of requests that bypassed it have such names.
"""

import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from blake3 import blake3

from mmrouter_lib.media_identity import framed

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
    options = {"media_io_kwargs": only, "mm_processor_kwargs": processor_options}
    factors = {name: value for name, value in options.items() if value}
    if uuid is not None and not factors:
        return uuid
    if uuid is not None:
        item = _LEAF + framed(uuid.encode())
    elif image is not None:
        item = _LEAF + framed(b"image") + _LEAF + framed(image)
    else:
        raise ValueError("an image without a uuid is named by its file, and there is no file")
    hashed = {"image": item, "model_id": b"".join(_value(model))}
    hashed |= {name: b"".join(_value(value)) for name, value in factors.items()}
    hasher = blake3()
    for name in sorted(hashed):
        hasher.update(framed(name.encode()) + hashed[name])
    return hasher.hexdigest()


def _value(value: object) -> Iterator[bytes]:
    match value:
        case None:
            yield _NONE
        case str():
            yield _LEAF + framed(value.encode())
        case bool():
            yield _LEAF + framed(bytes([value]))
        case int():
            yield _LEAF + framed(value.to_bytes(8, "little", signed=True))
        case float():
            yield _LEAF + framed(struct.pack("<d", value))
        case Mapping():
            yield _MAPPING + len(value).to_bytes(8, "little")
            for key, item in value.items():
                yield framed(str(key).encode())
                yield from _value(item)
        case Sequence():
            yield _SEQUENCE + len(value).to_bytes(8, "little")
            for item in value:
                yield from _value(item)
        case _:
            raise ValueError(f"an option of type {type(value).__name__} is not modelled")
