"""What a janitor does: free what dead writers left, and nothing that anybody may still read."""

import contextlib
import os
import time
from pathlib import Path

import msgspec

from mmrouter_handover.shm import files
from mmrouter_handover.shm.handles import HandOverError
from mmrouter_handover.shm.ledger import read_page
from mmrouter_handover.shm.plain_file_marks import is_plain, plain_state
from mmrouter_handover.shm.slot import MAX_LEASE_SECONDS, state_of


class Reclaimed(msgspec.Struct, frozen=True):
    """What one call did: ``slots`` and plain ``files`` that it removed, their ``bytes``, and folders (``pools``).

    ``kept``: slots and plain files of dead writers that are still leased or read; the next call looks again.
    """

    slots: int = 0
    bytes: int = 0
    pools: int = 0
    kept: int = 0
    files: int = 0

    def __add__(self, other: "Reclaimed") -> "Reclaimed":
        return Reclaimed(
            self.slots + other.slots,
            self.bytes + other.bytes,
            self.pools + other.pools,
            self.kept + other.kept,
            self.files + other.files,
        )


def reclaim(root: str | Path, now: float, *, only: str | None = None) -> Reclaimed:
    """Remove slots and plain files of dead writers that nobody reads and no lease protects, then their folders.

    A writer is dead when nobody holds the lock of its owner file. ``only`` names one pool. Any number of janitors may
    do this at once. Raises ``OSError`` where the root cannot be read.
    """
    done = Reclaimed()
    with files.folder(root) as number, contextlib.ExitStack() as open_files:
        for name, pool in _dead(number, only, open_files):
            done += _clear(pool, now)
            done += Reclaimed(pools=_remove_folder(number, name, pool))
    return done


def _dead(root: int, only: str | None, open_files: contextlib.ExitStack) -> list[tuple[str, int]]:
    """Return pools without a living owner; until the end of ``open_files`` no other janitor takes them."""
    # Pools are made under a shared lock of the root: none of those that are found here is just being made.
    if not files.lock(root, exclusive=True):
        return []
    found = []
    try:
        for name in [only] if only else sorted(os.listdir(root)):
            if not name.startswith(files.POOL_PREFIX):
                continue
            try:
                pool = open_files.enter_context(files.folder(name, below=root))
            except OSError:  # another janitor removed it, or it is no folder
                continue
            try:
                whose = files.open_file(files.OWNER, pool)
            except FileNotFoundError:
                found.append((name, pool))  # killed while it was made
                continue
            except OSError:
                continue
            open_files.callback(os.close, whose)
            if files.lock(whose, exclusive=True):
                found.append((name, pool))
    finally:
        files.unlock(root)
    return found


def _clear(pool: int, now: float) -> Reclaimed:
    done = Reclaimed()
    for name in sorted(os.listdir(pool)):
        if is_plain(name):
            done += _clear_plain(pool, name, now)
            continue
        if not name.startswith(files.SLOT_PREFIX):
            continue
        try:
            number = files.open_file(name, pool)
        except OSError:
            continue
        try:
            if _over(number, now) and files.lock(number, exclusive=True):
                done += Reclaimed(slots=1, bytes=files.remove(name, pool, number))
            else:
                done += Reclaimed(kept=1)
        finally:
            os.close(number)
    return done


def _clear_plain(pool: int, name: str, now: float) -> Reclaimed:
    """Remove one plain file of a dead writer. Whoever has it open reads it to its end: only its name goes."""
    try:
        status = os.stat(name, dir_fd=pool, follow_symlinks=False)
        if plain_state(name, status.st_mtime, False, now) == "leased":
            return Reclaimed(kept=1)
        os.unlink(name, dir_fd=pool)
    except OSError:  # another janitor took it, or it is a folder
        return Reclaimed()
    return Reclaimed(files=1, bytes=status.st_blocks * 512)


def _over(number: int, now: float) -> bool:
    """Whether no lease protects a slot whose writer is dead."""
    try:
        return state_of(read_page(number), now) != "leased"
    except HandOverError as error:
        if error.reason != "refused":
            return True  # its writer died before it said anything
        # Another version wrote it: no lease lasts longer than this.
        return time.time() - os.fstat(number).st_mtime > MAX_LEASE_SECONDS


def _remove_folder(root: int, name: str, pool: int) -> bool:
    """Remove a pool's folder if nothing but its owner file is left in it."""
    if set(os.listdir(pool)) - {files.OWNER}:
        return False
    with contextlib.suppress(FileNotFoundError):
        os.unlink(files.OWNER, dir_fd=pool)
    with contextlib.suppress(OSError):
        os.rmdir(name, dir_fd=root)
        return True
    return False
