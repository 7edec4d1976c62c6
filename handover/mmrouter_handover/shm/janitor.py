"""List every file below the root with its writer, age, size and state; remove those of dead writers without readers."""

import contextlib
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec
from msgspec.structs import astuple

from mmrouter_handover.shm import files
from mmrouter_handover.shm.slot_format import MAX_LEASE_SECONDS, HandOverError, State, read_page, state_of

Kind = State | Literal["owner", "unreadable", "other"]
MAX_OWNER_BYTES = 4096
MAX_DEPTH = 32
"""Folders of other programs below each other that are listed; encoders have three."""


class Owner(msgspec.Struct, frozen=True):
    """The writer of a folder. ``since``: seconds on the node's CLOCK_BOOTTIME; ``pid`` in the writer's namespace."""

    writer: str
    pid: int
    since: float
    limit_bytes: int


UNKNOWN_OWNER = Owner("", 0, 0.0, 0)
_decoder = msgspec.json.Decoder(Owner)


def read_owner(folder: int) -> tuple[Owner, bool]:
    """Return the content of a folder's owner file, and whether the writer lives."""
    try:
        number = files.open_file(files.OWNER, folder)
    except OSError:
        return UNKNOWN_OWNER, False
    try:
        # A shared lock, so that two concurrent readers do not take each other for the writer.
        lives = not files.lock(number, exclusive=False)
        raw = os.pread(number, MAX_OWNER_BYTES, 0)
    finally:
        os.close(number)
    try:
        return _decoder.decode(raw), lives
    except (msgspec.MsgspecError, UnicodeError):
        return UNKNOWN_OWNER, lives


class Entry(msgspec.Struct, frozen=True):
    """One file. ``since`` and ``deadline`` are seconds on the node's CLOCK_BOOTTIME, null if unknown.

    ``state``: ``slot_format.State`` or ``unreadable`` for a slot, ``files.PlainState`` for a plain file, ``owner`` for
    a writer's owner file, ``other`` for any other file. ``lives``: whether the writer does. ``bytes``: memory of the
    file. ``used``: when an ``other`` file was last read and last written, in seconds since 1970.
    """

    path: str
    bytes: int
    state: Kind
    writer: str = ""
    lives: bool = False
    since: float | None = None
    deadline: float | None = None
    generation: int = 0
    used: tuple[float, float] | None = None


class Ledger(msgspec.Struct, frozen=True):
    """All entries, and the size of their file system."""

    entries: tuple[Entry, ...]
    capacity_bytes: int
    available_bytes: int

    @property
    def bytes(self) -> int:
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
        yield from _unopened(root, name, name)


def _pool(pool: int, name: str, now: float) -> Iterator[Entry]:
    owner, lives = read_owner(pool)
    for inside in sorted(os.listdir(pool)):
        path = f"{name}/{inside}"
        if files.is_plain(inside):
            yield from _unopened(pool, inside, path, (owner, lives, now))
            continue
        if not inside.startswith(files.SLOT_PREFIX) and inside != files.OWNER:
            yield from _unopened(pool, inside, path)
            continue
        try:
            file = files.open_file(inside, pool)
        except OSError:  # removed meanwhile, or no regular file
            yield from _unopened(pool, inside, path)
            continue
        try:
            size = os.fstat(file).st_blocks * 512
            if inside == files.OWNER:
                yield Entry(path, size, "owner", owner.writer, lives, owner.since)
                continue
            page = read_page(file)
            header, state = page.header, state_of(page, now)
            yield Entry(path, size, state, owner.writer, lives, header.since, header.deadline, header.generation)
        except HandOverError:
            yield Entry(path, size, "unreadable", owner.writer, lives)
        finally:
            os.close(file)


def _unopened(
    folder: int, name: str, path: str, plain: tuple[Owner, bool, float] | None = None, depth: int = 0
) -> Iterator[Entry]:
    """List a plain file (of a writer, whether it lives, at a time), or files of other programs; follow no links.

    A folder below :data:`MAX_DEPTH` others is one entry, whatever is in it.
    """
    try:
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return
    size = status.st_blocks * 512
    if stat.S_ISDIR(status.st_mode) and depth < MAX_DEPTH:
        with contextlib.suppress(OSError), files.folder(name, below=folder) as inner:
            for inside in sorted(os.listdir(inner)):
                yield from _unopened(inner, inside, f"{path}/{inside}", depth=depth + 1)
    elif plain is not None and stat.S_ISREG(status.st_mode):
        owner, lives, now = plain
        state = files.plain_state(name, status.st_mtime, lives, now)
        deadline = None if state == "writing" else status.st_mtime
        yield Entry(path, size, state, owner.writer, lives, files.plain_since(name), deadline)
    else:
        yield Entry(path, size, "other", used=(status.st_atime, status.st_mtime))


class Reclaimed(msgspec.Struct, frozen=True):
    """Number of removed ``slots``, plain ``files`` and folders (``pools``), and their ``bytes``.

    ``kept``: slots and plain files of dead writers that are still leased or read; the next call checks them again.
    """

    slots: int = 0
    bytes: int = 0
    pools: int = 0
    kept: int = 0
    files: int = 0

    def __add__(self, other: "Reclaimed") -> "Reclaimed":
        return Reclaimed(*map(sum, zip(astuple(self), astuple(other), strict=True)))


def reclaim(root: str | Path, now: float, *, only: str | None = None) -> Reclaimed:
    """Remove slots and plain files of dead writers that have neither readers nor a lease, then their folders.

    A writer is dead when its owner file is not locked. ``only`` names one pool. Any number of janitors may do this at
    once. Raises ``OSError`` if the root cannot be read.
    """
    done = Reclaimed()
    with files.folder(root) as number, contextlib.ExitStack() as open_files:
        for name, pool in _dead(number, only, open_files):
            done += _clear(pool, now)
            if set(os.listdir(pool)) <= {files.OWNER}:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(files.OWNER, dir_fd=pool)
                with contextlib.suppress(OSError):
                    os.rmdir(name, dir_fd=number)
                    done += Reclaimed(pools=1)
    return done


def _dead(root: int, only: str | None, open_files: contextlib.ExitStack) -> list[tuple[str, int]]:
    """Return and lock the pools without a living owner, until ``open_files`` is closed."""
    # Pools are created under a shared lock of the root, so none of those found here is half made.
    if not files.lock(root, exclusive=True):
        return []
    dead = []
    try:
        for name in [only] if only else sorted(os.listdir(root)):
            if not name.startswith(files.POOL_PREFIX):
                continue
            try:
                pool = open_files.enter_context(files.folder(name, below=root))
            except OSError:  # another janitor removed it, or it is no folder
                continue
            try:
                owner = files.open_file(files.OWNER, pool)
            except OSError as error:
                if isinstance(error, FileNotFoundError):
                    dead.append((name, pool))  # its writer died while creating it
                continue
            open_files.callback(os.close, owner)
            if files.lock(owner, exclusive=True):
                dead.append((name, pool))
    finally:
        files.unlock(root)
    return dead


def _clear(pool: int, now: float) -> Reclaimed:
    done = Reclaimed()
    for name in sorted(os.listdir(pool)):
        if files.is_plain(name):
            done += _clear_plain(pool, name, now)
            continue
        if not name.startswith(files.SLOT_PREFIX):
            continue
        try:
            number = files.open_file(name, pool)
        except OSError:
            continue
        try:
            if _is_over(number, now) and files.lock(number, exclusive=True):
                done += Reclaimed(slots=1, bytes=files.remove(name, pool, number))
            else:
                done += Reclaimed(kept=1)
        finally:
            os.close(number)
    return done


def _clear_plain(pool: int, name: str, now: float) -> Reclaimed:
    """Unlink one plain file of a dead writer. A reader that has it open can still read it."""
    try:
        status = os.stat(name, dir_fd=pool, follow_symlinks=False)
        if files.plain_state(name, status.st_mtime, False, now) == "leased":
            return Reclaimed(kept=1)
        os.unlink(name, dir_fd=pool)
    except OSError:  # another janitor took it, or it is a folder
        return Reclaimed()
    return Reclaimed(files=1, bytes=status.st_blocks * 512)


def _is_over(number: int, now: float) -> bool:
    try:
        return state_of(read_page(number), now) != "leased"
    except HandOverError as error:
        if error.reason != "refused":
            return True  # its writer died before it wrote a header
        # Written by another version, whose leases are no longer than this.
        return time.time() - os.fstat(number).st_mtime > MAX_LEASE_SECONDS
