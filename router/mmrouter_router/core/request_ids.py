"""Request ids: ULIDs (milliseconds, then 80 random bits), which sort by time and cannot be guessed."""

import os
import time
from typing import Final

ALPHABET: Final = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_LETTERS: Final = (ALPHABET * 8).encode()  # byte -> letter; random bytes give uniform letters, eight bytes each
_TIME, _RANDOM = 10, 16  # letters of the two parts of an id
_BATCH: Final = 256  # ids per read of the system's random source, because the system call costs more than the rest


class RequestIds:
    """Generates ids that begin with ``prefix``."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._random = ""
        self._used = 0
        self._milliseconds = -1
        self._begin = ""  # of all ids of that millisecond

    def __call__(self) -> str:
        start = self._used
        if start == len(self._random):
            self._random, start = os.urandom(_RANDOM * _BATCH).translate(_LETTERS).decode(), 0
        end = self._used = start + _RANDOM
        now = time.time_ns() // 1_000_000
        if now != self._milliseconds:
            self._milliseconds = now
            letters = [ALPHABET[now >> shift & 31] for shift in range(5 * (_TIME - 1), -1, -5)]
            self._begin = self._prefix + "".join(letters)
        return self._begin + self._random[start:end]
