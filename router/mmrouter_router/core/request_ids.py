"""Request ids: ULIDs (milliseconds, then 80 random bits), which sort by time and cannot be guessed.

A client may name its request by ``x-request-id``. That name is answered and found in the decision log, but engines get
the router's id: a client could choose the id of another tenant's request.
"""

import os
import re
import secrets
import time
from collections.abc import Iterable
from typing import Final

NAME_HEADER: Final = b"x-request-id"
_NAME: Final = re.compile(rb"[A-Za-z0-9._:@/+=~-]{1,128}")
_ANSWER_PREFIXES: Final = ("chatcmpl-", "cmpl-", "resp_", "msg_")  # that engines put before the id of a request

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


def client_name(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return the client's name of its request, empty without one or where it is longer or of other characters."""
    name = next((value for header, value in headers if header == NAME_HEADER), b"")
    return name if _NAME.fullmatch(name) else b""


def answered_name(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return the client's name of its request, else a new one: of a request that is not in the decision log."""
    return client_name(headers) or secrets.token_hex(16).encode()


def without_prefix(name: str) -> str:
    """Return the request id in an engine's answer id: ``chatcmpl-ID``, or ``resp_ID_PLACE`` of a stored response."""
    for prefix in _ANSWER_PREFIXES:
        if name.startswith(prefix):
            return name.removeprefix(prefix).partition("_")[0]
    return name
