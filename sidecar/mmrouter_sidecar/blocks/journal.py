"""Append-only journal of the ledger's operations, from which a restarted sidecar resumes.

It is needed because engines replay only their last batches and have no snapshot. A record is
``[length u32][XXH3-64 u64][msgpack]``. It is written with one ``write`` before its changes are published, so the
journal is never behind the feed, and a killed process leaves at most one torn record at the end, which is cut off.
Nothing is synced to disk, because the file has the lifetime of the pod.
"""

import os
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
from xxhash import xxh3_64_intdigest

from mmrouter_lib.feed import CanaryReport, ImageObservation
from mmrouter_sidecar.blocks.ledger_ops import LedgerOp

MAGIC = b"mmrouter journal 3\n"  # 2 had other keys in windows of another block size, 1 only groups with attention
_FRAME = struct.Struct("<IQ")
MIN_COMPACT_BYTES = 16 << 20
COMPACT_FACTOR = 4  # the file is rewritten when it is this many times larger than after the last rewrite


class Epoch(msgspec.Struct, frozen=True, array_like=True, tag="epoch"):
    """A new epoch began. ``fresh``: with an empty ledger; otherwise ``ops`` remove what does not belong to it.

    ``last`` is as in :class:`Flush`.
    """

    boot: str
    epoch: int
    fresh: bool
    last: dict[int, tuple[int, int]]
    ops: list[LedgerOp]


class Flush(msgspec.Struct, frozen=True, array_like=True, tag="flush"):
    """Operations up to feed number ``seq``; ``last`` is rank -> (engine number, digest) of the last batch in them.

    ``sightings``: new ones with sentinels, which routers need and engines do not repeat.
    """

    seq: int
    last: dict[int, tuple[int, int]]
    ops: list[LedgerOp]
    sightings: list[ImageObservation] = []


class CanaryOutcome(msgspec.Struct, frozen=True, array_like=True, tag="verdict"):
    """The canary's result."""

    canary: CanaryReport


Record = Epoch | Flush | CanaryOutcome

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Record)


class Journal:
    """One open journal file. A file with another ``fingerprint`` (settings that keys depend on) is discarded."""

    def __init__(self, folder: Path, fingerprint: str) -> None:
        """Open or create the file. Raises ``OSError`` if the folder cannot be written."""
        self._path = folder / "ledger.journal"
        self._head = MAGIC + fingerprint.encode() + b"\n"
        folder.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        self.size = 0
        self._compacted = 0
        self.torn_bytes = 0  # bytes of an incomplete record at the end of the file when it was opened

    def recover(self) -> Iterator[Record]:
        """Yield every complete record in order, then cut off a torn one. Must be exhausted before the first append."""
        raw = self._path.read_bytes()
        if not raw.startswith(self._head):
            os.ftruncate(self._fd, 0)
            os.write(self._fd, self._head)
            self.size = self._compacted = len(self._head)
            return
        place = len(self._head)
        view = memoryview(raw)
        while place + _FRAME.size <= len(raw):
            length, checksum = _FRAME.unpack_from(raw, place)
            body = view[place + _FRAME.size : place + _FRAME.size + length]
            if len(body) < length or xxh3_64_intdigest(body) != checksum:
                break
            try:
                record = _decoder.decode(body)
            except msgspec.DecodeError:
                break  # complete, but of another version
            yield record
            place += _FRAME.size + length
        self.torn_bytes = len(raw) - place
        if self.torn_bytes:
            os.ftruncate(self._fd, place)
        self.size = self._compacted = place

    @property
    def bloated(self) -> bool:
        return self.size > max(MIN_COMPACT_BYTES, COMPACT_FACTOR * self._compacted)

    def append(self, record: Record) -> None:
        """Write one record. After an ``OSError`` the file must be dropped with :meth:`discard`."""
        self.size += _write(self._fd, _framed(record))

    def compact(self, records: Iterable[Record]) -> None:
        """Replace the file by one with ``records`` only. Raises ``OSError``, which leaves the old file in place."""
        new = self._path.with_suffix(".new")
        fd = os.open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
        try:
            size = _write(fd, self._head)
            for record in records:
                size += _write(fd, _framed(record))
            os.replace(new, self._path)  # atomic: a process killed before leaves the old file
        except OSError:
            os.close(fd)
            raise
        os.close(self._fd)
        self._fd, self.size, self._compacted = fd, size, size

    def discard(self) -> None:
        """Remove the file, so that a restart begins empty instead of with stale state."""
        self._path.unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _framed(record: Record) -> bytes:
    body = _encoder.encode(record)
    return _FRAME.pack(len(body), xxh3_64_intdigest(body)) + body


def _write(fd: int, raw: bytes) -> int:
    written = os.write(fd, raw)
    while written < len(raw):  # a full disk or a signal may cut a write short
        written += os.write(fd, raw[written:])
    return written
