"""A writer's folder below the root: its locked owner file, its byte limits, and how it is closed."""

import os
import re
import secrets
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from mmrouter_handover.shm import files
from mmrouter_handover.shm.handles import HandOverError
from mmrouter_handover.shm.reclaim import reclaim

HIGH_WATER = 0.9
SCAN_SECONDS = 1.0
"""How long one count of everybody's files is valid. Bytes that this process adds in between are added to it."""
MAX_OWNER_BYTES = 4096
_NOT_A_NAME = re.compile(r"[^A-Za-z0-9._-]+")
W = TypeVar("W", bound="WriterFolder")


class Owner(msgspec.Struct, frozen=True):
    """The writer of a folder. ``since``: seconds on the node's CLOCK_BOOTTIME; ``pid`` in the writer's namespace."""

    writer: str
    pid: int
    since: float
    limit_bytes: int


UNKNOWN_OWNER = Owner("", 0, 0.0, 0)
_decoder = msgspec.json.Decoder(Owner)


def folder_name(writer: str) -> str:
    """Return a unique folder name: the valid characters of ``writer``, and a random suffix."""
    return f"{files.POOL_PREFIX}{_NOT_A_NAME.sub('_', writer)[:100]}-{secrets.token_hex(8)}"


def create_folder(root: int, name: str, owner: Owner) -> tuple[int, int]:
    """Create a writer's folder with its locked owner file; return both open. Raises ``OSError``.

    The root is locked meanwhile, so that no janitor takes a folder without an owner file for that of a dead writer.
    """
    files.lock_waiting(root, exclusive=False)
    try:
        os.mkdir(name, files.FOLDER_MODE, dir_fd=root)
        folder = os.open(name, files.FOLDER, dir_fd=root)
        try:
            os.fchmod(folder, files.FOLDER_MODE)
            number = files.create_file(files.OWNER, folder)
            files.lock_waiting(number, exclusive=True)
            os.write(number, msgspec.json.encode(owner))
        except OSError:
            os.close(folder)
            raise
    finally:
        files.unlock(root)
    return folder, number


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


class SharedBudget:
    """The byte limit of everything below a root, shared by all writers. Usable from several threads."""

    def __init__(self, root: str | Path, total_bytes: int | None, high_water: float, now: Callable[[], float]) -> None:
        """``total_bytes``: null if only the file system bounds; ``high_water``: usable share of either."""
        self._root, self._total, self._high_water, self._now = root, total_bytes, high_water, now
        self._mutex = threading.Lock()
        self._scanned: float | None = None
        self._used = 0

    def take(self, wanted: int) -> None:
        """Reserve ``wanted`` bytes that are about to be written. Raises :class:`HandOverError` ``full``."""
        with self._mutex:
            space = os.statvfs(self._root)
            left = space.f_bavail * space.f_frsize
            if left - wanted < (1 - self._high_water) * space.f_blocks * space.f_frsize:
                raise HandOverError("full", f"the file system has {left} bytes left")
            if self._total is None:
                return
            now = self._now()
            if self._scanned is None or not 0 <= now - self._scanned < SCAN_SECONDS:
                self._used, self._scanned = used_bytes(self._root), now
            if self._used + wanted > self._high_water * self._total:
                raise HandOverError("full", f"all writers have {self._used} of {self._total} bytes")
            self._used += wanted

    def give(self, freed: int) -> None:
        """Return bytes that were removed."""
        with self._mutex:
            self._used = max(0, self._used - freed)


def used_bytes(folder: str | Path) -> int:
    """Return the bytes of all files below a folder, without opening a file or following a link."""
    total = 0
    with suppress(OSError), os.scandir(folder) as entries:  # removed meanwhile, or no permission
        for entry in entries:
            with suppress(OSError):
                if entry.is_dir(follow_symlinks=False):
                    total += used_bytes(entry.path)
                else:
                    total += entry.stat(follow_symlinks=False).st_blocks * 512
    return total


class WriterFolder:
    """Base of :class:`Pool` and :class:`PlainFiles`: a folder of one process below ``root``, with byte limits."""

    def __init__(
        self,
        root: str | Path,
        writer: str,
        limit_bytes: int,
        *,
        total_bytes: int | None = None,
        high_water: float = HIGH_WATER,
        now: Callable[[], float] = files.clock,
    ) -> None:
        """Create the folder. ``writer`` names its owner in the ledger; ``limit_bytes`` bounds its files.

        ``total_bytes``: bound of everything below ``root``, from all writers. ``high_water``: share of both bounds, and
        of the file system, above which nothing more is written. Raises ``OSError``.
        """
        self.name = folder_name(writer)
        self.limit_bytes = limit_bytes
        self.bytes = 0
        """Bytes of its files, in whole pages."""
        self._root, self._now = Path(root), now
        self._high_water = high_water
        self._budget = SharedBudget(root, total_bytes, high_water, now)
        self._mutex = threading.RLock()
        self._closed = False
        with files.folder(root) as number:
            owner = Owner(writer, os.getpid(), now(), limit_bytes)
            self._folder, self._owner = create_folder(number, self.name, owner)
        self._open()

    def _open(self) -> None:
        """Initialise a subclass, at the end of the constructor."""

    @property
    def mark_bytes(self) -> float:
        """Bytes above which nothing more is written."""
        return self._high_water * self.limit_bytes

    def close(self) -> None:
        """Remove what is not leased. Leased files stay until their deadlines, and then belong to the janitor."""
        with self._mutex:
            if self._closed:
                return
            self.abandon()
        reclaim(self._root, self._now(), only=self.name)

    def abandon(self) -> None:
        """Close all descriptors and remove nothing, as the kernel does for a process that dies."""
        with self._mutex:
            if not self._closed:
                self._closed = True
                os.close(self._owner)
                os.close(self._folder)
                self.bytes = 0

    def __enter__(self: W) -> W:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def flat_bytes(payload: Any) -> memoryview:
    """Return any contiguous buffer as a flat view of bytes."""
    flat = memoryview(payload)
    return flat.cast("B") if flat.nbytes else memoryview(b"")
