"""Open, create, lock and name files below the root; symbolic links are never followed.

Locks are flock(2): they belong to an open file and the kernel drops them when its process ends, however it ends. A
child that is forked without exec shares them, so it must not outlive its parent.
"""

import errno
import fcntl
import mmap
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

from mmrouter_handover.shm import slot_format
from mmrouter_handover.shm.slot_format import PAGE_BYTES, HandOverError

POOL_PREFIX = "pool-"
SLOT_PREFIX = "slot-"
PLAIN_PREFIX = "plain-"
DRAFT_PREFIX = "draft-"
"""Prefix of a plain file that is still being written."""
OWNER = "owner"
FOLDER_MODE = 0o2770
FILE_MODE = 0o660
"""Readers are other users of the same group: they lock slots and write acknowledgements."""
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NEW = _FILE | os.O_CREAT | os.O_EXCL

PlainState = Literal["writing", "leased", "expired"]


def clock() -> float:
    """Return seconds since the node booted: the same for all its pods, and never set back."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@contextmanager
def folder(path: str | Path, *, below: int | None = None) -> Iterator[int]:
    """Open a folder, relative to the open folder ``below`` if given. Raises ``OSError``."""
    number = os.open(path, FOLDER, dir_fd=below)
    try:
        yield number
    finally:
        os.close(number)


def open_file(name: str, below: int) -> int:
    """Open an existing regular file for reading and writing. Raises ``OSError``, also for any other kind of file."""
    number = os.open(name, _FILE, dir_fd=below)
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise OSError(errno.ENOTSUP, "not a regular file")
    return number


def create_file(name: str, below: int, mode: int = FILE_MODE) -> int:
    """Create a file that must not exist. Raises ``OSError``."""
    number = os.open(name, _NEW, mode, dir_fd=below)
    try:
        os.fchmod(number, mode)  # independent of the umask
    except OSError:
        os.close(number)
        raise
    return number


def open_slot(root: int, path: str) -> int:
    """Open ``<pool>/<slot>`` below the root. Raises :class:`HandOverError`."""
    pool, _, name = path.partition("/")
    is_slot = pool.startswith(POOL_PREFIX) and name.startswith(SLOT_PREFIX)
    if not is_slot or "/" in name or "\0" in path:
        raise HandOverError("refused", f"{path[:80]!r} is no slot")
    try:
        with folder(pool, below=root) as number:
            return open_file(name, number)
    except FileNotFoundError as error:
        raise HandOverError("gone", f"there is no {path}") from error
    except OSError as error:  # a link, a folder, a pipe, no permission
        raise HandOverError("refused", f"{path}: {error.strerror}") from error


def lock(number: int, *, exclusive: bool) -> bool:
    """Take a lock without waiting; return whether it was free."""
    try:
        fcntl.flock(number, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def unlock(number: int) -> None:
    fcntl.flock(number, fcntl.LOCK_UN)


def is_exported(mapping: mmap.mmap) -> bool:
    """Whether any buffer points into a mapping: memoryviews, slices of them, arrays.

    A mapping counts every export and refuses to be resized while there are any. The size makes no system call.
    """
    try:
        mapping.resize(-1)
    except BufferError:
        return True
    except (ValueError, TypeError):  # the latter of a read-only one
        return False
    raise AssertionError("resize(-1) succeeded")


def remove(name: str, below: int, number: int) -> int:
    """Free a slot's memory, even while a reader keeps it mapped, and remove its name; return the bytes freed.

    The caller holds the exclusive lock: a reader touches its mapping only under the shared one and checks its size.
    """
    freed = os.fstat(number).st_blocks * 512
    os.ftruncate(number, 0)
    with suppress(FileNotFoundError):
        os.unlink(name, dir_fd=below)
    return freed


def plain_since(name: str) -> float | None:
    """Return when a plain file or its draft was made; ``None`` if the name does not contain it."""
    try:
        return int(name.removeprefix(DRAFT_PREFIX).removeprefix(PLAIN_PREFIX).partition("-")[0], 16) / 1000
    except ValueError:
        return None


def is_plain(name: str) -> bool:
    return name.startswith((PLAIN_PREFIX, DRAFT_PREFIX))


def plain_state(name: str, modified: float, lives: bool, now: float) -> PlainState:
    """Return the state of a plain file whose time of modification, its deadline, is ``modified``.

    A living writer removes its files itself, so their deadlines do not matter. A deadline further away than the longest
    lease is ignored: it would keep its bytes for ever.
    """
    if name.startswith(DRAFT_PREFIX):
        return "writing"
    if lives or now < modified <= now + slot_format.MAX_LEASE_SECONDS + slot_format.CLOCK_SLACK_SECONDS:
        return "leased"
    return "expired"


class MappedSlot:
    """A slot file with all its pages allocated and mapped. It is created with its exclusive lock held."""

    def __init__(self, folder: int, pool: str, name: str, size: int) -> None:
        """Create the file of ``size`` bytes, header included. Raises ``OSError`` (ENOSPC) and leaves nothing behind."""
        self.name, self.path, self._folder = name, f"{pool}/{name}", folder
        self.size = size
        self.generation, self.deadline, self.published = 0, 0.0, False  # of the last lease
        self.round = 0  # trimming round of the pool in which the slot became idle
        self.number = create_file(name, folder)
        try:
            lock(self.number, exclusive=True)
            os.posix_fallocate(self.number, 0, size)
            self.map = mmap.mmap(self.number, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        except OSError:
            remove(name, folder, self.number)
            os.close(self.number)
            raise
        self.map[: slot_format.HEADER_BYTES] = slot_format.encode_page(
            slot_format.Header(pool, name, 0, 0.0, 0.0, 0, 0)
        )

    def payload(self, length: int) -> memoryview:
        return memoryview(self.map)[PAGE_BYTES : PAGE_BYTES + length]

    def begin(self, generation: int) -> None:
        self.generation, self.published = generation, False
        slot_format.GENERATION.pack_into(self.map, slot_format.WRITTEN_AT, generation)

    def publish(self, header: slot_format.Header) -> None:
        self.map[: slot_format.HEADER_BYTES] = slot_format.encode_page(header)
        self.deadline, self.published = header.deadline, True
        unlock(self.number)

    def release(self) -> None:
        """Mark the lease as released; allowed while a reader has the slot."""
        slot_format.GENERATION.pack_into(self.map, slot_format.RELEASED_AT, self.generation)

    def is_over(self, now: float) -> bool:
        """Whether the lease has ended. Reusing the slot also requires its exclusive lock."""
        return (
            self.generation in slot_format.ACKED_RELEASED.unpack_from(self.map, slot_format.ACKED_AT)
            or now >= self.deadline
        )

    @property
    def is_whole(self) -> bool:
        """Whether the file still has its pages. Touching the mapping of a truncated file would kill the process."""
        return self.map.size() == self.size

    def remove(self) -> None:
        """Free the memory and the name. The caller has the exclusive lock."""
        remove(self.name, self._folder, self.number)
        self.close()

    def close(self) -> None:
        with suppress(BufferError):  # a lease's buffer is still in use: the mapping goes with it
            self.map.close()
        os.close(self.number)
