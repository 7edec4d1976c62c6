"""The janitor of the node's shared directory (docs/transfer.md): the hands of
:mod:`mmrouter_sidecar.shared_memory.cleanup_rules`.

Every sidecar whose pod has the directory is one. They do the same at the same time without an agreement: whatever one
of them removes, another finds gone.
"""

import asyncio
import logging
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from mmrouter_handover.shm import Ledger, Reclaimed, ledger, reclaim
from mmrouter_handover.shm import files as places
from mmrouter_handover.shm.slot_format import MAX_LEASE_SECONDS
from mmrouter_lib import feed
from mmrouter_sidecar.metrics import Metrics
from mmrouter_sidecar.settings import Settings
from mmrouter_sidecar.shared_memory import cleanup_rules as tidying

log = logging.getLogger("mmrouter.sidecar")

PERIOD = 1.0
"""Seconds between looks for dead writers..."""
LONGEST = 3.0
"""... and at most so many, because what they leave is to be gone within five."""
LOOK_PERIOD = 5.0
"""Seconds between looks at every byte."""
FOLDER_PERIOD = 60.0
SHARE = 0.005
"""Of the time that the janitor may spend looking: where a look takes long, the next one comes later."""
MARK_PREFIX = "sidecar-"
"""A pod's mark in the directory; its time of modification says when its janitor was last heard of."""
ASK_SECONDS = 0.5


class Janitor:
    """One pod's janitor. ``tell`` gets the figures whenever all bytes were looked at."""

    def __init__(
        self,
        settings: Settings,
        metrics: Metrics,
        tell: Callable[[feed.SharedDirectory], None],
        *,
        now: Callable[[], float] = places.clock,
        wall: Callable[[], float] = time.time,
    ) -> None:
        assert settings.shared_dir is not None
        self._root, self._limit = settings.shared_dir, settings.shared_bytes
        self._settings, self._metrics, self._tell, self._now, self._wall = settings, metrics, tell, now, wall
        self._mark = MARK_PREFIX + settings.pod_uid
        self._figures: feed.SharedDirectory | None = None
        self._folders_at = 0.0
        self._broken = False
        self._turn = threading.Lock()
        self._ended = False

    async def begin(self) -> None:
        """Clear what the dead left, before the engine runs."""
        await asyncio.to_thread(self._safely, self._begin)

    async def run(self) -> None:
        """Clear and look until cancelled."""
        look_at = 0.0
        while True:
            spent = await asyncio.to_thread(self._safely, self._reclaim)
            if time.monotonic() >= look_at:
                looked = await asyncio.to_thread(self._safely, self._look)
                look_at = time.monotonic() + max(LOOK_PERIOD, looked / SHARE)
            await asyncio.sleep(min(LONGEST, max(PERIOD, spent / SHARE)))

    async def end(self) -> None:
        """Clear what is left, where this was the last pod of its node."""
        await asyncio.to_thread(self._safely, self._end)

    # -- in a thread: everything below waits for the file system ----------------------------------------------------

    def _safely(self, step: Callable[[], None]) -> float:
        """Return how long the CPU was busy with it, in seconds.

        A directory that cannot be used is told once, and counted; the engine serves without it.
        """
        began = time.thread_time()
        try:
            with self._turn:  # a step that was cancelled goes on in its thread
                if not self._ended:
                    step()
        except OSError as error:
            self._metrics.shm_errors.inc()
            if not self._broken:
                log.error("the shared directory %s: %s", self._root, error)
            self._broken = True
        else:
            self._broken = False
        return time.thread_time() - began

    def _begin(self) -> None:
        marks = self._marks()
        self._touch()
        if tidying.alone(marks, self._mark, self._now()) and not self._engine_answers():
            self._clear_all()
        else:
            self._reclaim()
        self._look()

    def _end(self) -> None:
        self._ended = True
        if not self._engine_answers():  # else only this container ends, and is started again
            with suppress(FileNotFoundError):
                (self._root / self._mark).unlink()
            if tidying.alone(self._marks(), self._mark, self._now()):
                self._clear_all()
                return
        self._reclaim()

    def _reclaim(self, ahead: float = 0.0) -> None:
        """Remove what dead writers left; ``ahead``: seconds by which leases are taken to be older than they are."""
        self._count("dead_writer", reclaim(self._root, self._now() + ahead))

    def _clear_all(self) -> None:
        """No pod of this node uses the directory: leases of the dead have no reader, and files of others no owner."""
        self._reclaim(MAX_LEASE_SECONDS)
        left = tidying.by_place(self._book())
        present = tidying.present(self._marks(), self._now())  # this pod, and others that start at the same time
        with places.folder(self._root) as root:
            for name in os.listdir(root):
                if name.startswith(places.POOL_PREFIX) or name in present:
                    continue
                try:
                    _remove_tree(name, root)
                except FileNotFoundError:
                    continue
                except OSError as error:
                    self._metrics.shm_errors.inc()
                    log.warning("the shared directory's %s stays: %s", name, error)
                    continue
                self._removed("left_behind", *left.get(name, (0, 0)))

    def _look(self) -> None:
        """Look at every byte, tell what there is, and remove files of others that have to go."""
        self._touch()
        book = self._book()
        found = self._judge(book)
        going = tidying.doomed(book, found, self._wall())
        for one in going:
            self._remove(one)
        if going:
            book = self._book()
            found = self._judge(book)
        self._watch_uses(book)
        self._remove_empty_folders()
        self._figures = found
        self._metrics.shm = tidying.by_state(book)
        self._metrics.shm_pressure.set(tidying.pressure(book, self._limit))
        self._tell(found)

    def _book(self) -> Ledger:
        return ledger(self._root, self._now())

    def _judge(self, book: Ledger) -> feed.SharedDirectory:
        return tidying.shared(book, self._limit, was_above=self._figures is not None and self._figures.above)

    def _remove(self, one: tidying.Doomed) -> None:
        """Remove a file unless it was used since it was looked at. Its folder stays: an encoder may be about to write
        into it. A later look removes folders that stayed empty."""
        path = self._root / one.entry.path
        try:
            status = path.lstat()
            if max(status.st_atime, status.st_mtime) == one.entry.used:
                path.unlink()
                self._removed(one.reason, 1, one.entry.bytes)
        except FileNotFoundError:
            return
        except PermissionError:
            self._metrics.shm_errors.inc()

    def _remove_empty_folders(self) -> None:
        """Remove what encoders' files lay in, once it stood empty for long: one that writes makes its folder anew."""
        if self._now() < self._folders_at:
            return
        self._folders_at = self._now() + FOLDER_PERIOD
        for path, _, inside in os.walk(self._root, topdown=False):
            below = Path(path).relative_to(self._root)
            if inside or not below.parts or below.parts[0].startswith(places.POOL_PREFIX):
                continue
            with suppress(OSError):  # it is not empty, or gone
                if self._wall() - os.lstat(path).st_mtime >= tidying.FORGOTTEN_SECONDS:
                    os.rmdir(path)

    def _watch_uses(self, book: Ledger) -> None:
        """See to it that the next reading of an encoder's file shows.

        Linux notes a reading only where the file was changed, in whatever way, since the last one that it noted
        (relatime). To set the times that it has changes nothing but that.
        """
        for entry in book.entries:
            if tidying.is_encoders(entry):
                path = self._root / entry.path
                with suppress(OSError):  # gone, or of another user: then its age counts from its first reading
                    status = path.lstat()
                    if status.st_atime_ns > status.st_ctime_ns:
                        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns), follow_symlinks=False)

    def _marks(self) -> dict[str, float]:
        return dict(_marks(self._root))

    def _touch(self) -> None:
        """Say that this pod is there."""
        path, now = self._root / self._mark, self._now()
        path.touch(0o640)
        os.utime(path, (now, now))

    def _engine_answers(self) -> bool:
        """Whether the pod's engine listens: then this container was started again, or only this one ends."""
        try:
            where = (self._settings.pod_ip, self._settings.ports.engine)
            socket.create_connection(where, timeout=ASK_SECONDS).close()
        except OSError:
            return False
        return True

    def _count(self, reason: tidying.Reason, done: Reclaimed) -> None:
        self._removed(reason, done.slots + done.files, done.bytes)
        if done.slots + done.files:
            log.info("shared directory: %d bytes of dead writers are gone", done.bytes)

    def _removed(self, reason: tidying.Reason, number: int, freed: int) -> None:
        self._metrics.shm_reclaimed.labels(reason).inc(number)
        self._metrics.shm_reclaimed_bytes.labels(reason).inc(freed)


def _marks(root: Path) -> Iterator[tuple[str, float]]:
    """Mark -> when its pod's janitor was last heard of, seconds on the node's CLOCK_BOOTTIME."""
    with os.scandir(root) as entries:
        for entry in entries:
            if entry.name.startswith(MARK_PREFIX):
                with suppress(FileNotFoundError):
                    yield entry.name, entry.stat(follow_symlinks=False).st_mtime


def _remove_tree(name: str, root: int) -> None:
    """Remove a file or a folder with all that is in it; through no link. Raises ``OSError``."""
    try:
        os.unlink(name, dir_fd=root)
    except IsADirectoryError:
        shutil.rmtree(name, dir_fd=root)
