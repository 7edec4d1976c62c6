"""The writer's side of plain files: payloads for readers without this package, such as an engine's ``file://`` URLs.

A plain file contains its payload and nothing else. It is written under a draft name and renamed when it is whole, so no
reader sees half of it. It is unlinked and never truncated, so a reader that has it open reads it to its end. Its
metadata is in its name (when it was made) and in its modification time (until when the janitor leaves it alone if its
writer dies).
"""

import itertools
import os
import re
import secrets
from contextlib import suppress
from types import TracebackType
from typing import Any

import msgspec

from mmrouter_handover.shm import files
from mmrouter_handover.shm.handles import HandOverError
from mmrouter_handover.shm.slot_format import LEASE_SECONDS, MAX_LEASE_SECONDS, PAGE_BYTES
from mmrouter_handover.shm.writer_folder import WriterFolder, flat_bytes

PLAIN_MODE = 0o640
"""Readers are other users of the same group, and only read."""
_SUFFIX = re.compile(r"(\.[A-Za-z0-9]{1,8})?\Z")


class PlainFile:
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

    def __enter__(self) -> "PlainFile":
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        self.release()


class _File(msgspec.Struct, eq=False):
    """A written file and the number of rights to it."""

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
                return self._share(file, now + seconds)
            self._reserve(wanted)
            unique = f"{next(self._numbers):x}{secrets.token_hex(6)}"
            file = _File(files.plain_name(now, unique, suffix), wanted, now + seconds, shared)
            folder = os.dup(self._folder)  # written without the lock, and the folder may be closed meanwhile
        try:
            _write(file, flat, folder)
        except BaseException as error:
            with self._mutex:
                self._unreserve(file)
            if isinstance(error, OSError):
                raise HandOverError("full", f"no file of {wanted} bytes: {error.strerror}") from error
            raise
        finally:
            os.close(folder)
        with self._mutex:
            if shared:
                self._shared.setdefault(shared, file)
        return PlainFile(self, file)

    def _share(self, file: _File, deadline: float) -> PlainFile:
        file.users += 1
        if deadline > file.deadline:
            file.deadline = deadline
            with suppress(OSError):  # removed by others: its readers get "not found", and are sent bytes
                os.utime(file.name, (deadline, deadline), dir_fd=self._folder)
        return PlainFile(self, file)

    def _reserve(self, wanted: int) -> None:
        if self.bytes + wanted > self.mark_bytes:
            raise HandOverError("full", f"{self.bytes} of {self.limit_bytes} bytes are in use, {wanted} are wanted")
        self._budget.take(wanted)
        self.bytes += wanted

    def _unreserve(self, file: _File) -> None:
        self._budget.give(file.bytes)
        self.bytes -= file.bytes

    def _release(self, file: _File) -> None:
        with self._mutex:
            file.users -= 1
            if file.users or self._closed:
                return
            if self._shared.get(file.key) is file:
                del self._shared[file.key]
            with suppress(FileNotFoundError):
                os.unlink(file.name, dir_fd=self._folder)
            self._unreserve(file)


def file_bytes(length: int) -> int:
    """Return the memory that a file of ``length`` bytes takes: whole pages."""
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
