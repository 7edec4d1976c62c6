"""Peers that are left alone for a while: each attempt to meet one that cannot be reached costs NIXL a descriptor."""

from collections import OrderedDict
from collections.abc import Callable

FIRST_SECONDS = 30.0
MOST_SECONDS = 3600.0
MAX_NAMES = 1024


class Rest:
    """Who failed when. The rest doubles with each failure in a row. ``now`` in seconds, monotonic."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._failed: OrderedDict[str, tuple[int, float]] = OrderedDict()

    def failed(self, name: str) -> None:
        times, _ = self._failed.pop(name, (0, 0.0))
        seconds = min(MOST_SECONDS, FIRST_SECONDS * 2 ** min(times, 20))
        self._failed[name] = (times + 1, self._now() + seconds)
        while len(self._failed) > MAX_NAMES:
            self._failed.popitem(last=False)

    def worked(self, name: str) -> None:
        self._failed.pop(name, None)

    def rests(self, name: str) -> bool:
        return self._now() < self._failed.get(name, (0, 0.0))[1]
