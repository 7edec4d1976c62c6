"""Removal of the files in which encoders hand over embeddings, from the node's memory or a volume of several nodes.

The sidecar of every encoder cleans the volume by the rules of the node's janitor for encoder files only, because pods
of several nodes share no clock and no leases. Several sidecars may remove one file. On a volume that records no reads,
a file counts as unused an hour after it was written; its image is then encoded again.
"""

import asyncio
import logging
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from mmrouter_handover.shm import Entry, files, ledger
from mmrouter_sidecar.shared_memory import cleanup_rules
from mmrouter_sidecar.shared_memory.ages import Ages

log = logging.getLogger("mmrouter.sidecar")

PERIOD: Final = 60.0  # seconds between scans: a volume may be slow, and every encoder scans it


async def keep_clean(root: Path, limit: int) -> None:
    """Remove unused embeddings below ``root`` until cancelled. ``limit``: bytes; 0: the file system alone bounds it."""
    ages, folder_ages = Ages(), Ages()
    while True:
        try:
            await asyncio.to_thread(clean, root, limit, ages, folder_ages)
        except OSError as error:
            log.warning("the volume of embeddings: %s", error)
        await asyncio.sleep(PERIOD)


def clean(root: Path, limit: int, ages: Ages, folder_ages: Ages) -> int:
    """Remove what is unused, or above the limit; return the number of files. Raises ``OSError`` after all removals."""
    now, wall = files.clock(), time.time()
    book = ledger(root, now)
    unused = ages.scan(cleanup_rules.encoders_files(book), now, wall)
    removed, fault = 0, None
    for removal in cleanup_rules.removals(book, cleanup_rules.shared(book, limit, was_above=False), unused):
        try:
            removed += remove(root, removal.entry)
        except OSError as error:  # of another user, for instance: the other files are removed all the same
            fault = error
    remove_empty_folders(root, folder_ages, now, wall)
    if fault is not None:
        raise fault
    return removed


def remove(root: Path, entry: Entry) -> bool:
    """Remove a file unless it is gone or was used since the scan; return whether it did. Raises ``OSError``.

    Its folder stays, as an encoder may be about to write into it; a later scan removes folders that stayed empty.
    """
    path = root / entry.path
    try:
        status = path.lstat()
        if (status.st_atime, status.st_mtime) != entry.used:
            return False
        path.unlink()
    except FileNotFoundError:
        return False
    return True


def remove_empty_folders(root: Path, ages: Ages, now: float, wall: float) -> None:
    """Remove folders of encoder files that were empty for long; an encoder creates its folder when it writes."""
    empty: dict[str, tuple[float]] = {}
    for path, _, inside in os.walk(root, topdown=False):
        below = Path(path).relative_to(root)
        if inside or not below.parts or below.parts[0].startswith(files.POOL_PREFIX):
            continue
        with suppress(OSError):  # gone
            empty[path] = (os.lstat(path).st_mtime,)
    for path, age in ages.scan(empty, now, wall).items():
        if age >= cleanup_rules.FORGOTTEN_SECONDS:
            with suppress(OSError):  # not empty, or gone
                os.rmdir(path)
