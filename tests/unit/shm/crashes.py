"""What a test knows of files without asking the library, and what the kernel does to a process that is killed."""

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from mmrouter_handover.shm import HandOverError, Lease, Plains, Pool, Reader

Found = TypeVar("Found")


def taken(root: Path) -> int:
    """Bytes of all files below a folder, as the kernel counts them."""
    return sum(
        os.lstat(os.path.join(folder, name)).st_blocks * 512 for folder, _, names in os.walk(root) for name in names
    )


def crash_writer(pool: Pool, drafts: Iterable[Lease] = ()) -> None:
    """Close everything that a pool has open and say nothing to anybody, as a kill does.

    ``drafts``: leases that are not published; a kill takes their buffers too, which else keep the mapping and its lock.
    """
    for draft in drafts:
        draft.buffer.release()
    for slot in (*pool._lent.values(), *pool._idle_slots()):
        slot.close()
    os.close(pool._owner)
    os.close(pool._folder)
    pool._closed = True


def crash_plains(plains: Plains) -> None:
    """The same for a writer of plain files."""
    os.close(plains._owner)
    os.close(plains._folder)
    plains._closed = True


def crash_reader(reader: Reader) -> None:
    """The same for a reader; the views of it must be gone, because a mapping would keep the lock."""
    reader.close()


def tried(call: Callable[[], Found]) -> tuple[Found | None, str]:
    """Return what a call came to, and the reason for which it failed, if it did."""
    try:
        return call(), ""
    except HandOverError as error:
        return None, error.reason


class Clock:
    """A clock that is turned by hand, in seconds."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now
