"""Tools as Kimi K2.5's tokenizer writes them into a prompt: a TypeScript namespace, with descriptions as comments.

A schema becomes a type: an object its fields, required ones first and each group by name; an array ``Array<...>``; a
reference the name of an interface in front of the function. Types are read in the order of the schema before any is
written, because a reference must come behind its definition.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from mmrouter_lib.prompt.segment_cache import PromptTooLongError

MOST: Final = 1 << 22  # characters
_STEP: Final = "  "
_UNIONS: Final[Mapping[str, str]] = {
    **{name: name for name in ("string", "number", "boolean", "null")},
    "integer": "number",
    "object": "{}",
    "array": "Array<any>",
}
"""Word of a list of types -> what is written for it."""
_NUMBER: Final = ("maximum", "minimum")
_CONSTRAINTS: Final[Mapping[str, tuple[str, ...]]] = {
    "string": ("maxLength", "minLength", "pattern"),
    "number": _NUMBER,
    "integer": _NUMBER,
    "array": ("maxItems", "minItems"),
}
"""Type -> what a comment shows of its schema."""
_CLASSES: Final[Mapping[str, tuple[type, ...]]] = {
    "string": (str,),
    "number": (int, float),
    "integer": (int,),
    "boolean": (bool,),
}
"""Type -> classes of the values that an enum of it may have."""


def sort_deeply(value: Any) -> Any:
    """Return JSON-like data with the keys of every object in their order."""
    if isinstance(value, dict):
        return {name: sort_deeply(each) for name, each in sorted(value.items())}
    return [sort_deeply(each) for each in value] if isinstance(value, list) else value


def write_tools(tools: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the text of tools in OpenAI's form, ``None`` for schemas on which the published code fails.

    Raises :class:`~mmrouter_lib.prompt.segment_cache.PromptTooLongError` where more than :data:`MOST` are written.
    """
    left = _Allowance()
    try:
        functions = [tool.get("function", {}) for tool in tools if tool.get("type") == "function"]
        written = [_write_function(function, left) for function in functions if function]
    except PromptTooLongError:
        raise
    except Exception:
        # A schema is the client's and may be anything: the published code catches every error here, too.
        return None
    return "# Tools\n\n## functions\nnamespace functions {\n" + "\n".join(written) + "\n}\n" if written else ""


@dataclass
class _Allowance:
    """Characters that may still be written. A text is written once for every level around it."""

    characters: int = MOST

    def take(self, text: str, lines: int = 0) -> str:
        """Return a text. Raises :class:`PromptTooLongError` without the characters for it and so many more."""
        self.characters -= len(text) + lines
        if self.characters < 0:
            raise PromptTooLongError(f"the text of tools takes more than {MOST} characters to write")
        return text

    def comment(self, text: str, indent: str) -> str:
        self.take(text, (text.count("\n") + 1) * (len(indent) + 3))
        return "\n".join(f"{indent}// {line}" if line else "" for line in text.split("\n"))


class _Type(NamedTuple):
    """A type that was read: ``write`` returns it for an indentation, ``constraints`` are shown of its schema."""

    write: Callable[[str], str]
    left: _Allowance
    schema: Mapping[str, Any] = {}
    constraints: tuple[str, ...] = ()

    def text(self, indent: str) -> Any:
        """Return it; a type that is no text stays as it is."""
        written = self.write(indent)
        return self.left.take(written) if isinstance(written, str) else written

    def comments(self, indent: str) -> str:
        """Return the lines in front of it."""
        described = self.schema.get("description", "")
        lines = [self.left.comment(described, indent)] if described else []
        shown = ", ".join(f"{name}: {self.schema[name]}" for name in self.constraints if name in self.schema)
        lines += [f"{indent}// {shown}"] if shown else []
        return "".join(f"{line}\n" for line in lines)


class _Field(NamedTuple):
    name: str
    type: _Type
    optional: bool
    default: Any

    def write(self, indent: str) -> str:
        comments = self.type.comments(indent)
        if self.default is not None:
            plain = isinstance(self.default, int | float)
            shown = repr(self.default) if plain else json.dumps(self.default, ensure_ascii=False)
            comments += f"{indent}// Default: {shown}\n"
        return f"{comments}{indent}{self.name}{'?' * self.optional}: {self.type.text(indent)}"


@dataclass
class _Reader:
    """Reads the schemas of one function. ``is_recursive``: one of them refers to the parameters as a whole."""

    left: _Allowance
    definitions: dict[str, Any] = field(default_factory=dict)
    is_recursive: bool = False

    def read(self, schema: Any) -> _Type:
        if isinstance(schema, bool):
            return _Type(lambda _: "any" if schema else "null", self.left)
        if "$ref" in schema:
            name = self._referred(schema["$ref"])
            return _Type(lambda _: name, self.left, schema)
        if "anyOf" in schema:
            types = [self.read(each) for each in schema["anyOf"]]
            return _Type(lambda indent: " | ".join([each.text(indent) for each in types]), self.left, schema)
        if "enum" in schema:
            _check_values(schema)
            values = schema["enum"]
            return _Type(lambda _: " | ".join(map(_shown, values)), self.left, schema)
        if "type" not in schema and schema == {}:
            return _Type(lambda _: "any", self.left)
        match schema["type"]:
            case list(kinds):
                words = [_UNIONS[kind] for kind in kinds]
                return _Type(lambda _: " | ".join(words), self.left, schema)
            case "object":
                return _Type(self.fields(schema).write, self.left, schema)
            case "array":
                item = self.read(schema["items"]) if schema.get("items") else _Type(lambda _: "any", self.left)
                return _Type(lambda indent: _array(item, indent), self.left, schema, _CONSTRAINTS["array"])
            case kind:
                shown = "number" if kind == "integer" else kind
                return _Type(
                    lambda _: shown, self.left, schema, _CONSTRAINTS.get(kind, ()) if isinstance(kind, str) else ()
                )

    def fields(self, schema: Mapping[str, Any]) -> "_Fields":
        """Return the fields of an object; its definitions are those of the whole function."""
        if "$defs" in schema:
            self.definitions |= schema["$defs"] or {}
        others = schema.get("additionalProperties")
        others = self.read(others) if isinstance(others, dict) else others
        required = set(schema.get("required", []) if "properties" in schema else ())
        listed = [
            _Field(name, self.read(each), name not in required, each.get("default") if isinstance(each, dict) else None)
            for name, each in schema.get("properties", {}).items()
        ]
        return _Fields(listed, others)

    def _referred(self, reference: str) -> str:
        if reference == "#":
            self.is_recursive = True
            return "parameters"
        if not reference.startswith("#/$defs/"):
            raise ValueError(f"no definition: {reference}")
        name = reference.rpartition("/")[2]
        return "parameters" if self.definitions[name].get("$self_ref", False) else name


class _Fields(NamedTuple):
    """Fields in the order of the schema. ``others``: a type, whether any are allowed, ``None`` if unsaid."""

    listed: list[_Field]
    others: Any

    def write(self, indent: str) -> str:
        within = indent + _STEP
        lines = [each.write(within) for each in sorted(self.listed, key=lambda each: (each.optional, each.name))]
        if self.others is not None:
            if not (isinstance(self.others, bool | _Type)):
                raise ValueError(f"no type of other fields: {self.others}")
            words = {True: "any", False: "never"}
            shown = words[self.others] if isinstance(self.others, bool) else self.others.text(within)
            lines.append(f"{within}[k: string]: {shown}")
        return "{\n" + ",\n".join(lines) + f"\n{indent}}}" if lines else "{}"


def _write_function(function: Mapping[str, Any], left: _Allowance) -> str:
    reader = _Reader(left)
    fields = reader.fields(function.get("parameters") or {})
    is_recursive, taken, parts = reader.is_recursive, "parameters", []
    if is_recursive:
        lines = ",\n".join(each.write(_STEP) for each in fields.listed)
        parts.append("interface parameters {" + (f"\n{lines}\n" if lines else "") + "}")
    for name, schema in dict(reader.definitions).items():
        made = reader.read(schema).text("")
        described = schema.get("description", "")
        parts.append((left.comment(described, "") + "\n" if described else "") + f"interface {name} {made}")
    if not is_recursive:
        taken = fields.write("")
    if described := function.get("description"):
        parts.append(left.comment(described, ""))
    return "\n".join([*parts, f"type {function.get('name', 'function')} = (_: {taken}) => any;"])


def _shown(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)


def _array(item: _Type, indent: str) -> str:
    within = indent + _STEP
    if comments := item.comments(within):
        # Joined, because a type that is no text is an error here, unlike elsewhere.
        return "".join(("Array<\n", comments, within, item.text(within), "\n", indent, ">"))
    return f"Array<{item.text(indent)}>"


def _check_values(schema: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` for a value of an ``enum`` that is not of its type."""
    if "type" not in schema:
        return
    kind = schema["type"]
    if isinstance(kind, list):
        if len(kind) not in (1, 2) or (len(kind) == 2 and "null" not in kind):
            raise ValueError(f"no type of an enum: {kind}")
        kind = kind[-1] if kind[0] == "null" else kind[0]
    wanted = _CLASSES.get(kind, (object,)) if isinstance(kind, str) else (object,)
    if any(not isinstance(each, wanted) for each in schema["enum"] if each is not None):
        raise ValueError(f"a value of an enum is no {kind}")
