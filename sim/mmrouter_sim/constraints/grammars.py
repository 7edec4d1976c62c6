"""Regular expressions and grammars, read into forms: in xgrammar's EBNF (like GBNF) and in Lark's syntax.

Lookarounds, back references, word boundaries, Unicode classes and inline flags are refused, most of them by the
engines, too. Anchors are read as no text, because an answer matches as a whole.
"""

import re
from collections import deque
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

from lark import Lark, Token, Transformer_NonRecursive
from lark.exceptions import UnexpectedInput, UnexpectedToken, VisitError

from mmrouter_sim.constraints.shortest import MAX_TEXT, Form, FormError

MAX_SOURCE = 8_192
"""Characters of a regular expression or grammar."""

_SHARED = r"""
either: follow ("|" follow)*
item: atom REPEAT?
"""
_REGEX = r"""
start: either
follow: (item | _ANCHOR)*
?atom: OPEN either ")" -> group
    | CLASS
    | ESCAPE
    | CHARACTER
OPEN: /\((\?(:|P?<[A-Za-z_]\w*>))?/
CLASS: /\[(\\.|[^\]\\])+\]/s
ESCAPE: /\\(x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|u\{[0-9A-Fa-f]{1,6}\}|[^xucbBkpPAzZ0-9])/s
REPEAT: /([*+?]|\{\d{1,9}(,\d{0,9})?\})\??/
_ANCHOR: /[\^$]/
CHARACTER: /[^\\()\[|*+?{^$]/s
"""
_EBNF = r"""
start: (HEAD either)+
follow: item+
?atom: "(" either? ")" -> group
    | CLASS
    | TEXT
    | NAME
HEAD.2: /(?<![^\n])[ \t]*[A-Za-z_][\w.-]*\s*::=/
NAME: /[A-Za-z_][\w.-]*/
TEXT: /"(\\.|[^"\\\n])*"/
CLASS: /\[(\\.|[^\]\\\n])+\]/
REPEAT: /[*+?]|\{\s*\d{1,9}\s*(,\s*\d{0,9}\s*)?\}/
%ignore /[ \t\r]+/
%ignore /\n/
%ignore /#[^\n]*/
"""
_LARK = r"""
start: (HEAD either | IMPORT | _IGNORED)+
follow: item* _ALIAS?
?atom: "(" either ")" -> group
    | "[" either "]" -> optional
    | TEXT ".." TEXT -> span
    | TEXT
    | PATTERN
    | NAME
HEAD.2: /(?<![^\n])[ \t]*[?!]?[A-Za-z_]\w*\s*:/
NAME: /[A-Za-z_]\w*/
TEXT: /"(\\.|[^"\\\n])*"i?/
PATTERN: /\/(?![\/*])(\\.|[^\/\\\n])+\/[imsu]*/
REPEAT: /[*+?]|~\s*\d{1,9}(\s*\.\.\s*\d{1,9})?|\{\s*\d{1,9}\s*(,\s*\d{0,9}\s*)?\}/
IMPORT: /%import[^\n]*/
_IGNORED: /%ignore[^\n]*/
_ALIAS: /->\s*\w+/
%ignore /[ \t\r]+/
%ignore /\n/
%ignore /(#|\/\/)[^\n]*/
"""
_COMMON = {
    "CNAME": r"[A-Za-z_]\w*",
    "DIGIT": r"\d",
    "ESCAPED_STRING": r'"[^"\\]*"',
    "FLOAT": r"\d+\.\d+",
    "HEXDIGIT": r"[\da-fA-F]",
    "INT": r"\d+",
    "LETTER": r"[A-Za-z]",
    "NEWLINE": r"\n+",
    "NUMBER": r"\d+(\.\d+)?",
    "SIGNED_INT": r"[+-]?\d+",
    "SIGNED_NUMBER": r"[+-]?\d+(\.\d+)?",
    "WORD": r"[A-Za-z]+",
    "WS": r"[ \t\n]+",
}
"""Terminals of ``%import common``, as expressions that match part of what Lark's match."""

_UNIT = re.compile(r"\\(?:x(..)|u\{(\w+)\}|u(....)|U(.{8})|(.))|(.)", re.DOTALL)
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v"}
_LAST = 0x10FFFF
Ranges = Sequence[tuple[int, int]]
_SETS: dict[str, Ranges] = {"d": [(48, 57)], "w": [(48, 57), (65, 90), (95, 95), (97, 122)], "s": [(9, 13), (32, 32)]}


def regex(source: str) -> Form:
    """Return the form of a regular expression. Raises :class:`FormError`."""
    return _read("regex", source)


def grammar(source: str, *, lark: bool) -> Form:
    """Return the form of a grammar: in EBNF, or in Lark's syntax if it may be and has no ``::=``.

    Raises :class:`FormError`.
    """
    return _read("lark" if lark and "::=" not in source else "ebnf", source)


@cache
def _parser(syntax: str) -> Lark:
    own = {"regex": _REGEX, "ebnf": _EBNF, "lark": _LARK}[syntax]
    return Lark(_SHARED + own, parser="lalr", maybe_placeholders=False)


def _read(syntax: str, source: str) -> Form:
    if len(source) > MAX_SOURCE:
        raise FormError(f"it is longer than {MAX_SOURCE} characters")
    reader = _Reader("start" if syntax == "lark" else "root")
    try:
        form: Form = reader.transform(_parser(syntax).parse(source))
    except UnexpectedInput as error:
        if isinstance(error, UnexpectedToken) and error.token.type == "$END":
            raise FormError("it ends too early") from error
        at = error.pos_in_stream or 0
        raise FormError(f"the simulator cannot read it from character {at} on: {source[at : at + 20]!r}") from error
    except VisitError as error:
        raise error.orig_exc from error
    if missing := reader.names.keys() - reader.defined:
        raise FormError(f"the rule {min(missing)!r} is not defined")
    return form


class _Reader(Transformer_NonRecursive[Token, Any]):
    """Makes forms of a parsed expression or grammar. ``root``: the name of the rule with which a grammar begins."""

    def __init__(self, root: str) -> None:
        super().__init__()
        self._root = root
        self.names: dict[str, Form] = {}
        self.defined: set[str] = set()

    def start(self, parts: list[Any]) -> Form:
        if isinstance(parts[0], Form):
            return parts[0]
        name = ""
        for part in parts:
            if isinstance(part, Form):
                self._named(name).parts.append(part)
            elif part.type == "IMPORT":
                self._import(part)
            else:
                name = part.rstrip(" \t\r\n:=").lstrip(" \t?!")
                self._define(name)
        return self._named(self._root)

    def either(self, parts: list[Form]) -> Form:
        return Form(parts, any=True)

    def follow(self, parts: list[Form]) -> Form:
        return Form(parts)

    def group(self, parts: list[Any]) -> Form:
        return parts[-1] if parts and isinstance(parts[-1], Form) else Form()

    def optional(self, parts: list[Form]) -> Form:
        return Form([Form(), *parts], any=True)

    def item(self, parts: list[Any]) -> Form:
        form, repeat = self._atom(parts[0]), str(parts[1]) if len(parts) > 1 else ""
        bounds = [int(number) for number in re.findall(r"\d+", repeat)]
        if any(bound > MAX_TEXT for bound in bounds):
            raise FormError(f"it repeats more than {MAX_TEXT} times")
        if bounds != sorted(bounds):
            raise FormError(f"{repeat.strip()} ends before it begins")
        least = bounds[0] if bounds else 0 if repeat[:1] in ("*", "?") and repeat else 1
        return Form([form], times=least)

    def span(self, parts: list[Token]) -> Form:
        first, last = ("".join(_characters(part)) for part in parts)
        if len(first) != 1 or len(last) != 1 or first > last:
            raise FormError(f"{parts[0]}..{parts[1]} is no range of characters")
        return _one_of([(ord(first), ord(last))])

    def _atom(self, part: Form | Token) -> Form:
        if isinstance(part, Form):
            return part
        match part.type:
            case "NAME":
                return self._named(part)
            case "TEXT":
                return Form(text="".join(_characters(part)))
            case "PATTERN":
                return regex(part[1 : part.rindex("/")])
            case "CLASS":
                return _one_of(_class(part[1:-1]))
            case "ESCAPE":
                return _one_of(_ranges(next(_units(part))))
        return Form(text="x" if part == "." else str(part))

    def _named(self, name: str) -> Form:
        return self.names.setdefault(str(name), Form(any=True))

    def _define(self, name: str) -> None:
        if name in self.defined:
            raise FormError(f"the rule {name!r} is defined twice")
        self.defined.add(name)

    def _import(self, line: str) -> None:
        found = re.fullmatch(r"%import\s+common(?:\.(\w+)\s*(?:->\s*(\w+))?|\s*\(([\w\s,]+)\))\s*", line)
        if found is None:
            raise FormError(f"the simulator does not read {line!r}")
        one, alias, several = found.groups()
        for name in [one] if one else [each.strip() for each in several.split(",")]:
            if name not in _COMMON:
                raise FormError(f"common.{name} is not simulated")
            self._define(alias or name)
            self._named(alias or name).parts.append(regex(_COMMON[name]))


def _units(text: str) -> Iterator[str | Ranges]:
    """Yield each character of a text with escapes, or the characters that an escape stands for."""
    for found in _UNIT.finditer(text):
        *digits, escaped, plain = found.groups()
        if plain is not None:
            yield plain
        elif escaped is None:
            number = int(next(filter(None, digits)), 16)
            if number > _LAST or 0xD800 <= number <= 0xDFFF:
                raise FormError(f"{found[0]} is no character")
            yield chr(number)
        elif escaped.lower() in _SETS:
            yield _SETS[escaped] if escaped.islower() else _others(_SETS[escaped.lower()])
        else:
            yield _CONTROLS.get(escaped, escaped)


def _characters(quoted: str) -> Iterator[str]:
    """Yield the characters of a quoted text, which has no sets of characters."""
    for unit in _UNIT.finditer(quoted[1 : quoted.rindex('"')]):
        escaped, plain = unit.groups()[-2:]
        if escaped is not None and escaped not in "nrtfv\\\"'/?":
            raise FormError(f"{unit[0]} is no escape")
        yield plain or (_CONTROLS.get(escaped, escaped) if escaped else str(next(_units(unit[0]))))


def _ranges(unit: str | Ranges) -> Ranges:
    return [(ord(unit), ord(unit))] if isinstance(unit, str) else unit


def _others(ranges: Ranges) -> Ranges:
    """Return the characters that are in none of the ranges."""
    after, found = 0, list[tuple[int, int]]()
    for low, high in [*sorted(ranges), (_LAST + 1, _LAST + 1)]:
        if low > after:
            found.append((after, low - 1))
        after = max(after, high + 1)
    return found


def _class(text: str) -> Ranges:
    """Return the characters of a class, without its brackets."""
    negated = text.startswith("^")
    units, found = deque(_units(text[1:] if negated else text)), list[tuple[int, int]]()
    while units:
        unit = units.popleft()
        if isinstance(unit, str) and len(units) > 1 and units[0] == "-" and isinstance(units[1], str):
            _, last = units.popleft(), str(units.popleft())
            if last < unit:
                raise FormError(f"{unit}-{last} ends before it begins")
            found.append((ord(unit), ord(last)))
        else:
            found += _ranges(unit)
    return _others(found) if negated else found


def _one_of(ranges: Ranges) -> Form:
    """Return the form of one character of the ranges: a simple one if there is any."""
    for simple in ("x", "0"):
        if any(low <= ord(simple) <= high for low, high in ranges):
            return Form(text=simple)
    shown = [max(low, 33) for low, high in ranges if low <= 126 and high >= 33]
    lows = shown or [low if not 0xD800 <= low <= 0xDFFF else 0xE000 for low, _ in ranges]
    return Form(text=chr(lows[0])) if lows else Form(any=True)
