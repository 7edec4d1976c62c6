"""Requests that are not sent any more, because engines ended under them."""

from collections import OrderedDict
from typing import Final

DEATHS: Final = 2
"""Engines that may end under one request before it is quarantined."""
REMEMBERED: Final = 1024


class Quarantine:
    """Fingerprints of requests under which engines ended; bounded, oldest forgotten first."""

    def __init__(self, size: int = REMEMBERED) -> None:
        self._size = size
        self._bad: OrderedDict[bytes, None] = OrderedDict()

    def __contains__(self, fingerprint: bytes) -> bool:
        return fingerprint in self._bad

    def add(self, fingerprint: bytes) -> None:
        """Refuse this request from now on."""
        self._bad[fingerprint] = None
        if len(self._bad) > self._size:
            self._bad.popitem(last=False)
