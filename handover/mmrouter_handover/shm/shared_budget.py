"""How much room all writers below one root have together: what one of them looks at before it makes a file."""

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from mmrouter_handover.shm.handles import HandOverError

HIGH_WATER = 0.9
LOOK_SECONDS = 1.0
"""For how long a look at the files of the others is good. What this process adds meanwhile is added to it."""


class Room:
    """The bound of everything below a root, whoever wrote it. Usable from several threads."""

    def __init__(self, root: str | Path, total_bytes: int | None, high_water: float, now: Callable[[], float]) -> None:
        """``total_bytes``: null where only the file system bounds; ``high_water``: share of either that is used."""
        self._root, self._total, self._high_water, self._now = root, total_bytes, high_water, now
        self._mutex = threading.Lock()
        self._looked: float | None = None
        self._taken = 0

    def take(self, wanted: int) -> None:
        """Count ``wanted`` bytes in that are about to be written. Raises :class:`HandOverError` ``full``."""
        with self._mutex:
            space = os.statvfs(self._root)
            left = space.f_bavail * space.f_frsize
            if left - wanted < (1 - self._high_water) * space.f_blocks * space.f_frsize:
                raise HandOverError("full", f"the file system has {left} bytes left")
            if self._total is None:
                return
            now = self._now()
            if self._looked is None or not 0 <= now - self._looked < LOOK_SECONDS:
                self._taken, self._looked = taken_bytes(self._root), now
            if self._taken + wanted > self._high_water * self._total:
                raise HandOverError("full", f"all writers have {self._taken} of {self._total} bytes")
            self._taken += wanted

    def give(self, freed: int) -> None:
        """Count bytes out that were removed."""
        with self._mutex:
            self._taken = max(0, self._taken - freed)


def taken_bytes(folder: str | Path) -> int:
    """Return the bytes that the files below a folder take. Nothing is opened but folders, and no link is followed."""
    total = 0
    with suppress(OSError), os.scandir(folder) as entries:  # removed meanwhile, or not for us
        for entry in entries:
            with suppress(OSError):
                if entry.is_dir(follow_symlinks=False):
                    total += taken_bytes(entry.path)
                else:
                    total += entry.stat(follow_symlinks=False).st_blocks * 512
    return total
