"""Names of requests: ULIDs, milliseconds and then 80 random bits, so that they sort by time and nobody guesses one."""

import os
import time
from typing import Final

ALPHABET: Final = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_LETTERS: Final = (ALPHABET * 8).encode()
"""A letter for each byte: of random bytes, every letter is as likely as any other."""
_TIME, _RANDOM = 10, 16
"""Letters of a name."""
_AT_ONCE: Final = 256
"""Names that one question to the system's source of randomness is for: a question each costs more than all the rest."""


class RequestIds:
    """Makes names that begin with ``prefix``."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._random = ""
        self._used = 0
        self._milliseconds = -1
        self._begin = ""  # of all names of that millisecond

    def __call__(self) -> str:
        """Return a new one."""
        start = self._used
        if start == len(self._random):
            self._random, start = os.urandom(_RANDOM * _AT_ONCE).translate(_LETTERS).decode(), 0
        end = self._used = start + _RANDOM
        now = time.time_ns() // 1_000_000
        if now != self._milliseconds:
            self._milliseconds = now
            letters = [ALPHABET[now >> shift & 31] for shift in range(5 * (_TIME - 1), -1, -5)]
            self._begin = self._prefix + "".join(letters)
        return self._begin + self._random[start:end]
