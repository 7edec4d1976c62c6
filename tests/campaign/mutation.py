"""Mutations of byte strings and of decoded documents, drawn from a seeded generator."""

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

MAX_BYTES = 64 * 1024  # of a mutated input
MSGPACK_WORDS = (b"\xdd\xff\xff\xff\xff", b"\xcf" + b"\xff" * 8, b"\xa3GPU", b"\xc0", b"\x00", b"\x7f")
"""Words for inputs in msgpack: the longest array, the largest number, a name, nil, and small numbers."""
_EDGES = (b"", b"\0", b"\xff", b"\x7f\xff", b"\x80\0\0\0", b"\xff" * 4, b"\xff" * 8, b"-1", b"0", b"9" * 20, b"1e999")


def mutated(source: random.Random, kept: Sequence[bytes], words: Sequence[bytes] = ()) -> bytes:
    """Return one of ``kept`` with one to four changes: bytes, words, pieces of itself and of another input."""
    data = bytearray(source.choice(kept))
    for _ in range(source.choice((1, 1, 1, 2, 2, 3, 4))):
        source.choice(_CHANGES)(source, data, kept, words)
    del data[MAX_BYTES:]
    return bytes(data)


Change = Callable[[random.Random, bytearray, Sequence[bytes], Sequence[bytes]], None]


def _span(source: random.Random, size: int, most: int = 64) -> slice:
    """Return a short piece of ``size`` bytes, seldom a long one."""
    start = source.randrange(size + 1)
    length = min(int(source.expovariate(0.2)) if source.random() < 0.9 else source.randrange(most * 16), size - start)
    return slice(start, start + length)


def _set_byte(source: random.Random, data: bytearray, kept: Sequence[bytes], words: Sequence[bytes]) -> None:
    if data:
        data[source.randrange(len(data))] = source.randrange(256)


def _flip_bit(source: random.Random, data: bytearray, kept: Sequence[bytes], words: Sequence[bytes]) -> None:
    if data:
        data[source.randrange(len(data))] ^= 1 << source.randrange(8)


def _remove(source: random.Random, data: bytearray, kept: Sequence[bytes], words: Sequence[bytes]) -> None:
    del data[_span(source, len(data))]


def _repeat(source: random.Random, data: bytearray, kept: Sequence[bytes], words: Sequence[bytes]) -> None:
    piece = _span(source, len(data))
    data[piece.stop : piece.stop] = bytes(data[piece]) * source.choice((1, 1, 1, 2, 50))


def _move(source: random.Random, data: bytearray, kept: Sequence[bytes], words: Sequence[bytes]) -> None:
    piece = _span(source, len(data))
    moved = bytes(data[piece])
    del data[piece]
    at = source.randrange(len(data) + 1)
    data[at:at] = moved


def _insert(source: random.Random, data: bytearray, kept: Sequence[bytes], words: Sequence[bytes]) -> None:
    at = source.randrange(len(data) + 1)
    end = at + source.choice((0, 0, 1, 2, 4, 8))
    data[at:end] = source.choice(words if words and source.random() < 0.8 else _EDGES)


def _splice(source: random.Random, data: bytearray, kept: Sequence[bytes], words: Sequence[bytes]) -> None:
    other = source.choice(kept)
    data[_span(source, len(data))] = other[_span(source, len(other))]


def _cut(source: random.Random, data: bytearray, kept: Sequence[bytes], words: Sequence[bytes]) -> None:
    if source.random() < 0.3:
        del data[source.randrange(len(data) + 1) :]


_CHANGES: tuple[Change, ...] = (
    _set_byte,
    _set_byte,
    _flip_bit,
    _remove,
    _repeat,
    _move,
    _insert,
    _insert,
    _insert,
    _splice,
    _splice,
    _cut,
)


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every (container, key) of a document of mappings and lists."""
    for key in list(value) if isinstance(value, dict) else range(len(value)):
        yield value, key
        if isinstance(value[key], dict | list):
            yield from places(value[key])


def changed(
    source: random.Random, document: Any, names: Sequence[Any], values: Sequence[Any], donors: Sequence[Any] = ()
) -> Any:
    """Return a document with one to four changes: values replaced, removed, moved, wrapped, named or taken from others.

    The document itself is changed, too.
    """
    for _ in range(source.randint(1, 4)):
        where = list(places(document)) if isinstance(document, dict | list) else []
        if not where:
            return copy.deepcopy(source.choice(values))
        holder, key = source.choice(where)
        step = source.randrange(6)
        if step == 0:
            del holder[key]
        elif step == 1 and isinstance(holder, dict):
            holder[source.choice(names)] = copy.deepcopy(source.choice(values))
        elif step == 2 or (step == 3 and not donors):
            other, place = source.choice(where)
            holder[key] = copy.deepcopy(other[place])
        elif step == 3:
            other, place = source.choice(list(places(source.choice(donors))))
            holder[key] = copy.deepcopy(other[place])
        elif step == 4:
            holder[key] = {source.choice(names): holder[key]} if source.random() < 0.5 else [holder[key]]
        else:
            holder[key] = copy.deepcopy(source.choice(values))
    return document
