"""Whether what a user wrote in Kubernetes' own words has the types that Kubernetes gives it. Pure.

The types are the Kubernetes client's own models. A field that they do not know may be of a newer Kubernetes, so it
passes: only what can be no such object in any version is refused, and everything after this may rely on the types.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from mmrouter_operator.render.pod.strategic_merge import MERGE_KEYS

Location = tuple[int | str, ...]
Fault = tuple[str, str]
"""A place, and a sentence about it."""

_KINDS: Final = {
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "string_type": "a text",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
}
"""Pydantic's kind of error -> what is wanted."""
_QUANTITY_MAPS: Final = frozenset({"limits", "requests", "overhead"})
_QUANTITIES: Final = (("emptyDir", "sizeLimit"), ("resourceFieldRef", "divisor"))
_TYPES: Final = ("int", "str")
_ZEROES: Final = frozenset({"lun", "priority", "seconds", "value"})
"""Fields that the models want and the API server takes for 0 or empty where they are missing."""


def template_faults(template: Mapping[str, Any]) -> list[Fault]:
    """Return what in a pod template is of a wrong type or misses what it needs; places are within the template."""
    # Half a second and 8 MiB that only a podTemplate costs.
    from kubernetes.aio.client.models.v1_pod_template_spec import V1PodTemplateSpec  # noqa: PLC0415

    return _faults(V1PodTemplateSpec, template)


def volume_faults(source: Mapping[str, Any]) -> list[Fault]:
    """Return the same for a volume source by its name, as in ``model.volume``."""
    from kubernetes.aio.client.models.v1_volume import V1Volume  # noqa: PLC0415

    return _faults(V1Volume, {"name": "model", **source})


def _faults(model: type[BaseModel], value: Mapping[str, Any]) -> list[Fault]:
    try:
        model.model_validate(value)
    except ValidationError as error:
        faults: dict[str, tuple[list[str], Any]] = {}
        for detail in error.errors(include_url=False):
            if _passes(detail):
                continue
            kinds, _ = faults.setdefault(_place(detail["loc"], value), ([], detail["input"]))
            if detail["type"] != "missing":
                kinds.append(_KINDS.get(detail["type"]) or detail["msg"].removeprefix("Input should be "))
        return [(place, _sentence(kinds, found)) for place, (kinds, found) in faults.items()]
    return []


def _passes(detail: ErrorDetails) -> bool:
    """Whether the API server may take what the models do not."""
    match detail["type"]:
        case "extra_forbidden":
            return True
        case "missing":
            return detail["loc"][-1] in _ZEROES
        case _:
            return _is_quantity(detail["loc"], detail["input"])


def _sentence(kinds: list[str], found: Any) -> str:
    return f"is {' or '.join(kinds)}, not {_said(found)}" if kinds else "is required"


def _said(value: Any) -> str:
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list"
    return "null" if value is None else f"{value!r:.80}"


def _is_quantity(location: Location, value: Any) -> bool:
    """Whether this is a number where Kubernetes takes a quantity, which the models know as text only."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return location[-2:] in _QUANTITIES or location[-2] in _QUANTITY_MAPS


def _place(location: Location, value: Any) -> str:
    """Return a path as a user reads it: elements that have a name by it, because positions are those after merging."""
    return "".join(_steps(location, value)).removeprefix(".")


def _steps(location: Location, value: Any) -> Iterator[str]:
    path: tuple[str, ...] = ()
    for part in location:
        if isinstance(part, int):
            value = value[part] if isinstance(value, list) else None
            name = value.get(MERGE_KEYS.get(path, "name")) if isinstance(value, dict) else None
            yield f"[{name if isinstance(name, str | int) else part}]"
        elif part in _TYPES and not (isinstance(value, dict) and part in value):
            return  # one of the types that the value could have had
        else:
            value = value.get(part) if isinstance(value, dict) else None
            path = (*path, part)
            yield f".{part}"
