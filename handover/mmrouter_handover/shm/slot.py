"""The beginning of a slot: what it says, in which state it is, and when it may be used again. Bytes to values only.

    0   magic, 7 bytes, and the version of the format, 1 byte
    8   generation that a reader has acknowledged, u64
    16  generation that the writer has given up, u64
    24  generation that is written or was written last, u64
    32  length of the frame, u32
    36  CRC-32 of the frame, u32
    40  the frame: a msgpack array, :class:`Header`; zeros after it, to 512 bytes

Numbers are little endian. Acknowledged and given up stand at places of their own, because they are written while others
read; everything else is written only under the exclusive lock, so whoever holds a shared lock reads it whole. The third
generation is written before the first byte of a payload and the frame after the last: where they differ, the writer is
at work, or was killed at it.
"""

import struct
import zlib
from typing import Annotated, Literal

import msgspec

from mmrouter_handover.shm.handles import Check, Count, HandOverError, Shape, require_layout
from mmrouter_handover.shm.slot_sizes import HEADER_BYTES

VERSION = 1
MAGIC = b"mmrslot"
LEASE_SECONDS = 60.0
MAX_LEASE_SECONDS = 3600.0
"""No lease is longer. A header that claims more is corrupt: it would keep its bytes for ever."""
CLOCK_SLACK_SECONDS = 1.0
_ZEROS = bytes(HEADER_BYTES)
_HEAD = struct.Struct("<7sBQQQII")
ACKED_AT = 8
RELEASED_AT = 16
WRITTEN_AT = 24
GENERATION = struct.Struct("<Q")
ACKED_RELEASED = struct.Struct("<QQ")
"""Both, from ``ACKED_AT`` on."""

State = Literal["writing", "leased", "expired", "acknowledged", "released"]
"""``writing``: no handle names it. ``leased``: a handle to it may be read. The others are free."""


class Header(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What the writer says of a slot. ``since`` and ``deadline`` are seconds on the node's CLOCK_BOOTTIME.

    Generation 0 is that of a slot that was never published.
    """

    pool: str
    name: str
    generation: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
    since: Annotated[float, msgspec.Meta(ge=0)]
    deadline: Annotated[float, msgspec.Meta(ge=0)]
    length: Count
    check: Check
    checksum: Annotated[int, msgspec.Meta(ge=0, le=(1 << 32) - 1)]
    dtype: str
    shape: Shape


class Page(msgspec.Struct, frozen=True):
    """The beginning of a slot."""

    header: Header
    acked: int = 0
    released: int = 0
    written: int = 0


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Header)


def encode_page(header: Header) -> bytes:
    """Return the beginning of a slot that is as its header says. Raises ``ValueError`` if that does not fit."""
    frame = _encoder.encode(header)
    head = _HEAD.pack(MAGIC, VERSION, 0, 0, header.generation, len(frame), zlib.crc32(frame))
    if len(head) + len(frame) > HEADER_BYTES:
        raise ValueError(f"a header of {len(frame)} bytes")
    return (head + frame).ljust(HEADER_BYTES, b"\0")


def decode_page(raw: bytes) -> Page:
    """Return what the beginning of a slot says.

    Raises :class:`HandOverError`: ``truncated`` where it ends too early, ``refused`` where it is of another version,
    more than one frame or contradicts itself, ``corrupt`` where it is none.
    """
    if len(raw) < HEADER_BYTES:
        raise HandOverError("truncated", f"a header of {len(raw)} bytes")
    magic, version, acked, released, written, length, checksum = _HEAD.unpack_from(raw)
    if magic != MAGIC:
        raise HandOverError("corrupt", "not a slot")
    if version != VERSION:
        raise HandOverError("refused", f"a slot of version {version}, this is version {VERSION}")
    end = _HEAD.size + length
    if end > HEADER_BYTES:
        raise HandOverError("truncated", f"a frame of {length} bytes goes over its header")
    frame = raw[_HEAD.size : end]
    if zlib.crc32(frame) != checksum:
        raise HandOverError("corrupt", "the header's checksum differs")
    if raw[end:HEADER_BYTES] != _ZEROS[end:]:
        raise HandOverError("refused", "bytes after the header")
    try:
        header = _decoder.decode(frame)
        require_layout(header.length, header.dtype, header.shape)
    except (ValueError, RecursionError) as error:
        raise HandOverError("refused", f"the header cannot be read: {error}") from error
    if not 0 <= header.deadline - header.since <= MAX_LEASE_SECONDS:
        raise HandOverError("refused", f"a lease of {header.deadline - header.since:.0f} s")
    return Page(header, acked, released, written)


def state_of(page: Page, now: float) -> State:
    """Return the state of a slot at ``now``, without knowing who holds its lock."""
    header = page.header
    if page.written != header.generation:
        return "writing"
    if page.released == header.generation:
        return "released"
    if page.acked == header.generation:
        return "acknowledged"
    return "expired" if now >= header.deadline or header.since > now + CLOCK_SLACK_SECONDS else "leased"


def is_over(generation: int, deadline: float, acked: int, released: int, now: float) -> bool:
    """Whether no handle to a published slot is to be honoured. Whoever takes it must also get its exclusive lock."""
    return generation in (acked, released) or now >= deadline
