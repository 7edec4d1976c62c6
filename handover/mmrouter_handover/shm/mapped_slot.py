"""One slot as its writer has it: an open file, its mapping, and its current lease."""

import contextlib
import mmap
import os

from mmrouter_handover.shm import files
from mmrouter_handover.shm.slot_format import (
    ACKED_AT,
    ACKED_RELEASED,
    GENERATION,
    PAGE_BYTES,
    RELEASED_AT,
    WRITTEN_AT,
    Header,
    encode_page,
    is_over,
)


class MappedSlot:
    """A slot file with all its pages allocated and mapped. It is created with its exclusive lock held."""

    def __init__(self, folder: int, pool: str, name: str, size: int) -> None:
        """Create the file of ``size`` bytes, header included. Raises ``OSError`` (ENOSPC) and leaves nothing behind."""
        self.name = name
        self.size = size
        self.class_bytes = size - PAGE_BYTES
        self.path = f"{pool}/{name}"
        self.generation = 0
        """Generation of the last lease."""
        self.deadline = 0.0
        self.published = False
        self.round = 0
        """Trimming round of the pool in which the slot became idle."""
        self._folder = folder
        self._number = files.create_file(name, folder)
        try:
            files.lock(self._number, exclusive=True)
            os.posix_fallocate(self._number, 0, size)
            self._map = mmap.mmap(self._number, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        except OSError:
            files.remove(name, folder, self._number)
            os.close(self._number)
            raise
        self._write(Header(pool, name, 0, 0.0, 0.0, 0, "sampled", 0, "uint8", (0,)))

    def payload(self, length: int) -> memoryview:
        """Return the writable payload."""
        return memoryview(self._map)[PAGE_BYTES : PAGE_BYTES + length]

    @property
    def is_used(self) -> bool:
        """Whether a payload view, a slice or an array of this process points into the slot, which is whole."""
        return files.is_exported(self._map)

    def begin(self, generation: int) -> None:
        """Mark that a payload is being written. The caller has the exclusive lock."""
        self.generation, self.published = generation, False
        GENERATION.pack_into(self._map, WRITTEN_AT, generation)

    def publish(self, header: Header) -> None:
        """Write the header, and unlock the slot for readers."""
        self._write(header)
        self.deadline, self.published = header.deadline, True
        files.unlock(self._number)

    def _write(self, header: Header) -> None:
        raw = encode_page(header)
        self._map[: len(raw)] = raw

    def release(self) -> None:
        """Mark the lease as released; allowed while a reader has the slot."""
        GENERATION.pack_into(self._map, RELEASED_AT, self.generation)

    def is_over(self, now: float) -> bool:
        """Whether the lease is over. Readers may still have the slot."""
        acked, released = ACKED_RELEASED.unpack_from(self._map, ACKED_AT)
        return is_over(self.generation, self.deadline, acked, released, now)

    def try_lock(self) -> bool:
        """Get the exclusive lock; return false while a reader has the slot."""
        return files.lock(self._number, exclusive=True)

    @property
    def is_whole(self) -> bool:
        """Whether the file still has its pages. Touching the mapping of a truncated file would kill the process."""
        return self._map.size() == self.size

    def remove(self) -> None:
        """Free the memory and the name. The caller has the exclusive lock."""
        files.remove(self.name, self._folder, self._number)
        self.close()

    def close(self) -> None:
        """Close the file and leave it where it is."""
        with contextlib.suppress(BufferError):  # a lease's buffer is still in use: the mapping goes with it
            self._map.close()
        os.close(self._number)
