"""The tools of a request as SGLang 0.5.23 gives them to a chat template (docs/engine-facts/sglang.md#prompts)."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from mmrouter_lib.prompt.templates import TemplateError

_STANDARD = frozenset({"array", "boolean", "integer", "null", "number", "object", "string"})
_ALIASES = {
    alias: standard
    for standard, aliases in {
        "string": "str text varchar char enum uuid date datetime time timestamp binary blob bytea bytes varbinary",
        "boolean": "bool",
        "integer": "bigint smallint tinyint",
        "number": "double decimal real numeric",
        "array": "arr tuple set",
        "object": "map",
    }.items()
    for alias in aliases.split()
}
_PREFIXES = {
    **dict.fromkeys(("int", "uint", "long", "short", "unsigned"), "integer"),
    **dict.fromkeys(("num", "float"), "number"),
    **{"list": "array", "dict": "object"},
}
_AFTER_PREFIX = tuple("0123456789[<( \t")

# Keywords of JSON Schema that hold schemas: by name, in a list, alone.
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTED = ("anyOf", "oneOf", "allOf", "prefixItems")
_ALONE = (
    *("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames"),
    *("unevaluatedItems", "unevaluatedProperties"),
)


def shown_tools(tools: Sequence[Mapping[str, Any]] | None, choice: object) -> list[dict[str, Any]] | None:
    """Return the tools that the prompt shows: those that ``tool_choice`` allows, ``None`` without any.

    Raises :class:`TemplateError` for a tool without a named function.
    """
    if not tools or choice == "none":
        return None
    named = choice.get("function") if isinstance(choice, Mapping) else None
    shown = [_tool(tool, f"tools[{at}]") for at, tool in enumerate(tools)]
    if isinstance(named, Mapping):
        shown = [tool for tool in shown if tool["function"]["name"] == named.get("name")]
    return shown or None


def _tool(tool: object, where: str) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(tool, Mapping) or not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise TemplateError(f"{where} must be an object with a function that has a name")
    deferred = tool.get("defer_loading")
    fields = {name: function.get(name) for name in ("description", "name")}
    try:
        fields["parameters"] = with_standard_types(function.get("parameters"))
    except RecursionError as error:
        raise TemplateError(f"{where}.function.parameters is nested too deeply") from error
    optional = {"strict": function.get("strict"), "defer_loading": function.get("defer_loading", deferred)}
    fields |= {name: value for name, value in optional.items() if value is not None}
    # The client's order, then what the client left out.
    ordered = {name: fields[name] for name in (*function, *fields) if name in fields}
    return {"type": tool.get("type", "function"), "function": ordered, "defer_loading": deferred}


def with_standard_types(schema: Any) -> Any:
    """Return a schema whose ``type`` words are JSON Schema's, where the engine knows what another word means."""
    if isinstance(schema, list):
        return [with_standard_types(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    made = dict(schema)
    match made.get("type"):
        case str(word):
            made["type"] = _standard(word)
        case list(words):
            first: dict[Any, Any] = {}  # by what is equal
            for word in map(_standard, words):
                first.setdefault((json.dumps(word, sort_keys=True),) if isinstance(word, dict | list) else word, word)
            made["type"] = list(first.values())
    for key in _NAMED:
        if isinstance(made.get(key), dict):
            made[key] = {name: with_standard_types(each) for name, each in made[key].items()}
    for key in _LISTED:
        if isinstance(made.get(key), list):
            made[key] = [with_standard_types(each) for each in made[key]]
    for key in _ALONE:
        if key in made:
            made[key] = with_standard_types(made[key])
    return made


def _standard(word: Any) -> Any:
    if not isinstance(word, str) or word in _STANDARD:
        return word
    base = word.split("(", 1)[0].strip().lower()
    if base in _STANDARD:
        return base
    if base in _ALIASES:
        return _ALIASES[base]
    for prefix, standard in _PREFIXES.items():
        if base == prefix or (base.startswith(prefix) and base[len(prefix) :].startswith(_AFTER_PREFIX)):
            return standard
    return word
