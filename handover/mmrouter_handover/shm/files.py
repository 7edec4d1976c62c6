"""Files and locks below the root. Names are opened part by part and never through a link.

Locks are flock(2): they belong to an open file and go with the process that opened it, whatever ends it. A child
that is forked without exec shares them, so it must not outlive its parent.
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

from mmrouter_handover.shm.handles import HandOverError

POOL_PREFIX = "pool-"
SLOT_PREFIX = "slot-"
PLAIN_PREFIX = "plain-"
DRAFT_PREFIX = "draft-"
"""A plain file that is not whole yet."""
OWNER = "owner"
FOLDER_MODE = 0o2770
FILE_MODE = 0o660
"""Readers are other users of the same group: they lock, and write what they acknowledge."""
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_NEW = _FILE | os.O_CREAT | os.O_EXCL


def clock() -> float:
    """Return seconds since the node booted: the same for all its pods, and never set back."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@contextmanager
def folder(path: str | Path, *, below: int | None = None) -> Iterator[int]:
    """Open a folder, ``below`` another one that is open already. Raises ``OSError``."""
    number = os.open(path, FOLDER, dir_fd=below)
    try:
        yield number
    finally:
        os.close(number)


def open_file(name: str, below: int) -> int:
    """Open an existing regular file for reading and writing. Raises ``OSError``, also where it is something else."""
    number = os.open(name, _FILE, dir_fd=below)
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise OSError(errno.ENOTSUP, "not a regular file")
    return number


def create_file(name: str, below: int, mode: int = FILE_MODE) -> int:
    """Make a file that must not exist. Raises ``OSError``."""
    number = os.open(name, _NEW, mode, dir_fd=below)
    try:
        os.fchmod(number, mode)  # whatever the umask says
    except OSError:
        os.close(number)
        raise
    return number


def open_slot(root: int, path: str) -> int:
    """Open ``<pool>/<slot>`` below the root. Raises :class:`HandOverError`."""
    pool, _, name = path.partition("/")
    if not is_slot_path(pool, name):
        raise HandOverError("refused", f"{path[:80]!r} is no slot")
    try:
        with folder(pool, below=root) as number:
            return open_file(name, number)
    except FileNotFoundError as error:
        raise HandOverError("gone", f"there is no {path}") from error
    except OSError as error:  # a link, a folder, a pipe, no permission
        raise HandOverError("refused", f"{path}: {error.strerror}") from error


def is_slot_path(pool: str, name: str) -> bool:
    """Whether the two parts name a slot and nothing else."""
    return pool.startswith(POOL_PREFIX) and name.startswith(SLOT_PREFIX) and "/" not in name and "\0" not in pool + name


def lock(number: int, *, exclusive: bool) -> bool:
    """Take a lock without waiting; return whether it was free."""
    try:
        fcntl.flock(number, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def lock_waiting(number: int, *, exclusive: bool) -> None:
    """Take a lock that others hold for microseconds only."""
    fcntl.flock(number, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)


def unlock(number: int) -> None:
    """Give a lock up."""
    fcntl.flock(number, fcntl.LOCK_UN)


def is_exported(mapping: mmap.mmap) -> bool:
    """Whether any buffer points into a mapping: memoryviews, parts of them, arrays.

    A memoryview does not count its parts, a mapping counts everything, and says so when it is asked to change its size.
    It is asked for one that there cannot be, so it looks at nothing else and asks nothing of the kernel.
    """
    try:
        mapping.resize(-1)
    except BufferError:
        return True
    except (ValueError, TypeError):  # the latter of a read-only one
        return False
    raise AssertionError("a mapping of less than no bytes")


def remove(name: str, below: int, number: int) -> int:
    """Free a slot's memory, also where a reader keeps it mapped, and remove its name; return the bytes that it had.

    The caller holds its exclusive lock: a reader touches the mapping only under a shared one, after a look at the size.
    """
    freed = os.fstat(number).st_blocks * 512
    os.ftruncate(number, 0)
    with suppress(FileNotFoundError):
        os.unlink(name, dir_fd=below)
    return freed
