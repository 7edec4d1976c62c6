"""How another router hands processed inputs over: framed into one buffer, copied to a fresh segment, copied out.

As facts about its source have it: msgpack for what describes a tensor, little-endian lengths around the parts, one
``shared_memory`` segment for each item, ``bytes`` of it on the other side. Nothing of its code is here.
"""

import struct
from multiprocessing import shared_memory

import msgspec

_COUNT = struct.Struct("<I")
_LENGTH = struct.Struct("<Q")


def frame(payload: bytes) -> bytes:
    """Return one buffer: what the payload is, and the payload."""
    described = msgspec.msgpack.encode({"pixel_values": ["uint8", [len(payload)], 1]})
    sizes = _LENGTH.pack(len(described)), _LENGTH.pack(len(payload))
    return b"".join((_COUNT.pack(2), sizes[0], described, sizes[1], payload))


def send(payload: bytes) -> tuple[shared_memory.SharedMemory, int]:
    """Return a fresh segment that holds the framed payload, and how many bytes of it count."""
    framed = frame(payload)
    segment = shared_memory.SharedMemory(create=True, size=len(framed))
    assert segment.buf is not None
    segment.buf[: len(framed)] = framed
    return segment, len(framed)


def parts(raw: bytes) -> tuple[bytes, memoryview]:
    """Return what was framed. Raises ``ValueError`` where it is not two parts and nothing more."""
    view, place = memoryview(raw), _COUNT.size
    found = []
    for _ in range(_COUNT.unpack_from(raw)[0]):
        (length,) = _LENGTH.unpack_from(raw, place)
        place += _LENGTH.size
        found.append(view[place : place + length])
        place += length
    if len(found) != 2 or place != len(raw):
        raise ValueError("not a framed payload")
    msgspec.msgpack.decode(found[0])
    return bytes(found[0]), found[1]
