"""Remove the files of dead writers, except those that a reader may still use."""

import contextlib
import os
import time
from pathlib import Path

import msgspec
from msgspec.structs import astuple

from mmrouter_handover.shm import files
from mmrouter_handover.shm.handles import HandOverError
from mmrouter_handover.shm.slot_format import MAX_LEASE_SECONDS, read_page, state_of


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
        sums = (mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True))
        return Reclaimed(*sums)


def reclaim(root: str | Path, now: float, *, only: str | None = None) -> Reclaimed:
    """Remove slots and plain files of dead writers that have neither readers nor a lease, then their folders.

    A writer is dead when its owner file is not locked. ``only`` names one pool. Any number of janitors may do this at
    once. Raises ``OSError`` if the root cannot be read.
    """
    done = Reclaimed()
    with files.folder(root) as number, contextlib.ExitStack() as open_files:
        for name, pool in _dead(number, only, open_files):
            done += _clear(pool, now)
            done += Reclaimed(pools=_remove_folder(number, name, pool))
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
            except FileNotFoundError:
                dead.append((name, pool))  # its writer died while creating it
                continue
            except OSError:
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
    """Whether the lease of a dead writer's slot is over."""
    try:
        return state_of(read_page(number), now) != "leased"
    except HandOverError as error:
        if error.reason != "refused":
            return True  # its writer died before it wrote a header
        # Written by another version, whose leases are no longer than this.
        return time.time() - os.fstat(number).st_mtime > MAX_LEASE_SECONDS


def _remove_folder(root: int, name: str, pool: int) -> bool:
    """Remove a pool's folder if only its owner file is left in it."""
    if set(os.listdir(pool)) - {files.OWNER}:
        return False
    with contextlib.suppress(FileNotFoundError):
        os.unlink(files.OWNER, dir_fd=pool)
    with contextlib.suppress(OSError):
        os.rmdir(name, dir_fd=root)
        return True
    return False
