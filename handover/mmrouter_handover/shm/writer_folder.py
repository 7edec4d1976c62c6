"""A writer's folder below the root: its locked owner file, its byte limits, how it is closed, and its plain files.

Plain files are payloads for readers without this package, such as an engine's ``file://`` URLs. One contains its
payload and nothing else. It is written under a draft name and renamed when it is whole, so no reader sees half of it.
It is unlinked and never truncated, so a reader that has it open reads it to its end. Its metadata is in its name (when
it was made) and in its modification time (until when the janitor leaves it alone if its writer dies).
"""

import fcntl
import itertools
import math
import os
import re
import secrets
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from mmrouter_handover.shm import files
from mmrouter_handover.shm.janitor import Owner, reclaim
from mmrouter_handover.shm.slot_format import LEASE_SECONDS, MAX_LEASE_SECONDS, PAGE_BYTES, HandOverError

HIGH_WATER = 0.9
SCAN_SECONDS = 1.0
"""How long one count of everybody's files is valid. Bytes that this process adds in between are added to it."""
_NOT_A_NAME = re.compile(r"[^A-Za-z0-9._-]+")
W = TypeVar("W", bound="WriterFolder")
PLAIN_MODE = 0o640
"""Readers are other users of the same group, and only read."""
_SUFFIX = re.compile(r"(\.[A-Za-z0-9]{1,8})?\Z")


def create_folder(root: int, name: str, owner: Owner) -> tuple[int, int]:
    """Create a writer's folder with its locked owner file; return both open. Raises ``OSError``.

    The root is locked meanwhile, so that no janitor takes a folder without an owner file for that of a dead writer.
    """
    fcntl.flock(root, fcntl.LOCK_SH)  # others keep it for microseconds only
    try:
        os.mkdir(name, files.FOLDER_MODE, dir_fd=root)
        folder = os.open(name, files.FOLDER, dir_fd=root)
        try:
            os.fchmod(folder, files.FOLDER_MODE)
            number = files.create_file(files.OWNER, folder)
            fcntl.flock(number, fcntl.LOCK_EX)
            os.write(number, msgspec.json.encode(owner))
        except OSError:
            os.close(folder)
            raise
    finally:
        files.unlock(root)
    return folder, number


def used_bytes(folder: str | Path) -> int:
    """Return the bytes of all files below a folder, without opening a file or following a link."""
    total, left = 0, [os.fspath(folder)]  # without recursion: any program may nest folders
    while left:
        with suppress(OSError), os.scandir(left.pop()) as entries:  # removed meanwhile, or no permission
            for entry in entries:
                with suppress(OSError):
                    if entry.is_dir(follow_symlinks=False):
                        left.append(entry.path)
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
        valid = _NOT_A_NAME.sub("_", writer)[:100]
        self.name = f"{files.POOL_PREFIX}{valid}-{secrets.token_hex(8)}"
        self.limit_bytes, self.mark_bytes = limit_bytes, high_water * limit_bytes
        self.bytes = 0  # of its files, in whole pages
        self._root, self._now, self._high_water = Path(root), now, high_water
        self._total = total_bytes
        self._used, self._scanned = 0, -math.inf  # bytes of all writers, and when they were last counted
        self._mutex = threading.RLock()
        self._closed = False
        with files.folder(root) as number:
            owner = Owner(writer, os.getpid(), now(), limit_bytes)
            self._folder, self._owner = create_folder(number, self.name, owner)
        self._open()

    def _open(self) -> None:
        """Initialise a subclass, at the end of the constructor."""

    def _take(self, wanted: int) -> None:
        """Reserve ``wanted`` bytes that are about to be written. Raises :class:`HandOverError` ``full``."""
        try:
            space = os.statvfs(self._root)
        except OSError as error:
            raise HandOverError("full", f"the file system cannot be read: {error.strerror}") from error
        left = space.f_bavail * space.f_frsize
        if left - wanted < (1 - self._high_water) * space.f_blocks * space.f_frsize:
            raise HandOverError("full", f"the file system has {left} bytes left")
        if self._total is not None:
            now = self._now()
            if not 0 <= now - self._scanned < SCAN_SECONDS:
                self._used, self._scanned = used_bytes(self._root), now
            if self._used + wanted > self._high_water * self._total:
                raise HandOverError("full", f"all writers have {self._used} of {self._total} bytes")
        self._used += wanted
        self.bytes += wanted

    def _give(self, freed: int) -> None:
        self._used = max(0, self._used - freed)
        self.bytes -= freed

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
    flat = memoryview(payload)
    return flat.cast("B") if flat.nbytes else memoryview(b"")


class PlainFile(AbstractContextManager["PlainFile"]):
    """The right to one plain file, at ``path``. It ends by :meth:`release`, also at the end of a ``with`` block."""

    def __init__(self, owner: "PlainFiles", file: "_File") -> None:
        self.path = owner.folder / file.name
        self._owner = owner
        self._file: _File | None = file

    def release(self) -> None:
        """Drop the right; the last one removes the file. Repeated calls do nothing."""
        file, self._file = self._file, None
        if file is not None:
            self._owner._release(file)

    def __exit__(self, *_: object) -> None:
        self.release()


class _File(msgspec.Struct, eq=False):
    name: str
    bytes: int
    deadline: float
    key: str
    users: int = 1


class PlainFiles(WriterFolder):
    """The plain files of one process, in a folder of their own below ``root``. Usable from several threads."""

    def _open(self) -> None:
        self.folder = self._root.absolute() / self.name
        self._numbers = itertools.count(1)
        self._shared: dict[str, _File] = {}

    def put(self, data: Any, suffix: str = "", *, key: str = "", seconds: float = LEASE_SECONDS) -> PlainFile:
        """Write ``data`` (any contiguous buffer) and return its file; its name ends with ``suffix``, such as ``.png``.

        ``key``: calls with the same key and data share a file; the key appears nowhere in the file system.
        ``seconds``: how long the janitor leaves the file alone if this process dies meanwhile; at most an hour.
        Raises :class:`HandOverError` ``full`` if there is no room: the caller sends bytes instead.
        """
        if not _SUFFIX.match(suffix) or not 0 < seconds <= MAX_LEASE_SECONDS:
            raise ValueError(f"no file with the suffix {suffix[:20]!r} for {seconds} s")
        flat = flat_bytes(data)
        wanted = file_bytes(len(flat))
        shared = key and key + suffix
        with self._mutex:
            if self._closed:
                raise HandOverError("full", "the folder is closed")
            now = self._now()
            if shared and (file := self._shared.get(shared)) is not None:
                file.users += 1
                if now + seconds > file.deadline:
                    file.deadline = now + seconds
                    with suppress(OSError):  # removed by others: its readers get "not found", and are sent bytes
                        os.utime(file.name, (file.deadline, file.deadline), dir_fd=self._folder)
                return PlainFile(self, file)
            if self.bytes + wanted > self.mark_bytes:
                raise HandOverError("full", f"{self.bytes} of {self.limit_bytes} bytes are in use, {wanted} are wanted")
            self._take(wanted)
            try:
                folder = os.dup(self._folder)  # written without the lock, and the folder may be closed meanwhile
            except OSError as error:
                self._give(wanted)
                raise HandOverError("full", f"no descriptor: {error.strerror}") from error
            unique = f"{next(self._numbers):x}{secrets.token_hex(6)}"
            name = f"{files.PLAIN_PREFIX}{int(now * 1000):x}-{unique}{suffix}"
            file = _File(name, wanted, now + seconds, shared)
        try:
            _write(file, flat, folder)
        except BaseException as error:
            with self._mutex:
                self._give(file.bytes)
            if isinstance(error, OSError):
                raise HandOverError("full", f"no file of {wanted} bytes: {error.strerror}") from error
            raise
        finally:
            os.close(folder)
        with self._mutex:
            if shared:
                self._shared.setdefault(shared, file)
        return PlainFile(self, file)

    def _release(self, file: _File) -> None:
        with self._mutex:
            file.users -= 1
            if file.users or self._closed:
                return
            if self._shared.get(file.key) is file:
                del self._shared[file.key]
            with suppress(FileNotFoundError):
                os.unlink(file.name, dir_fd=self._folder)
            self._give(file.bytes)


def file_bytes(length: int) -> int:
    return -(-length // PAGE_BYTES) * PAGE_BYTES


def _write(file: _File, data: memoryview, folder: int) -> None:
    """Write a draft and rename it. Raises ``OSError`` and leaves nothing behind.

    Not by O_TMPFILE: a file without a name is missing from the ledger.
    """
    draft = files.DRAFT_PREFIX + file.name
    number = files.create_file(draft, folder, PLAIN_MODE)
    try:
        while data:
            data = data[os.write(number, data) :]
        os.utime(number, (file.deadline, file.deadline))
        os.rename(draft, file.name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(draft, dir_fd=folder)
        raise
    finally:
        os.close(number)
