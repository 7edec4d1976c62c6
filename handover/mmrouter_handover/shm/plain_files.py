"""Payloads as ordinary files, for readers that know nothing of slots: an engine that opens ``file://`` URLs.

A plain file is its payload and nothing else. It is written under another name and gets its own when it is whole, so
that nobody who is told of it sees half of it; it is removed by its name and never cut, so that a reader who has it open
reads it to its end. What is to be known of it stands beside its contents: when it was made in its name, and in its time
of modification, which nothing else changes, until when it is to be left alone should its writer die.
"""

import itertools
import os
import re
import secrets
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from mmrouter_handover.shm import files
from mmrouter_handover.shm import pool_owner as owner
from mmrouter_handover.shm.handles import HandOverError
from mmrouter_handover.shm.plain_file_marks import plain_name
from mmrouter_handover.shm.reclaim import reclaim
from mmrouter_handover.shm.shared_budget import HIGH_WATER, Room
from mmrouter_handover.shm.slot import LEASE_SECONDS, MAX_LEASE_SECONDS
from mmrouter_handover.shm.slot_sizes import file_bytes

PLAIN_MODE = 0o640
"""Readers are other users of the same group, and only read."""
_SUFFIX = re.compile(r"(\.[A-Za-z0-9]{1,8})?\Z")


class PlainFile:
    """The right to one plain file, at ``path``. It ends by :meth:`release`, also at the end of a ``with`` block."""

    def __init__(self, plains: "Plains", file: "_File") -> None:
        self.path = plains.folder / file.name
        self._plains = plains
        self._file: _File | None = file

    def release(self) -> None:
        """Give the file up. It goes with the last who has it. Again, it does nothing."""
        file, self._file = self._file, None
        if file is not None:
            self._plains._release(file)

    def __enter__(self) -> "PlainFile":
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        self.release()


class _File(msgspec.Struct, eq=False):
    """A file that lies there, and how many have it."""

    name: str
    bytes: int
    deadline: float
    key: str
    users: int = 1


class Plains:
    """The plain files of one process, in a folder of their own below ``root``. Usable from several threads."""

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
        """Make the folder. ``writer`` says whose it is, for people; ``limit_bytes`` bounds its files.

        ``total_bytes``: bound of all that lies below ``root``, of whomever. ``high_water``: share of both, and of the
        file system, above which nothing more is written. Raises ``OSError``.
        """
        self.name = owner.folder_name(writer)
        self.folder = Path(root).absolute() / self.name
        self.limit_bytes = limit_bytes
        self.bytes = 0
        """Bytes of its files, in whole pages."""
        self._root, self._now = Path(root), now
        self._high_water = high_water
        self._room = Room(root, total_bytes, high_water, now)
        self._mutex = threading.Lock()
        self._numbers = itertools.count(1)
        self._shared: dict[str, _File] = {}
        self._closed = False
        with files.folder(root) as number:
            limits = owner.Owner(writer, os.getpid(), now(), limit_bytes)
            self._folder, self._owner = owner.create(number, self.name, limits)

    def put(self, data: Any, suffix: str = "", *, key: str = "", seconds: float = LEASE_SECONDS) -> PlainFile:
        """Write ``data`` (any contiguous buffer) and return its file; its name ends with ``suffix``, such as ``.png``.

        ``key``: calls with the same one, and with the same data, share a file; it appears nowhere in the file system.
        ``seconds``: for how long the file is left alone if this process dies meanwhile; at most an hour.
        Raises :class:`HandOverError` ``full`` where there is no room: the caller sends bytes instead.
        """
        if not _SUFFIX.match(suffix) or not 0 < seconds <= MAX_LEASE_SECONDS:
            raise ValueError(f"no file with the suffix {suffix[:20]!r} for {seconds} s")
        flat = memoryview(data)
        flat = flat.cast("B") if flat.nbytes else memoryview(b"")
        wanted = file_bytes(len(flat))
        shared = key and key + suffix
        with self._mutex:
            now = self._now()
            if shared and (file := self._shared.get(shared)) is not None:
                return self._share(file, now + seconds)
            self._take_room(wanted)
            unique = f"{next(self._numbers):x}{secrets.token_hex(6)}"
            file = _File(plain_name(now, unique, suffix), wanted, now + seconds, shared)
            folder = os.dup(self._folder)  # the others go on meanwhile, and may close
        try:
            _write(file, flat, folder)
        except BaseException as error:
            with self._mutex:
                self._give_room(file)
            if isinstance(error, OSError):
                raise HandOverError("full", f"no file of {wanted} bytes: {error.strerror}") from error
            raise
        finally:
            os.close(folder)
        with self._mutex:
            if shared:
                self._shared.setdefault(shared, file)
        return PlainFile(self, file)

    def close(self) -> None:
        """End. Files that are not released stay until their deadlines, and belong to the janitor."""
        with self._mutex:
            if self._closed:
                return
            self._closed = True
            os.close(self._owner)
            os.close(self._folder)
            self._shared.clear()
            self.bytes = 0
        reclaim(self._root, self._now(), only=self.name)

    def __enter__(self) -> "Plains":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _share(self, file: _File, deadline: float) -> PlainFile:
        file.users += 1
        if deadline > file.deadline:
            file.deadline = deadline
            with suppress(OSError):  # somebody removed it: who is told of it finds nothing, and is sent bytes
                os.utime(file.name, (deadline, deadline), dir_fd=self._folder)
        return PlainFile(self, file)

    def _take_room(self, wanted: int) -> None:
        if self._closed:
            raise HandOverError("full", "the folder is closed")
        if self.bytes + wanted > self._high_water * self.limit_bytes:
            raise HandOverError("full", f"{self.bytes} of {self.limit_bytes} bytes are taken, {wanted} are wanted")
        self._room.take(wanted)
        self.bytes += wanted

    def _give_room(self, file: _File) -> None:
        self._room.give(file.bytes)
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
            self._give_room(file)


def _write(file: _File, data: memoryview, folder: int) -> None:
    """Write under a name that says so, and give the file its own. Raises ``OSError`` and leaves nothing behind.

    Not by O_TMPFILE: what has no name is in no ledger.
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
