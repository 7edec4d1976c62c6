"""The first page of a slot: what it says, in which state it is, and when it may be used again. Bytes to values only.

    0   magic, 7 bytes, and the version of the format, 1 byte
    8   generation that a reader has acknowledged, u64
    16  generation that the writer has given up, u64
    24  length of the frame, u32
    28  CRC-32 of the frame, u32
    32  the frame: a msgpack array, :class:`Header`; zeros after it

Numbers are little endian. The two generations stand at places of their own, because they are written while others read
the page; everything else is written only under the exclusive lock, so whoever holds a shared lock reads it whole.
"""

import struct
import zlib
from typing import Annotated, Literal

import msgspec

from mmrouter_transfer.sizes import PAGE_BYTES
from mmrouter_transfer.values import Check, Count, HandOverError, Shape, require_layout

VERSION = 1
MAGIC = b"mmrslot"
MAX_LEASE_SECONDS = 3600.0
"""No lease is longer. A header that claims more is corrupt: it would keep its bytes for ever."""
CLOCK_SLACK_SECONDS = 1.0
_ZEROS = bytes(PAGE_BYTES)
_HEAD = struct.Struct("<7sBQQII")
ACKED_AT = 8
RELEASED_AT = 16
GENERATION = struct.Struct("<Q")

State = Literal["writing", "leased", "expired", "acknowledged", "released"]
"""``writing``: nobody knows it yet. ``leased``: a handle to it may be read. The others are free."""


class Header(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What the writer says of a slot. ``since`` and ``deadline`` are seconds on the node's CLOCK_BOOTTIME."""

    pool: str
    name: str
    generation: Annotated[int, msgspec.Meta(ge=1, le=(1 << 63) - 1)]
    ready: bool
    since: Annotated[float, msgspec.Meta(ge=0)]
    deadline: Annotated[float, msgspec.Meta(ge=0)]
    length: Count
    check: Check
    checksum: Annotated[int, msgspec.Meta(ge=0, le=(1 << 32) - 1)]
    dtype: str
    shape: Shape

    def __post_init__(self) -> None:
        if not 0 <= self.deadline - self.since <= MAX_LEASE_SECONDS:
            raise ValueError(f"a lease of {self.deadline - self.since:.0f} s")
        if self.ready:
            require_layout(self.length, self.dtype, self.shape)


class Page(msgspec.Struct, frozen=True):
    """A slot's first page."""

    header: Header
    acked: int
    released: int


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Header)


def encode_page(header: Header) -> bytes:
    """Return the page of a slot that nobody has acknowledged or given up. Raises ``ValueError`` if it does not fit."""
    frame = _encoder.encode(header)
    head = _HEAD.pack(MAGIC, VERSION, 0, 0, len(frame), zlib.crc32(frame))
    if len(head) + len(frame) > PAGE_BYTES:
        raise ValueError(f"a header of {len(frame)} bytes")
    return (head + frame).ljust(PAGE_BYTES, b"\0")


def decode_page(raw: bytes) -> Page:
    """Return what a page says.

    Raises :class:`HandOverError`: ``truncated`` where it ends too early, ``refused`` where it is of another version or
    more than one frame, ``corrupt`` where it is none.
    """
    if len(raw) < PAGE_BYTES:
        raise HandOverError("truncated", f"a header page of {len(raw)} bytes")
    magic, version, acked, released, length, checksum = _HEAD.unpack_from(raw)
    if magic != MAGIC:
        raise HandOverError("corrupt", "not a slot")
    if version != VERSION:
        raise HandOverError("refused", f"a slot of version {version}, this is version {VERSION}")
    end = _HEAD.size + length
    if end > PAGE_BYTES:
        raise HandOverError("truncated", f"a frame of {length} bytes goes over its page")
    frame = raw[_HEAD.size : end]
    if zlib.crc32(frame) != checksum:
        raise HandOverError("corrupt", "the header's checksum differs")
    if raw[end:PAGE_BYTES] != _ZEROS[end:]:
        raise HandOverError("refused", "bytes after the header")
    try:
        header = _decoder.decode(frame)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise HandOverError("refused", f"the header cannot be read: {error}") from error
    return Page(header, acked, released)


def state_of(page: Page, now: float) -> State:
    """Return the state of a slot at ``now``, without knowing who holds its lock."""
    header = page.header
    if page.released == header.generation:
        return "released"
    if not header.ready:
        return "writing"
    if page.acked == header.generation:
        return "acknowledged"
    return "expired" if now >= header.deadline or header.since > now + CLOCK_SLACK_SECONDS else "leased"


def may_be_used_again(state: State) -> bool:
    """Whether no handle to the slot is to be honoured. Whoever takes it must also get its exclusive lock."""
    return state in ("expired", "acknowledged", "released")
