"""Answers in a form that a request asks for: the shortest text that a JSON schema, or a list of choices, allows."""

import json
from collections.abc import Mapping
from typing import Any

MAX_DEPTH = 32


class NotSimulatedError(Exception):
    """A form that is not simulated; the text names it."""


def formed_text(
    response_format: Mapping[str, Any] | None, structured: Mapping[str, Any] | None, schema: str | None = None
) -> str | None:
    """Return the text of an answer, ``None`` where any text will do.

    ``response_format``: OpenAI's; ``structured``: vLLM's ``structured_outputs``; ``schema``: SGLang's ``json_schema``.
    Raises :class:`NotSimulatedError`.
    """
    asked = dict(structured or {})
    if schema is not None:
        asked["json"] = schema
    match (response_format or {}).get("type"):
        case None | "text":
            pass
        case "json_object":
            asked["json_object"] = True
        case "json_schema":
            asked["json"] = ((response_format or {}).get("json_schema") or {}).get("schema") or {}
        case kind:
            raise NotSimulatedError(f"response_format of type {kind}")
    asked = {name: value for name, value in asked.items() if value not in (None, False)}
    match asked:
        case {"json": str(text)}:
            return _written(json.loads(text))
        case {"json": dict(found)}:
            return _written(found)
        case {"json_object": _}:
            return "{}"
        case {"choice": [first, *_]}:
            return str(first)
    if asked:
        raise NotSimulatedError(f"structured output by {next(iter(asked))}")
    return None


def _written(schema: Mapping[str, Any]) -> str:
    return json.dumps(_instance(schema, schema, 0), ensure_ascii=False)


def _instance(schema: Any, root: Mapping[str, Any], depth: int) -> Any:
    """Return the smallest value of a schema. Raises :class:`NotSimulatedError`."""
    if depth > MAX_DEPTH:
        raise NotSimulatedError("a schema that contains itself")
    if not isinstance(schema, Mapping):
        return {}
    if isinstance(reference := schema.get("$ref"), str):
        target: Any = root
        for name in filter(None, reference.removeprefix("#").split("/")):
            target = target.get(name) if isinstance(target, Mapping) else None
        return _instance(target, root, depth + 1)
    for name in ("const", "default"):
        if name in schema:
            return schema[name]
    if schema.get("enum"):
        return schema["enum"][0]
    for name in ("anyOf", "oneOf", "allOf"):
        if schema.get(name):
            return _instance(schema[name][0], root, depth + 1)
    if "pattern" in schema:
        raise NotSimulatedError("a schema's pattern")
    kind = schema.get("type", "object")
    match kind[0] if isinstance(kind, list) else kind:
        case "object":
            of = schema.get("properties") or {}
            names = schema.get("required", list(of))
            return {name: _instance(of.get(name), root, depth + 1) for name in names}
        case "array":
            return [_instance(schema.get("items"), root, depth + 1) for _ in range(schema.get("minItems", 0))]
        case "string":
            return "x" * max(1, schema.get("minLength", 0))
        case "integer" | "number":
            return schema.get("minimum", 0)
        case "boolean":
            return False
    return None
