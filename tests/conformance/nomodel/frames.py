"""Messages between a test and a process in an engine's environment: a length (4 bytes, little-endian) and msgpack."""

import os
import struct
import sys
from collections.abc import Callable
from typing import Any, BinaryIO

import msgspec


def read(stream: BinaryIO) -> Any | None:
    """Return the next message, ``None`` at the end."""
    head = stream.read(4)
    return msgspec.msgpack.decode(stream.read(*struct.unpack("<I", head))) if head else None


def write(stream: BinaryIO, value: Any) -> None:
    raw = msgspec.msgpack.encode(value)
    stream.write(struct.pack("<I", len(raw)) + raw)
    stream.flush()


def serve(answer: Callable[[Any], Any]) -> None:
    """Answer the messages of standard input on standard output. What the engine prints goes to standard error."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    while (message := read(sys.stdin.buffer)) is not None:
        write(answers, answer(message))
