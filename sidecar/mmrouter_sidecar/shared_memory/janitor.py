"""Janitor of the node's shared directory (docs/transfer.md): remove files of dead writers and unused encoder files.

It follows :mod:`mmrouter_sidecar.shared_memory.cleanup_rules`. The sidecar of every pod with the directory runs one.
They need no coordination: a file that one has removed is simply gone for the others.
"""

import asyncio
import logging
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from mmrouter_handover.shm import Ledger, files, ledger, reclaim
from mmrouter_handover.shm.slot_format import MAX_LEASE_SECONDS
from mmrouter_lib import feed
from mmrouter_sidecar.metrics import Metrics
from mmrouter_sidecar.settings import Settings
from mmrouter_sidecar.shared_memory import cleanup_rules, embedding_files
from mmrouter_sidecar.shared_memory.ages import Ages

log = logging.getLogger("mmrouter.sidecar")

PERIOD = 1.0  # seconds between searches for dead writers
MAX_PERIOD = 3.0  # their longest interval, so that files of dead writers are gone within five seconds
SCAN_PERIOD = 5.0  # seconds between scans of all files
FOLDER_PERIOD = 60.0
CPU_SHARE = 0.005  # share of CPU time for scans: after a long scan the next one is later
MARK_PREFIX = "sidecar-"  # prefix of a pod's mark file; its modification time is that of the janitor's last scan
CONNECT_SECONDS = 0.5


class Janitor:
    """The janitor of one pod. ``report`` gets the usage after each scan."""

    def __init__(
        self,
        settings: Settings,
        metrics: Metrics,
        report: Callable[[feed.SharedDirectory], None],
        *,
        now: Callable[[], float] = files.clock,
        wall: Callable[[], float] = time.time,
    ) -> None:
        assert settings.shared_dir is not None
        self._root, self._limit = settings.shared_dir, settings.shared_bytes
        self._settings, self._metrics, self._report, self._now, self._wall = settings, metrics, report, now, wall
        self._mark = MARK_PREFIX + settings.pod_uid
        self._was_above = False
        self._folders_at = 0.0
        self._ages, self._folder_ages = Ages(), Ages()
        self._broken = False
        self._turn = threading.Lock()
        self._ended = False

    async def begin(self) -> None:
        await asyncio.to_thread(self._safely, self._begin)

    async def run(self) -> None:
        scan_at = 0.0
        while True:
            spent = await asyncio.to_thread(self._safely, self._tick)
            if time.monotonic() >= scan_at:
                scanned = await asyncio.to_thread(self._safely, self.scan)
                scan_at = time.monotonic() + max(SCAN_PERIOD, scanned / CPU_SHARE)
            await asyncio.sleep(min(MAX_PERIOD, max(PERIOD, spent / CPU_SHARE)))

    async def end(self) -> None:
        """Clean up completely if this was the last pod of the node."""
        await asyncio.to_thread(self._safely, self._end)

    # All methods below block on the file system and run in a thread.

    def _safely(self, step: Callable[[], None]) -> float:
        """Run a step; return its CPU seconds. An unusable directory is logged once: the engine serves without it."""
        began = time.thread_time()
        try:
            with self._turn:  # a cancelled step continues in its thread
                if not self._ended:
                    step()
        except (OSError, RecursionError) as error:
            self._metrics.shm_errors.inc()
            if not self._broken:
                log.error("the shared directory %s: %s", self._root, error)
            self._broken = True
        else:
            self._broken = False
        return time.thread_time() - began

    def _begin(self) -> None:
        marks = self._marks()
        self.touch()
        if cleanup_rules.alone(marks, self._mark, self._now()) and not self._engine_answers():
            self.clear_all()
        else:
            self._reclaim()
        self.scan()

    def _end(self) -> None:
        self._ended = True
        if not self._engine_answers():  # otherwise only this container restarts
            with suppress(FileNotFoundError):
                (self._root / self._mark).unlink()
            if cleanup_rules.alone(self._marks(), self._mark, self._now()):
                self.clear_all()
                return
        self._reclaim()

    def _tick(self) -> None:
        self.touch()  # also while a scan of many files takes longer than a mark lasts
        self._reclaim()

    def _reclaim(self, ahead: float = 0.0) -> None:
        """Remove the files of dead writers; ``ahead``: seconds added to the age of leases."""
        done = reclaim(self._root, self._now() + ahead)
        self._removed("dead_writer", done.slots + done.files, done.bytes)
        if done.slots + done.files:
            log.info("shared directory: removed %d bytes of dead writers", done.bytes)

    def clear_all(self) -> None:
        """Remove everything: no pod uses the directory, so leases have no reader and other files no owner."""
        self._reclaim(MAX_LEASE_SECONDS)
        sizes = cleanup_rules.by_top_level(ledger(self._root, self._now()))
        present = cleanup_rules.present(self._marks(), self._now())  # this pod, and others that start now
        with files.folder(self._root) as root:
            for name in os.listdir(root):
                if name.startswith(files.POOL_PREFIX) or name in present:
                    continue
                try:
                    _remove_tree(name, root)
                except FileNotFoundError:
                    continue
                except (OSError, RecursionError) as error:
                    self._metrics.shm_errors.inc()
                    log.warning("cannot remove %s from the shared directory: %s", name, error)
                    continue
                self._removed("left_behind", *sizes.get(name, (0, 0)))

    def scan(self) -> None:
        """Scan all files, report the usage, and remove encoder files if necessary."""
        self.touch()
        book, usage = self._usage()
        ages = self._ages.scan(cleanup_rules.encoders_files(book), self._now(), self._wall())
        removals = cleanup_rules.removals(book, usage, ages)
        for removal in removals:
            self._remove(removal)
        if removals:
            book, usage = self._usage()
        self._track_reads(book)
        self._remove_empty_folders()
        self._was_above = usage.above
        self._metrics.shm = cleanup_rules.by_state(book)
        self._metrics.shm_pressure.set(cleanup_rules.pressure(book, self._limit))
        self._report(usage)

    def _usage(self) -> tuple[Ledger, feed.SharedDirectory]:
        book = ledger(self._root, self._now())
        return book, cleanup_rules.shared(book, self._limit, was_above=self._was_above)

    def _remove(self, removal: cleanup_rules.Removal) -> None:
        try:
            if embedding_files.remove(self._root, removal.entry):
                self._removed(removal.reason, 1, removal.entry.bytes)
        except PermissionError:
            self._metrics.shm_errors.inc()

    def _remove_empty_folders(self) -> None:
        if self._now() >= self._folders_at:
            self._folders_at = self._now() + FOLDER_PERIOD
            embedding_files.remove_empty_folders(self._root, self._folder_ages, self._now(), self._wall())

    def _track_reads(self, book: Ledger) -> None:
        """Make Linux record the next read of each encoder file.

        With relatime, a read is recorded only if the file has changed since the last recorded one. Setting the times to
        their current values counts as a change.
        """
        for entry in book.entries:
            if cleanup_rules.is_encoders(entry):
                path = self._root / entry.path
                with suppress(OSError):  # gone, or of another user: its age then counts from its first read
                    status = path.lstat()
                    if status.st_atime_ns > status.st_ctime_ns:
                        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns), follow_symlinks=False)

    def _marks(self) -> dict[str, float]:
        """Return each mark and its time, in seconds on the node's CLOCK_BOOTTIME."""
        marks = {}
        with os.scandir(self._root) as entries:
            for entry in entries:
                if entry.name.startswith(MARK_PREFIX):
                    with suppress(FileNotFoundError):
                        marks[entry.name] = entry.stat(follow_symlinks=False).st_mtime
        return marks

    def touch(self) -> None:
        path, now = self._root / self._mark, self._now()
        try:
            os.utime(path, (now, now))
        except FileNotFoundError:
            draft = path.with_name(f"new-{path.name}")  # a mark never has another time, by which it would not count
            draft.touch(0o640)
            os.utime(draft, (now, now))
            draft.replace(path)

    def _engine_answers(self) -> bool:
        """Whether the pod's engine listens, so that only this container restarts."""
        try:
            address = (self._settings.pod_ip, self._settings.ports.engine)
            socket.create_connection(address, timeout=CONNECT_SECONDS).close()
        except OSError:
            return False
        return True

    def _removed(self, reason: cleanup_rules.Reason, number: int, freed: int) -> None:
        self._metrics.shm_reclaimed.labels(reason).inc(number)
        self._metrics.shm_reclaimed_bytes.labels(reason).inc(freed)


def _remove_tree(name: str, root: int) -> None:
    """Remove a file or a folder tree without following links. Raises ``OSError``."""
    try:
        os.unlink(name, dir_fd=root)
    except IsADirectoryError:
        shutil.rmtree(name, dir_fd=root)
