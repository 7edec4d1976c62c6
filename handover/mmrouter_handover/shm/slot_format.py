"""What travels from a writer to a reader (the handle), and the binary format of a slot file.

    0   magic, 7 bytes, and the version of the format, 1 byte
    8   generation that a reader has acknowledged, u64
    16  generation that the writer has released, u64
    24  generation that is being written or was written last, u64
    32  length of the frame, u32
    36  CRC-32 of the frame, u32
    40  the frame: a msgpack array, :class:`Header`; zeros after it, to 512 bytes
    4096  the payload

Numbers are little endian. The acknowledged and the released generation have fields of their own, because they are
written while others read; everything else is written under the exclusive lock only, so a holder of the shared lock
reads a consistent header. The third generation is written before the first byte of a payload and the frame after the
last: where they differ, the writer is at work, or was killed at it.
"""

import os
import struct
import zlib
from typing import Annotated, Any, Literal

import msgspec

Reason = Literal["stale", "gone", "corrupt", "truncated", "refused", "full"]
"""Why a hand-over failed.

``stale``: the slot holds, or is about to hold, something else. ``gone``: it is removed. ``corrupt``: its contents are
not what the handle says. ``truncated``: it ends too early. ``refused``: the handle or the slot may not be read: another
version, a path that leaves the root, a link. ``full``: the writer has no room.
"""

PATTERN = r"^pool-[A-Za-z0-9._-]{1,128}/slot-[0-9a-f]{1,16}\Z"
MAX_HANDLE_BYTES = 1 << 16

Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
PAGE_BYTES = 4096
"""The header's part of a slot file; the payload begins after it, aligned for every transport."""
HEADER_BYTES = 512
"""Bytes of the first page that are written; the rest stays untouched, because every cache line costs."""
MIN_CLASS_BYTES = 1 << 16
VERSION = 1
MAGIC = b"mmrslot"
LEASE_SECONDS = 60.0
MAX_LEASE_SECONDS = 3600.0
"""Longest lease. A header that claims more is corrupt: it would keep its bytes for ever."""
CLOCK_SLACK_SECONDS = 1.0
ACKED_AT = 8
RELEASED_AT = 16
WRITTEN_AT = 24
GENERATION = struct.Struct("<Q")
ACKED_RELEASED = struct.Struct("<QQ")
"""Both, from ``ACKED_AT`` on."""
SMALL_BYTES = 1 << 16
STRIDE_WORDS = 8191
"""8-byte words between two samples: a little less than sixteen pages, so the offset within a page varies."""
EDGE_BYTES = 64
_ZEROS = bytes(HEADER_BYTES)
_HEAD = struct.Struct("<7sBQQQII")
State = Literal["writing", "leased", "expired", "acknowledged", "released"]
"""``writing``: no handle names it. ``leased``: a handle to it may be read. The others are free."""
_encoder = msgspec.msgpack.Encoder()


class HandOverError(Exception):
    """A hand-over did not take place. ``reason`` is for counters, the message for people.

    ``reason``: a :data:`Reason`, or one of the plugin's (``mmrouter_lib.engines.vllm.plugin_api.Reason``).
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(f"{reason}: {message}")
        self.reason = reason


class Handle(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a payload lies and what it is. All values fit into JSON.

    ``path`` is relative to the root and has two parts, ``generation`` is used once in the life of its pool, ``length``
    is in bytes. ``refetch`` says how to get the same payload without this hand-over; its meaning is the caller's.
    """

    path: Annotated[str, msgspec.Meta(pattern=PATTERN, max_length=160)]
    generation: Annotated[int, msgspec.Meta(ge=1, le=(1 << 63) - 1)]
    length: Count
    checksum: Annotated[int, msgspec.Meta(ge=0, le=(1 << 32) - 1)]
    refetch: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_HANDLE_BYTES)]

    def to_json(self) -> dict[str, Any]:
        return dict(msgspec.to_builtins(self))


def read_handle(value: bytes | str | dict[str, Any]) -> Handle:
    """Return the handle that a peer sent, as JSON text or as parsed JSON. Raises :class:`HandOverError`."""
    try:
        if isinstance(value, dict):
            return msgspec.convert(value, Handle)
        if len(value) > MAX_HANDLE_BYTES:
            raise HandOverError("refused", f"a handle of {len(value)} characters")
        return msgspec.json.decode(value, type=Handle)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise HandOverError("refused", f"not a handle: {error}") from error


def slot_bytes(length: int) -> int:
    """Return the file size of a slot for ``length`` bytes: a page and the next power of two, at least 64 KiB."""
    return PAGE_BYTES + max(MIN_CLASS_BYTES, 1 << (length - 1).bit_length() if length else 0)


def checksum(payload: memoryview) -> int:
    """Return the CRC-32 of at most 64 KiB, or of one word in 64 KiB and the last 64 bytes.

    ``payload`` is flat and of bytes. A sampled checksum detects another payload, one that is half overwritten, any
    exchanged 64 KiB, and a wrong length, but mostly not a few changed bytes: it is a second proof, after the generation
    and the reader's lock.
    """
    if len(payload) <= SMALL_BYTES:
        return zlib.crc32(payload)
    whole = len(payload) & ~7
    sampled = zlib.crc32(payload[:whole].cast("Q")[::STRIDE_WORDS].tobytes(), len(payload) & 0xFFFFFFFF)
    return zlib.crc32(payload[-EDGE_BYTES:], sampled)


class Header(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The writer's description of a slot. ``since`` and ``deadline`` are seconds on the node's CLOCK_BOOTTIME.

    Generation 0 means that the slot was never published.
    """

    pool: str
    name: str
    generation: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
    since: Annotated[float, msgspec.Meta(ge=0)]
    deadline: Annotated[float, msgspec.Meta(ge=0)]
    length: Count
    checksum: Annotated[int, msgspec.Meta(ge=0, le=(1 << 32) - 1)]


class Page(msgspec.Struct, frozen=True):
    """A decoded header page: the header, and the three generations beside it."""

    header: Header
    acked: int = 0
    released: int = 0
    written: int = 0


_decoder = msgspec.msgpack.Decoder(Header)


def encode_page(header: Header) -> bytes:
    """Return the header page of a slot. Raises ``ValueError`` if the header does not fit."""
    frame = _encoder.encode(header)
    head = _HEAD.pack(MAGIC, VERSION, 0, 0, header.generation, len(frame), zlib.crc32(frame))
    if len(head) + len(frame) > HEADER_BYTES:
        raise ValueError(f"a header of {len(frame)} bytes")
    return (head + frame).ljust(HEADER_BYTES, b"\0")


def decode_page(raw: bytes) -> Page:
    """Return the decoded header page of a slot.

    Raises :class:`HandOverError`: ``truncated`` if it ends too early, ``refused`` if it has another version or more
    than one frame, ``corrupt`` if it is not a slot.
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
    except (ValueError, RecursionError) as error:
        raise HandOverError("refused", f"the header cannot be read: {error}") from error
    if not 0 <= header.deadline - header.since <= MAX_LEASE_SECONDS:
        raise HandOverError("refused", f"a lease of {header.deadline - header.since:.0f} s")
    return Page(header, acked, released, written)


def read_page(number: int) -> Page:
    """Return the header page of an open slot. Raises :class:`HandOverError`."""
    return decode_page(os.pread(number, HEADER_BYTES, 0))


def state_of(page: Page, now: float) -> State:
    """Return the state of a slot at ``now``, regardless of its lock."""
    header = page.header
    if page.written != header.generation:
        return "writing"
    if page.released == header.generation:
        return "released"
    if page.acked == header.generation:
        return "acknowledged"
    return "expired" if now >= header.deadline or header.since > now + CLOCK_SLACK_SECONDS else "leased"
