"""Resources that a newer definition has filled in: fields that this release does not know. Pure.

While a new release is installed its definition comes first, and the API server then writes its defaults into every
object that is read. A field that has its default means the same as no such field, so the operator of before may go on
without it. A field with any other value was said by somebody, and is an error of the spec as ever.
"""

import copy
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from mmrouter_lib.api.crd import definition
from mmrouter_lib.api.deployment import KIND

Object = dict[str, Any]


def without_defaults(resource: Mapping[str, Any], served: Mapping[str, Any]) -> tuple[Object, tuple[str, ...], bool]:
    """Return a resource without what only the definition has put there, the paths of that, and whether all is told.

    ``served``: the schema of the whole object as the API server publishes it, empty where it does not. The last value
    is False where the resource has a field that neither this release nor the published schema knows: the definition has
    just been replaced, and its schema follows in a moment.
    """
    found = copy.deepcopy(dict(resource))
    theirs = (served.get("properties") or {}).get("spec") or {}
    unknown = list(_unknown(found.get("spec"), _ours(), theirs, "spec"))
    told = True
    dropped = []
    for holder, name, schema, path in unknown:
        told = told and (schema is not None or not served)
        if schema is not None and "default" in schema and holder[name] == schema["default"]:
            del holder[name]
            dropped.append(path)
    return found, tuple(dropped), told


def schema_in(published: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schema of our kind in the OpenAPI document of its group; empty where it has none."""
    for schema in ((published.get("components") or {}).get("schemas") or {}).values():
        if any(kind.get("kind") == KIND for kind in schema.get("x-kubernetes-group-version-kind") or []):
            return dict(schema)
    return {}


@cache
def _ours() -> Mapping[str, Any]:
    schema: Mapping[str, Any] = definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    return schema


def _unknown(
    value: Any, ours: Mapping[str, Any], theirs: Mapping[str, Any], path: str
) -> Iterator[tuple[Object, str, Mapping[str, Any] | None, str]]:
    """Yield the fields that our schema lacks: where they stand, their name, their served schema, and their path."""
    if isinstance(value, list) and "items" in ours:
        for number, item in enumerate(value):
            yield from _unknown(item, ours["items"], theirs.get("items") or {}, f"{path}[{number}]")
    if not isinstance(value, dict) or "properties" not in ours:
        return
    served = theirs.get("properties") or {}
    for name in list(value):
        place = f"{path}.{name}"
        if name in ours["properties"]:
            yield from _unknown(value[name], ours["properties"][name], served.get(name) or {}, place)
        else:
            yield value, name, served.get(name), place
