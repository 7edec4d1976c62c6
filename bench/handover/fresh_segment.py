"""The peer's hand-over of processed inputs: framed into one buffer, copied to a fresh segment, copied out.

Modelled on another router: msgpack for a tensor's description, little-endian lengths around the parts, one
``shared_memory`` segment per item, and a ``bytes`` copy of it on the other side. None of its code is here.
"""

import struct
from multiprocessing import shared_memory

import msgspec

_COUNT = struct.Struct("<I")
_LENGTH = struct.Struct("<Q")


def frame(payload: bytes) -> bytes:
    """Return one buffer with the payload's description and the payload."""
    described = msgspec.msgpack.encode({"pixel_values": ["uint8", [len(payload)], 1]})
    sizes = _LENGTH.pack(len(described)), _LENGTH.pack(len(payload))
    return b"".join((_COUNT.pack(2), sizes[0], described, sizes[1], payload))


def send(payload: bytes) -> tuple[shared_memory.SharedMemory, int]:
    """Return a fresh segment with the framed payload, and the number of bytes in use."""
    framed = frame(payload)
    segment = shared_memory.SharedMemory(create=True, size=len(framed))
    assert segment.buf is not None
    segment.buf[: len(framed)] = framed
    return segment, len(framed)


def parts(raw: bytes) -> tuple[bytes, memoryview]:
    """Return description and payload. Raises ``ValueError`` for anything but two parts."""
    view, place = memoryview(raw), _COUNT.size
    result = []
    for _ in range(_COUNT.unpack_from(raw)[0]):
        (length,) = _LENGTH.unpack_from(raw, place)
        place += _LENGTH.size
        result.append(view[place : place + length])
        place += length
    if len(result) != 2 or place != len(raw):
        raise ValueError("not a framed payload")
    msgspec.msgpack.decode(result[0])
    return bytes(result[0]), result[1]
