"""Measures how long files have been unused, by a clock that is never set. Pure.

Times of files are on the wall clock. After a step of that clock, a file of a request in flight would look forgotten, or
a forgotten one in use. So only the first scan compares the two; from then on, another time of a file shows that it was
used since the scan before.
"""

from collections.abc import Mapping

Times = tuple[float, ...]
"""When a file was used, one time for each kind of use. After a step back, the last use is not the latest one."""


class Ages:
    """Ages of the files, or folders, of one directory over its scans."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[Times, float]] = {}  # path -> its times, and its last use on the steady clock
        self._scanned: float | None = None

    def scan(self, used: Mapping[str, Times], now: float, wall: float) -> dict[str, float]:
        """Return path -> seconds since its use. ``used``: path -> times, on the clock that is at ``wall`` now; ``now``:
        the steady clock.
        """
        longest = float("inf") if self._scanned is None else now - self._scanned
        known = {}
        for path, times in used.items():
            before = self._known.get(path)
            unused = min(max(0.0, wall - max(times)), longest)
            known[path] = before if before and before[0] == times else (times, now - unused)
        self._known, self._scanned = known, now
        return {path: now - since for path, (_, since) in known.items()}
