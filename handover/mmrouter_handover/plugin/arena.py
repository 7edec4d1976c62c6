"""Leases in one run of memory that is registered once: who reads it over the network needs no key per image."""

import mmap
import struct
import threading
from collections.abc import Callable, Sequence

import msgspec

from mmrouter_handover.plugin.wire import HandOverFailed

HEAD_BYTES = 64
"""Before each payload: its generation in eight bytes, the rest unused, so that payloads stay aligned."""
GENERATION = struct.Struct("<Q")


class Part(msgspec.Struct, frozen=True):
    """A leased part: ``offset`` of its head in the arena, ``size`` with the head, the end of its lease."""

    offset: int
    size: int
    generation: int
    deadline: float


class Arena:
    """First fit, ``limit_bytes`` in all. Usable from several threads. ``now`` in seconds, monotonic.

    The memory is there in name only until it is written.
    """

    def __init__(self, limit_bytes: int, now: Callable[[], float]) -> None:
        self.memory = memoryview(mmap.mmap(-1, limit_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        self._limit, self._now = limit_bytes, now
        self._parts: list[Part] = []  # by offset
        self._generation = 0
        self._mutex = threading.Lock()

    def lease(self, length: int, seconds: float) -> Part:
        """Lend room for ``length`` bytes. Raises :class:`HandOverFailed` ``full``, ``large`` where it never fits."""
        size = HEAD_BYTES + -(-length // HEAD_BYTES) * HEAD_BYTES
        if size > self._limit:
            raise HandOverFailed("large", f"{length} bytes, the arena has {self._limit}")
        with self._mutex:
            self._expire()
            found = first_fit([(part.offset, part.size) for part in self._parts], self._limit, size)
            if found is None:
                raise HandOverFailed("full", f"{self.leased_bytes} of {self._limit} bytes are lent")
            place, offset = found
            self._generation += 1
            made = Part(offset, size, self._generation, self._now() + seconds)
            GENERATION.pack_into(self.memory, offset, made.generation)
            self._parts.insert(place, made)
            return made

    def payload(self, part: Part, length: int) -> memoryview:
        begin = part.offset + HEAD_BYTES
        return self.memory[begin : begin + length]

    def release(self, part: Part) -> bool:
        """End a lease; return whether it stood."""
        with self._mutex:
            if part not in self._parts:
                return False
            self._end(part)
            return True

    def expire(self) -> None:
        with self._mutex:
            self._expire()

    @property
    def leased_bytes(self) -> int:
        return sum(part.size for part in self._parts)

    def _expire(self) -> None:
        now = self._now()
        for part in [part for part in self._parts if part.deadline <= now]:
            self._end(part)

    def _end(self, part: Part) -> None:
        # Before anybody may write there: a reader that finds its generation still there has read what it was to read.
        GENERATION.pack_into(self.memory, part.offset, 0)
        self._parts.remove(part)


def first_fit(taken: Sequence[tuple[int, int]], limit: int, size: int) -> tuple[int, int] | None:
    """Return the place among ``taken`` (offset and size, by offset) and the offset of the first gap of ``size``."""
    begin = 0
    for place, (offset, length) in enumerate([*taken, (limit, 0)]):
        if offset - begin >= size:
            return place, begin
        begin = offset + length
    return None
