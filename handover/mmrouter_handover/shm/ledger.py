"""Every byte below the root: whose, since when, how much, in which state."""

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from mmrouter_handover.shm import files
from mmrouter_handover.shm import pool_owner as owner
from mmrouter_handover.shm.handles import HandOverError
from mmrouter_handover.shm.plain_file_marks import is_plain, plain_state, since_of
from mmrouter_handover.shm.slot import Page, State, decode_page, state_of
from mmrouter_handover.shm.slot_sizes import HEADER_BYTES

Kind = State | Literal["owner", "unreadable", "other"]


class Entry(msgspec.Struct, frozen=True):
    """One file. ``since`` and ``deadline`` are seconds on the node's CLOCK_BOOTTIME, null where nobody says.

    ``state``: of a slot as in ``slot.State``, or ``unreadable``; of a plain file as in ``marks.PlainState``; ``owner``
    is a writer's owner file, ``other`` no file of this library. ``lives``: whether the writer does. ``bytes``: memory
    that the file takes. ``used``: of a file that is not of this library, when it was read or written last, in seconds
    since 1970.
    """

    path: str
    bytes: int
    state: Kind
    writer: str = ""
    lives: bool = False
    since: float | None = None
    deadline: float | None = None
    generation: int = 0
    used: float | None = None


class Ledger(msgspec.Struct, frozen=True):
    """All entries, and the size of the file system that they are on."""

    entries: tuple[Entry, ...]
    capacity_bytes: int
    available_bytes: int

    @property
    def bytes(self) -> int:
        """Bytes of all entries."""
        return sum(entry.bytes for entry in self.entries)

    @property
    def pressure(self) -> float:
        """Share of the file system that is taken, by whomever: 0 to 1."""
        return 1 - self.available_bytes / self.capacity_bytes if self.capacity_bytes else 0.0


def ledger(root: str | Path, now: float) -> Ledger:
    """Return what is below ``root``. It takes no lock that a writer or a reader could miss. Raises ``OSError``."""
    with files.folder(root) as number:
        space = os.fstatvfs(number)
        entries = tuple(_entries(number, now))
    return Ledger(entries, space.f_blocks * space.f_frsize, space.f_bavail * space.f_frsize)


def read_page(number: int) -> Page:
    """Return the beginning of an open slot. Raises :class:`HandOverError`."""
    return decode_page(os.pread(number, HEADER_BYTES, 0))


def _entries(root: int, now: float) -> Iterator[Entry]:
    for name in sorted(os.listdir(root)):
        if name.startswith(files.POOL_PREFIX):
            with contextlib.suppress(OSError), files.folder(name, below=root) as pool:
                yield from _pool(pool, name, now)
                continue
        yield from _others(root, name, name)


def _pool(pool: int, name: str, now: float) -> Iterator[Entry]:
    whose, lives = owner.read(pool)
    for inside in sorted(os.listdir(pool)):
        path = f"{name}/{inside}"
        if is_plain(inside):
            yield from _plain(pool, inside, path, whose, lives, now)
            continue
        if not inside.startswith(files.SLOT_PREFIX) and inside != files.OWNER:
            yield from _others(pool, inside, path)
            continue
        try:
            file = files.open_file(inside, pool)
        except FileNotFoundError:
            continue
        except OSError:
            yield from _others(pool, inside, path)
            continue
        try:
            size = os.fstat(file).st_blocks * 512
            if inside == files.OWNER:
                yield Entry(path, size, "owner", whose.writer, lives, whose.since)
                continue
            try:
                page = read_page(file)
            except HandOverError:
                yield Entry(path, size, "unreadable", whose.writer, lives)
                continue
            header = page.header
            state = state_of(page, now)
            yield Entry(path, size, state, whose.writer, lives, header.since, header.deadline, header.generation)
        finally:
            os.close(file)


def _plain(pool: int, name: str, path: str, whose: owner.Owner, lives: bool, now: float) -> Iterator[Entry]:
    try:
        status = os.stat(name, dir_fd=pool, follow_symlinks=False)
    except FileNotFoundError:
        return
    if not stat.S_ISREG(status.st_mode):
        yield from _others(pool, name, path)
        return
    state = plain_state(name, status.st_mtime, lives, now)
    deadline = None if state == "writing" else status.st_mtime
    yield Entry(path, status.st_blocks * 512, state, whose.writer, lives, since_of(name), deadline)


def _others(folder: int, name: str, path: str) -> Iterator[Entry]:
    """What is not ours: counted, never opened, and no link is followed."""
    try:
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return
    if not stat.S_ISDIR(status.st_mode):
        yield Entry(path, status.st_blocks * 512, "other", used=max(status.st_atime, status.st_mtime))
        return
    with contextlib.suppress(OSError), files.folder(name, below=folder) as inner:
        for inside in sorted(os.listdir(inner)):
            yield from _others(inner, inside, f"{path}/{inside}")
