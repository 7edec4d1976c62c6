"""Safe parsing of a JSON body, bounded in bytes, values and depth, and typed access to its fields.

The depth limit also protects the engine's parser. The router forwards the parsed object serialised again, so engine
and router cannot read one body in two ways (duplicate keys, odd numbers, invalid UTF-8).
"""

import re
from collections.abc import Iterator, Set
from typing import Any, TypeAlias, TypeVar

import orjson

from mmrouter_router.core.errors import RequestError, kind_of
from mmrouter_router.core.worker_threads import INLINE_BYTES

Raw = bytes | bytearray  # a body as received
MAX_DEPTH = 100  # nested arrays and objects; Python's json module in the engines fails near 1000
MAX_VALUES = 131_072  # strings, arrays and objects of a body: parsing so many small ones takes 15 ms
MAX_ITEMS = 1_048_576  # separators of a body, which bounds its numbers: a prompt of a million token ids has as many

_CONTAINER_BYTES = 128
"""Bytes as which an object or array counts: checking and rendering a short message takes 40 us on a slow CPU."""

SEARCHED = 1 << 20
"""Bytes that one call of :func:`find_bytes` searches."""

_SHORT = 64 * 1024  # bytes of a body up to which counting brackets is cheaper than walking its objects

_PIECE = 64 * 1024  # bytes of a body that one call scans, because Python changes threads between calls only

_CONTAINERS = frozenset({dict, list})

_LEXEMES = re.compile(rb'"[^"]*+"?|[\[{]|(,)')
_BRACKETS = re.compile(r'"[^"]*+"?|[\[{\]}]')


def parse_object(raw: Raw, max_bytes: int) -> dict[str, Any]:
    """Return the body's object. Raises :class:`RequestError` (413, 400). Integers beyond 64 bits become floats."""
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


def work_size(raw: Raw) -> int:
    """Return the bytes of plain text that take as long as a body."""
    if len(raw) > INLINE_BYTES:
        return len(raw)
    return max(len(raw), _CONTAINER_BYTES * (raw.count(b"{") + raw.count(b"[")))


def depth(value: Any) -> int:
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
    inside = False  # a string that began in an earlier piece
    # Without escapes a string ends at the next quote, which keeps the pattern linear on hostile text.
    text = text.replace("\\\\", "").replace('\\"', "")
    for start in range(0, len(text), _PIECE):  # between matches no other thread runs
        piece = text[start : start + _PIECE]
        at = piece.find('"') + 1 if inside else 0
        if inside and not at:
            continue
        inside = False
        for match in _BRACKETS.finditer(piece, at):
            lexeme = match[0]
            if lexeme in "[{":
                level += 1
                deepest = max(deepest, level)
            elif lexeme in "]}":
                level = max(level - 1, 0)
            else:
                inside = match.end() == len(piece) and (len(lexeme) == 1 or lexeme[-1] != '"')
        if deepest > MAX_DEPTH:
            break
    return deepest


def find_bytes(raw: Raw, text: bytes, at: int = 0) -> int:
    """Return where a text begins from ``at`` on, or -1. No other thread runs while one call of Python's searches."""
    for begin in range(at, len(raw), SEARCHED):
        if (place := raw.find(text, begin, begin + SEARCHED + len(text) - 1)) >= 0:
            return place
    return -1


def _bound_values(raw: Raw) -> None:
    """Refuse a body that is small in bytes but large as objects (``[[],[],...``) before it is parsed."""
    if len(raw) <= MAX_VALUES:
        return
    quotes, opened, commas = _count(raw, b'"'), _count(raw, b"[") + _count(raw, b"{"), _count(raw, b",")
    if quotes // 2 + opened <= MAX_VALUES and commas <= MAX_ITEMS:
        return
    values = items = 0
    for comma in _lexemes(raw):
        if comma:
            items += 1
        else:
            values += 1
        if values > MAX_VALUES or items > MAX_ITEMS:
            message = f"The body holds more than {MAX_VALUES} strings, arrays and objects, or {MAX_ITEMS} numbers."
            raise RequestError.invalid(message, code="request_too_large")


def _count(raw: Raw, byte: bytes) -> int:
    return sum([raw.count(byte, start, start + _PIECE) for start in range(0, len(raw), _PIECE)])


def _lexemes(raw: Raw) -> Iterator[bool]:
    """Yield for each string, opened array or object, and comma outside strings, whether it is a comma."""
    in_string, half = False, b""  # of an escape that the end of a piece cuts
    for start in range(0, len(raw), _PIECE):
        piece = half + raw[start : start + _PIECE]
        half = b"\\" if (len(piece) - len(piece.rstrip(b"\\"))) % 2 else b""
        # Without escapes a string ends at the next quote, which keeps the pattern linear on hostile bodies.
        piece = piece[: len(piece) - len(half)].replace(b"\\\\", b"").replace(b'\\"', b"")
        begin = piece.find(b'"') + 1 if in_string else 0
        if in_string and not begin:
            continue
        in_string = False
        for lexeme in _LEXEMES.finditer(piece, begin):
            yield lexeme[1] is not None
            in_string = (
                lexeme.end() == len(piece) and lexeme[0][:1] == b'"' and (len(lexeme[0]) == 1 or lexeme[0][-1:] != b'"')
            )


Object = dict[str, Any]
T = TypeVar("T")


def optional(holder: Object, name: str, kind: type[T], path: str = "", expected: str = "") -> T | None:
    """Return a field of a JSON type, ``None`` where it is absent or null. ``path``: the field's name in errors."""
    value = holder.get(name)
    if value is not None and not isinstance(value, kind):
        raise RequestError.wrong_type(path or name, expected or kind_of(kind()), value)
    return value


def required(holder: Object, name: str, kind: type[T], path: str = "", expected: str = "") -> T:
    """Return a field of a JSON type. Raises 400 where it is missing."""
    value = optional(holder, name, kind, path, expected)
    if value is None:
        raise RequestError.missing(path or name)
    return value


def objects(holder: Object, name: str, path: str = "") -> list[Object] | None:
    value: list[Object] | None = optional(holder, name, list, path)
    for number, item in enumerate(value or ()):
        if not isinstance(item, dict):
            raise RequestError.wrong_type(f"{path or name}[{number}]", "an object", item)
    return value


def flag(body: Object, name: str, *, default: bool = False, nullable: bool = False) -> bool:
    """Return a boolean. Strings and numbers are refused, because engines read some of them as true."""
    value = body.get(name, default)
    if value is None and nullable:
        return default
    if not isinstance(value, bool):
        raise RequestError.wrong_type(name, "a boolean", value)
    return value


Served: TypeAlias = str | frozenset[str]
"""Names that a request may give as its model: the deployment's, and those of LoRA adapters."""


def model_of(body: Object, served: Served) -> str:
    """Return the model's name. Raises 400 where it is missing, 404 where it is not served."""
    model = required(body, "model", str)
    if model != served and (isinstance(served, str) or model not in served):
        raise RequestError.unknown_model(model)
    return model


def max_tokens(body: Object, *names: str) -> int | None:
    """Return the first field that is set of several spellings of a token limit; checks that all are integers."""
    limit: int | None = None
    for name in names:
        value = body.get(name)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise RequestError.wrong_type(name, "an integer", value)
        limit = value if limit is None else limit
    return limit


_MEDIA_KEYS = frozenset(("url", "detail", "uuid", "content_hash"))  # the router removes the last two


def media_url(holder: Object, name: str, path: str) -> tuple[Object, str, str, str]:
    """Return (holder, key, URL, field) of media in either spelling: an object with ``url``, or the URL itself."""
    if isinstance(holder.get(name), dict):
        holder = holder[name]
        known_keys(holder, _MEDIA_KEYS, path)
        name, path = "url", f"{path}.url"
    return holder, name, required(holder, name, str, path, "a URL string"), path


def known_keys(holder: Object, known: Set[str], path: str) -> None:
    """Raise 400 for the first key of an object that is not among ``known``."""
    unknown = next((key for key in holder if key not in known), None)
    if unknown is not None:
        raise RequestError.unknown_field(f"{path}.{unknown}")


def count_media(count: int, limit: int, param: str) -> None:
    """Raise 400 for more than ``limit`` images and other media; ``param``: the first one beyond."""
    if count > limit:
        message = f"The request holds more than {limit} images."
        raise RequestError.invalid(message, param=param, code="too_many_images")


def unsupported(path: str, why: str) -> RequestError:
    return RequestError.invalid(f"'{path}' is not supported: {why}.", param=path, code="unsupported_content_part")
