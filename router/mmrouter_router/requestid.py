"""Names of requests: ULIDs, milliseconds and then 80 random bits, so that they sort by time and nobody guesses one."""

import os
import time
from typing import Final

ALPHABET: Final = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_PAIRS: Final = [first + second for first in ALPHABET for second in ALPHABET]
_SHIFTS: Final = range(120, -1, -10)
_BYTES: Final = 10
_AT_ONCE: Final = 256
"""Names that one question to the system's source of randomness is for: a question each costs more than all the rest."""


class RequestIds:
    """Makes names that begin with ``prefix``."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._random = b""
        self._used = 0

    def __call__(self) -> str:
        """Return a new one."""
        start = self._used
        if start == len(self._random):
            self._random, start = os.urandom(_BYTES * _AT_ONCE), 0
        self._used = start + _BYTES
        value = time.time_ns() // 1_000_000 << 80 | int.from_bytes(self._random[start : self._used])
        return self._prefix + "".join([_PAIRS[value >> shift & 1023] for shift in _SHIFTS])
