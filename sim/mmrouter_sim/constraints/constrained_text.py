"""The text that a request's form of the answer asks for, by the fields of either engine."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from mmrouter_sim.constraints.grammars import MAX_SOURCE, grammar, regex
from mmrouter_sim.constraints.schemas import MAX_DEPTH, instance
from mmrouter_sim.constraints.shortest import MAX_TEXT, FormError, shortest

_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
_SGLANG = {"json_schema": "json", "regex": "regex", "ebnf": "grammar"}


def formed_text(
    response_format: Mapping[str, Any] | None,
    structured: Mapping[str, Any] | None,
    sglang: Mapping[str, str | None] | None = None,
) -> str | None:
    """Return the text of an answer, ``None`` where any text will do.

    ``response_format``: OpenAI's; ``structured``: vLLM's ``structured_outputs``; ``sglang``: its ``json_schema``,
    ``regex`` and ``ebnf``. Raises :class:`FormError` with the field.
    """
    asked = [(f"structured_outputs.{kind}", kind, (structured or {}).get(kind)) for kind in _KINDS]
    asked += [(name, _SGLANG[name], value or None) for name, value in (sglang or {}).items()]
    asked.append(("response_format", *_of_format(response_format or {})))
    asked = [each for each in asked if each[2] is not None]
    if structured is not None and not any(field.startswith("structured_outputs") for field, _, _ in asked):
        raise FormError("structured_outputs names no form", "structured_outputs")
    if len(asked) > 1:
        names = " and ".join(field for field, _, _ in asked)
        raise FormError(f"an answer has one form only, not {names}", asked[1][0])
    for field, kind, value in asked:
        try:
            text = _text(kind, value, lark=sglang is None)
            if len(text) > MAX_TEXT:
                raise FormError(f"its answers are longer than {MAX_TEXT} characters")
            return text
        except FormError as error:
            raise FormError(f"{field}: {error}", field) from error
        except (OverflowError, RecursionError) as error:
            raise FormError(f"{field}: its levels or numbers are not simulated", field) from error
    return None


def response_format_of(text: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return what ``text`` of ``/v1/responses`` asks for, as a chat's ``response_format``."""
    form = (text or {}).get("format")
    if not isinstance(form, dict):
        return None
    return {"type": "json_schema", "json_schema": form} if form.get("type") == "json_schema" else form


def _of_format(given: Mapping[str, Any]) -> tuple[str, Any]:
    match given.get("type"):
        case None | "text":
            return "", None
        case "json_schema":
            described = given.get("json_schema")
            schema = described.get("schema") if isinstance(described, Mapping) else None
            return "json", {} if schema is None else schema
        case "structural_tag":
            return "structural_tag", given
        case kind:
            return str(kind), True


def _text(kind: str, value: Any, *, lark: bool) -> str:
    match kind, value:
        case "json", str(schema):
            return instance(_decoded(schema))
        case "json", dict(schema):
            return instance(schema)
        case "json_object", True:
            return "{}"
        case "choice", [str(first), *others] if all(isinstance(other, str) for other in others):
            return first
        case "regex", str(source) if "\0" not in source:
            return shortest(regex(source))
        case "grammar", str(source):
            return shortest(grammar(source, lark=lark))
        case "structural_tag", str(tag):
            return _tagged(_decoded(tag), lark=lark)
        case "structural_tag", dict(tag):
            return _tagged(tag, lark=lark)
    raise FormError(f"{json.dumps(value)[:40]} is no {kind.replace('_', ' ')} that is simulated")


def _tagged(given: Any, *, lark: bool) -> str:
    """Return the first structure of a structural tag, without free text around it."""
    if len(json.dumps(given)) > MAX_SOURCE:
        raise FormError(f"it is longer than {MAX_SOURCE} characters")
    match given:
        case {"structures": [{"begin": str(begin), "end": str(end), **rest}, *_], "triggers": [_, *_]}:
            return begin + instance(rest.get("schema") or {}) + end
        case {"format": form}:
            return _tag(form, 0, lark=lark)
    raise FormError("it has no structures and no format that are simulated")


def _tag(form: Any, depth: int, *, lark: bool) -> str:
    def inner(forms: Sequence[Any]) -> str:
        return "".join(_tag(each, depth + 1, lark=lark) for each in forms)

    if depth > MAX_DEPTH:
        raise FormError(f"it is deeper than {MAX_DEPTH} levels")
    match form:
        case {"type": "const_string", "value": str(text)}:
            return text
        case {"type": "any_text"}:
            return ""
        case {"type": "json_schema", "json_schema": schema}:
            return instance(schema)
        case {"type": "regex", "pattern": str(source)}:
            return shortest(regex(source))
        case {"type": "grammar", "grammar": str(source)}:
            return shortest(grammar(source, lark=lark))
        case {"type": "sequence", "elements": [*forms]}:
            return inner(forms)
        case {"type": "or", "elements": [first, *_]}:
            return inner([first])
        case {"type": "triggered_tags" | "tags_with_separator", "tags": [dict(first), *_]}:
            return inner([{"type": "tag", **first}])
        case {"type": "tag", "begin": str(begin), "content": content, "end": str(end)}:
            return begin + inner([content]) + end
    raise FormError(f"{json.dumps(form)[:60]} is not simulated")


def _decoded(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise FormError("it is not JSON, or too deep") from error
