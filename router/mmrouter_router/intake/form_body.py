"""Strict reading of a form with a file (``multipart/form-data``, RFC 7578), and writing it anew for an engine.

An engine gets the form that the router writes, so that router and engine cannot read one body in two ways.
"""

import re
import secrets
from collections.abc import Sequence
from typing import Final, NamedTuple

from mmrouter_router.core.errors import RequestError
from mmrouter_router.intake.json_body import Raw, find_bytes

MAX_FIELDS: Final = 64
MAX_HEAD: Final = 4096  # bytes of a field's headers, which become objects of many times their size
_BOUNDARY: Final = re.compile(rb"--([A-Za-z0-9'()+_,./:=? -]{1,70})\r\n")
_NAMED: Final = re.compile(rb'form-data; ?name="([A-Za-z0-9_\[\]]{1,64})"(; ?filename="([^"\r\n]{0,255})")?')
_TYPE: Final = re.compile(rb"[A-Za-z0-9.+/-]{1,100}")


class Field(NamedTuple):
    """A field of a form. ``filename`` is ``None`` unless it is a file, whose value is a view of the body."""

    name: str
    value: bytes | memoryview
    filename: bytes | None = None
    type: bytes = b""


def read_form(raw: Raw) -> list[Field]:
    """Return the fields of a form. Raises :class:`RequestError` (400) for another body."""
    start = _BOUNDARY.match(raw)
    if start is None:
        raise _invalid("it does not begin with a boundary")
    delimiter = b"\r\n--" + start[1]
    fields: list[Field] = []
    at = start.end() - 2  # at the end of a delimiter's line: a longer line is another one
    while (end := find_bytes(raw, delimiter, at)) >= 0 and len(fields) < MAX_FIELDS:
        fields.append(_field(raw, at, end))
        at = end + len(delimiter)
    if end >= 0 or len(raw) - at > MAX_HEAD or bytes(raw[at:]).strip() != b"--":
        raise _invalid(f"it is incomplete, or has more than {MAX_FIELDS} fields")
    return fields


def write_form(fields: Sequence[Field]) -> tuple[str, tuple[bytes | memoryview, ...]]:
    """Return the content type and the body of a form with these fields, in pieces: files are not copied."""
    boundary = secrets.token_hex(16)
    pieces: list[bytes | memoryview] = []
    for field in fields:
        file = b"" if field.filename is None else b'; filename="%b"' % field.filename
        kind = b"content-type: %b\r\n" % field.type if field.type else b""
        head = b'--%b\r\ncontent-disposition: form-data; name="%b"%b\r\n%b\r\n'
        pieces += (head % (boundary.encode(), field.name.encode(), file, kind), field.value, b"\r\n")
    return f"multipart/form-data; boundary={boundary}", (*pieces, b"--%b--\r\n" % boundary.encode())


def _field(raw: Raw, begin: int, end: int) -> Field:
    """Return the field whose headers and value are these bytes of a body."""
    head_end = raw.find(b"\r\n\r\n", begin, min(end, begin + MAX_HEAD))
    if head_end < 0:
        raise _invalid(f"a field has no headers that end, or more than {MAX_HEAD} bytes of them")
    lines, value = bytes(raw[begin:head_end]).split(b"\r\n"), memoryview(raw)[head_end + 4 : end]
    headers = {name.strip().lower(): text.strip() for name, _, text in (line.partition(b":") for line in lines[1:])}
    named = _NAMED.fullmatch(headers.get(b"content-disposition", b""))
    kind = headers.get(b"content-type", b"")
    if lines[0] or named is None or len(headers) > len(lines) - 1:
        raise _invalid("a field has no name, or more than a name and a file's name")
    is_file = named[2] is not None
    type_ = kind if _TYPE.fullmatch(kind) else b""
    return Field(named[1].decode(), value if is_file else bytes(value), named[3] if is_file else None, type_)


def _invalid(why: str) -> RequestError:
    return RequestError.invalid(f"The body is not a readable form: {why}.", code="invalid_form")
