"""One slot as its writer has it: an open file, its mapping, and the lease that it stands under."""

import contextlib
import mmap
import os

import msgspec

from mmrouter_transfer import files
from mmrouter_transfer.sizes import PAGE_BYTES
from mmrouter_transfer.slot import (
    ACKED_AT,
    GENERATION,
    RELEASED_AT,
    Header,
    Page,
    encode_page,
    may_be_used_again,
    state_of,
)


class MappedSlot:
    """A slot file whose pages are there. Made with its exclusive lock held."""

    def __init__(self, folder: int, pool: str, name: str, size: int) -> None:
        """Make the file: ``size`` bytes with the header. Raises ``OSError`` (ENOSPC) and leaves nothing behind."""
        self.name = name
        self.size = size
        self.header = Header(pool, name, 1, False, 0.0, 0.0, 0, "sampled", 0, "uint8", (0,))
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

    @property
    def class_bytes(self) -> int:
        return self.size - PAGE_BYTES

    def payload(self, length: int) -> memoryview:
        """Return the writable payload."""
        with memoryview(self._map) as whole:
            return whole[PAGE_BYTES : PAGE_BYTES + length]

    @property
    def used(self) -> bool:
        """Whether anything of this process points into the slot: a payload, a part of it, an array over it."""
        return self.whole and files.is_exported(self._map)

    def write(self, header: Header) -> None:
        """Say what the slot holds. The caller has the exclusive lock."""
        self.header = header
        self._map[:PAGE_BYTES] = encode_page(header)

    def give_up(self) -> None:
        """Say that the lease is over; also while somebody reads."""
        GENERATION.pack_into(self._map, RELEASED_AT, self.header.generation)

    def free(self, now: float) -> bool:
        """Whether the lease is over. Readers may still be in the slot."""
        (acked,) = GENERATION.unpack_from(self._map, ACKED_AT)
        (released,) = GENERATION.unpack_from(self._map, RELEASED_AT)
        return may_be_used_again(state_of(Page(self.header, acked, released), now))

    def take(self) -> bool:
        """Get the exclusive lock; false where somebody reads."""
        return files.lock(self._number, exclusive=True)

    @property
    def whole(self) -> bool:
        """Whether the file still has its pages. To touch the mapping of one that was cut would end the process."""
        return os.fstat(self._number).st_size == self.size

    def share(self) -> None:
        """Give the exclusive lock up: readers may come."""
        files.unlock(self._number)

    def remove(self) -> None:
        """Free the memory and the name. The caller has the exclusive lock."""
        files.remove(self.name, self._folder, self._number)
        self.close()

    def close(self) -> None:
        """Let go of the file, and leave it where it is."""
        with contextlib.suppress(BufferError):  # a lease's buffer is still with the caller: it goes with that
            self._map.close()
        os.close(self._number)


def begin(header: Header, generation: int, since: float, deadline: float, length: int) -> Header:
    """Return the header of a slot that is being written: no handle names it yet."""
    return msgspec.structs.replace(
        header,
        generation=generation,
        ready=False,
        since=since,
        deadline=deadline,
        length=length,
        dtype="uint8",
        shape=(),
    )
