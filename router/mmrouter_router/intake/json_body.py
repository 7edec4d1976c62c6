"""Safe parsing of a JSON body: bounded in bytes, in values and in depth.

The depth limit also protects the engine's parser. The router forwards the parsed object serialised again, so engine
and router cannot read one body in two ways (duplicate keys, odd numbers, invalid UTF-8).
"""

import re
from typing import Any

import orjson

from mmrouter_router.core.errors import RequestError

Raw = bytes | bytearray
"""A body as received."""
MAX_DEPTH = 100
"""Nested arrays and objects; Python's json module in the engines fails near 1000."""
MAX_VALUES = 1_000_000
"""Strings, separators and containers: about 100 MB as Python objects in the worst case."""
SMALL_BODY = 2 * 1024**2
"""Bytes of a body that cannot exceed that, whatever its content."""
_FEW_QUOTES = 8192
_LONGEST_RUN = 64

_SHORT = 64 * 1024
"""Bytes of a body up to which counting brackets is cheaper than walking its objects."""

_CONTAINERS = frozenset({dict, list})

_LEXEMES = re.compile(rb'"[^"]*+"?|[\[{,]')
_BRACKETS = re.compile(r'"[^"]*+"?|[\[{\]}]')


def parse_object(raw: Raw, max_bytes: int) -> dict[str, Any]:
    """Return the body's object. Raises :class:`RequestError`: 413 for too many bytes, 400 for anything but an object.

    Rejects NaN, infinities, lone surrogates and invalid UTF-8. Integers beyond 64 bits become floats.
    """
    if len(raw) > max_bytes:
        raise RequestError.too_large(max_bytes)
    _bound_values(raw)
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise RequestError.invalid_json(str(error)) from error
    if not isinstance(body, dict):
        raise RequestError.invalid("The body must be a JSON object.", code="invalid_type")
    few = len(raw) <= _SHORT and raw.count(b"{") + raw.count(b"[") <= MAX_DEPTH
    if not few and depth(body) > MAX_DEPTH:
        raise RequestError.invalid_json(f"it is nested more than {MAX_DEPTH} levels deep")
    return body


def depth(value: Any) -> int:
    """Return the nesting depth of containers."""
    levels = 0
    layer = [value] if type(value) in _CONTAINERS else []
    while layer:
        levels += 1
        children: list[Any] = []
        for container in layer:
            items = container.values() if type(container) is dict else container
            children += [item for item in items if type(item) in _CONTAINERS]
        layer = children
    return levels


def text_depth(text: str) -> int:
    """Return the depth to which a recursive parser would descend into a JSON *text*, valid or not."""
    level = deepest = 0
    # Without escapes a string ends at the next quote, which keeps the pattern linear on hostile text.
    for match in _BRACKETS.finditer(text.replace("\\\\", "").replace('\\"', "")):
        lexeme = match[0]
        if lexeme in "[{":
            level += 1
            deepest = max(deepest, level)
        elif lexeme in "]}":
            level = max(level - 1, 0)
    return deepest


def _bound_values(raw: Raw) -> None:
    """Refuse a body that is small in bytes but large as objects (``[[],[],...``) before it is parsed."""
    if len(raw) <= SMALL_BODY or bytes_outside_strings(raw) <= MAX_VALUES:
        return
    # Without escapes a string ends at the next quote, which keeps the pattern linear on hostile bodies.
    plain = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
    for number, _ in enumerate(_LEXEMES.finditer(plain)):
        if number >= MAX_VALUES:
            raise RequestError.invalid(f"The body holds more than {MAX_VALUES} values.", code="request_too_large")


def bytes_outside_strings(raw: Raw) -> int:
    """Return an upper bound of the bytes outside strings: small for a body that is large because of its images.

    Gives up, and returns the body's length, at more quotes or backslashes than a request with images has.
    """
    outside = start = 0
    inside = False
    place = -1
    for _ in range(_FEW_QUOTES):
        place = raw.find(b'"', place + 1)
        if place < 0:
            return outside if inside else outside + len(raw) - start
        if not inside:
            outside += place - start
            inside = True
        else:
            before = raw[max(place - _LONGEST_RUN, 0) : place]
            backslashes = len(before) - len(before.rstrip(b"\\"))
            if backslashes == _LONGEST_RUN:
                break
            if backslashes % 2 == 0:  # the quote is not escaped
                start = place + 1
                inside = False
    return len(raw)
