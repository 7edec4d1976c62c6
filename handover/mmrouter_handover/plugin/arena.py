"""Lease parts of one memory region that is registered with NIXL once, so remote reads need no key per image."""

import mmap
import struct
import threading
from collections.abc import Callable, Sequence

import msgspec

from mmrouter_handover.plugin.wire import HandOverFailed

HEAD_BYTES = 64
"""Bytes before each payload: its generation in eight bytes, the rest unused, so that payloads stay aligned."""
GENERATION = struct.Struct("<Q")


class ArenaLease(msgspec.Struct, frozen=True):
    """A leased part of the arena: ``offset`` of its head, ``size`` including the head, and its ``deadline``."""

    offset: int
    size: int
    generation: int
    deadline: float


class Arena:
    """First-fit allocator of ``limit_bytes``, usable from several threads. ``now``: monotonic seconds.

    Pages take memory only once they are written.
    """

    def __init__(self, limit_bytes: int, now: Callable[[], float]) -> None:
        self.memory = memoryview(mmap.mmap(-1, limit_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        self._limit, self._now = limit_bytes, now
        self._leases: list[ArenaLease] = []  # by offset
        self._generation = 0
        self._mutex = threading.Lock()

    def lease(self, length: int, seconds: float) -> ArenaLease:
        """Lease ``length`` bytes. Raises :class:`HandOverFailed`: ``full``, or ``large`` if it never fits."""
        size = HEAD_BYTES + -(-length // HEAD_BYTES) * HEAD_BYTES
        if size > self._limit:
            raise HandOverFailed("large", f"{length} bytes, the arena has {self._limit}")
        with self._mutex:
            self._expire()
            gap = first_fit([(lease.offset, lease.size) for lease in self._leases], self._limit, size)
            if gap is None:
                raise HandOverFailed("full", f"{self.leased_bytes} of {self._limit} bytes are leased")
            place, offset = gap
            self._generation += 1
            lease = ArenaLease(offset, size, self._generation, self._now() + seconds)
            GENERATION.pack_into(self.memory, offset, lease.generation)
            self._leases.insert(place, lease)
            return lease

    def payload(self, lease: ArenaLease, length: int) -> memoryview:
        begin = lease.offset + HEAD_BYTES
        return self.memory[begin : begin + length]

    def release(self, lease: ArenaLease) -> bool:
        """End a lease; return whether it was valid."""
        with self._mutex:
            if lease not in self._leases:
                return False
            self._end(lease)
            return True

    def expire(self) -> None:
        with self._mutex:
            self._expire()

    @property
    def leased_bytes(self) -> int:
        return sum(lease.size for lease in self._leases)

    def _expire(self) -> None:
        now = self._now()
        for lease in [lease for lease in self._leases if lease.deadline <= now]:
            self._end(lease)

    def _end(self, lease: ArenaLease) -> None:
        # Before the memory is reused: a reader that finds its generation unchanged has read the leased item.
        GENERATION.pack_into(self.memory, lease.offset, 0)
        self._leases.remove(lease)


def first_fit(taken: Sequence[tuple[int, int]], limit: int, size: int) -> tuple[int, int] | None:
    """Return the index in ``taken`` (offset and size, by offset) and the offset of the first gap of ``size``."""
    begin = 0
    for place, (offset, length) in enumerate([*taken, (limit, 0)]):
        if offset - begin >= size:
            return place, begin
        begin = offset + length
    return None
