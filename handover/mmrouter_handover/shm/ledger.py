"""List every file below the root with its writer, age, size and state."""

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from mmrouter_handover.shm import files
from mmrouter_handover.shm.handles import HandOverError
from mmrouter_handover.shm.slot_format import State, read_page, state_of
from mmrouter_handover.shm.writer_folder import Owner, read_owner

Kind = State | Literal["owner", "unreadable", "other"]


class Entry(msgspec.Struct, frozen=True):
    """One file. ``since`` and ``deadline`` are seconds on the node's CLOCK_BOOTTIME, null if unknown.

    ``state``: ``slot_format.State`` or ``unreadable`` for a slot, ``files.PlainState`` for a plain file, ``owner`` for
    a writer's owner file, ``other`` for any other file. ``lives``: whether the writer does. ``bytes``: memory of the
    file. ``used``: when an ``other`` file was last read or written, in seconds since 1970.
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
    """All entries, and the size of their file system."""

    entries: tuple[Entry, ...]
    capacity_bytes: int
    available_bytes: int

    @property
    def bytes(self) -> int:
        """Bytes of all entries."""
        return sum(entry.bytes for entry in self.entries)

    @property
    def pressure(self) -> float:
        """Used share of the file system, by any file: 0 to 1."""
        return 1 - self.available_bytes / self.capacity_bytes if self.capacity_bytes else 0.0


def ledger(root: str | Path, now: float) -> Ledger:
    """Return all files below ``root``, without delaying writers or readers by locks. Raises ``OSError``."""
    with files.folder(root) as number:
        space = os.fstatvfs(number)
        entries = tuple(_entries(number, now))
    return Ledger(entries, space.f_blocks * space.f_frsize, space.f_bavail * space.f_frsize)


def _entries(root: int, now: float) -> Iterator[Entry]:
    for name in sorted(os.listdir(root)):
        if name.startswith(files.POOL_PREFIX):
            with contextlib.suppress(OSError), files.folder(name, below=root) as pool:
                yield from _pool(pool, name, now)
                continue
        yield from _others(root, name, name)


def _pool(pool: int, name: str, now: float) -> Iterator[Entry]:
    owner, lives = read_owner(pool)
    for inside in sorted(os.listdir(pool)):
        path = f"{name}/{inside}"
        if files.is_plain(inside):
            yield from _plain(pool, inside, path, owner, lives, now)
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
                yield Entry(path, size, "owner", owner.writer, lives, owner.since)
                continue
            try:
                page = read_page(file)
            except HandOverError:
                yield Entry(path, size, "unreadable", owner.writer, lives)
                continue
            header = page.header
            state = state_of(page, now)
            yield Entry(path, size, state, owner.writer, lives, header.since, header.deadline, header.generation)
        finally:
            os.close(file)


def _plain(pool: int, name: str, path: str, owner: Owner, lives: bool, now: float) -> Iterator[Entry]:
    try:
        status = os.stat(name, dir_fd=pool, follow_symlinks=False)
    except FileNotFoundError:
        return
    if not stat.S_ISREG(status.st_mode):
        yield from _others(pool, name, path)
        return
    state = files.plain_state(name, status.st_mtime, lives, now)
    deadline = None if state == "writing" else status.st_mtime
    yield Entry(path, status.st_blocks * 512, state, owner.writer, lives, files.plain_since(name), deadline)


def _others(folder: int, name: str, path: str) -> Iterator[Entry]:
    """List files of other programs without opening them or following links."""
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
