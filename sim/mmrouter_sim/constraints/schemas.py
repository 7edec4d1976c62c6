"""A small value of a JSON schema: the first of several, every property that is required, or all where none is."""

import json
import math
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from mmrouter_sim.constraints.grammars import MAX_SOURCE, regex
from mmrouter_sim.constraints.shortest import MAX_TEXT, FormError, shortest

MAX_DEPTH = 64
"""Levels of a schema, as in vLLM."""
_FORMATS = {
    "date": "2026-01-01",
    "date-time": "2026-01-01T00:00:00Z",
    "duration": "P1D",
    "email": "x@example.com",
    "hostname": "example.com",
    "ipv4": "192.0.2.1",
    "ipv6": "2001:db8::1",
    "json-pointer": "/x",
    "relative-json-pointer": "0/x",
    "time": "00:00:00Z",
    "uri": "https://example.com/",
    "uri-reference": "/x",
    "uri-template": "/{x}",
    "uuid": "00000000-0000-4000-8000-000000000000",
}
_NOT_SIMULATED = ("not", "if", "contains", "minProperties", "dependentRequired", "dependentSchemas")


def instance(schema: Any) -> str:
    """Return a value of a schema as JSON. Raises :class:`FormError`."""
    return json.dumps(_Instances(schema).value(schema, ()), ensure_ascii=False)


class _Instances:
    """Values of the parts of one schema, which have a limit of characters together with their patterns."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._left = MAX_SOURCE

    def value(self, schema: Any, above: tuple[str, ...]) -> Any:
        """``above``: the references that lead here. Raises :class:`FormError`."""
        self._spend(1)
        if len(above) > MAX_DEPTH:
            raise FormError(f"it is deeper than {MAX_DEPTH} levels")
        if not isinstance(schema, Mapping):
            return {}
        if named := next((name for name in _NOT_SIMULATED if name in schema), None):
            raise FormError(f"{named} of a schema is not simulated")
        match schema:
            case {"$ref": str(reference)}:
                if reference in above:
                    raise FormError(f"{reference} contains itself")
                return self.value(self._target(reference), (*above, reference))
            case {"const": only}:
                return self._given(only)
            case {"enum": [first, *_]}:
                return self._given(first)
            case {"anyOf": [_, *_] as options} | {"oneOf": [_, *_] as options}:
                return self._first(options, above)
            case {"allOf": [only]}:
                return self.value(only, (*above, ""))
            case {"allOf": [_, *_]}:
                raise FormError("several schemas in allOf are not simulated")
        kind = schema.get("type", "object")
        return self._of_type(kind[0] if isinstance(kind, list) and kind else kind, schema, (*above, ""))

    def _of_type(self, kind: Any, schema: Mapping[str, Any], above: tuple[str, ...]) -> Any:
        match kind:
            case "object":
                found = schema.get("properties")
                of = found if isinstance(found, Mapping) else {}
                required = schema.get("required")
                names = [str(name) for name in required] if isinstance(required, list) else list(of)
                return {name: self.value(of.get(name, schema.get("additionalProperties")), above) for name in names}
            case "array":
                first, least = schema.get("prefixItems"), _count(schema, "minItems", 0)
                items = first if isinstance(first, list) else []
                if schema.get("uniqueItems") and least > 1:
                    raise FormError("several uniqueItems of a schema are not simulated")
                if least > MAX_TEXT:
                    raise FormError(f"its arrays have more than {MAX_TEXT} items")
                more = [schema.get("items")] * (least - len(items))
                return [self.value(item, above) for item in (*items, *more)]
            case "string":
                return self._string(schema)
            case "integer" | "number":
                return _number(schema, whole=kind == "integer")
            case "boolean":
                return False
            case "null":
                return None
        raise FormError(f"the type {kind!r} of a schema is not simulated")

    def _first(self, options: list[Any], above: tuple[str, ...]) -> Any:
        """Return a value of the first schema that has one."""
        for option in options[:-1]:
            try:
                return self.value(option, (*above, ""))
            except FormError:
                self._spend(1)
        return self.value(options[-1], (*above, ""))

    def _string(self, schema: Mapping[str, Any]) -> str:
        least, most = _count(schema, "minLength", 0), _count(schema, "maxLength", MAX_TEXT)
        match schema:
            case {"pattern": str(pattern)}:
                self._spend(len(pattern))
                text = shortest(regex(pattern))
            case {"format": name}:
                if name not in _FORMATS:
                    raise FormError(f"the format {name!r} is not simulated")
                text = _FORMATS[name]
            case _:
                self._spend(least)
                text = "x" * min(max(1, least), most)
        self._spend(len(text))
        if not least <= len(text) <= most:
            raise FormError("a string of that length is not simulated")
        return text

    def _target(self, reference: str) -> Any:
        target = self._root
        for name in filter(None, reference.removeprefix("#").split("/")):
            target = target.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(target, Mapping) else None
        if target is None:
            raise FormError(f"{reference} is not defined")
        return target

    def _given(self, value: Any) -> Any:
        self._spend(len(json.dumps(value)))
        return value

    def _spend(self, count: int) -> None:
        self._left -= count
        if self._left < 0:
            raise FormError(f"a value and its patterns are longer than {MAX_SOURCE} characters")


def _count(schema: Mapping[str, Any], name: str, default: int) -> int:
    count = schema.get(name)
    return count if isinstance(count, int) and count >= 0 else default


def _number(schema: Mapping[str, Any], *, whole: bool) -> int | float:
    """Return the first of several numbers that is within the bounds."""
    given = {name: value for name, value in schema.items() if isinstance(value, int | float)}
    least, above = given.get("minimum", -math.inf), given.get("exclusiveMinimum", -math.inf)
    most, below = given.get("maximum", math.inf), given.get("exclusiveMaximum", math.inf)
    step = given.get("multipleOf", 0)

    def candidates() -> Iterator[int | float]:
        ends = [end for end in (least, above, most, below) if math.isfinite(end)]
        near = [0, *ends, *(math.floor(end) + number for end in ends for number in (0, -1, 1))]
        low, high = max(least, above), min(most, below)
        if math.isfinite(low) and math.isfinite(high):
            near.append(low / 2 + high / 2)
        for number in near:
            yield number
            if step > 0:
                yield from (math.floor(number / step) * step, math.ceil(number / step) * step)

    for number in islice(candidates(), 64):
        value = int(number) if whole and number == int(number) else number
        if whole and not isinstance(value, int):
            continue
        if least <= value <= most and above < value < below and (step <= 0 or value % step == 0):
            return value
    raise FormError("a number within its bounds is not simulated")
