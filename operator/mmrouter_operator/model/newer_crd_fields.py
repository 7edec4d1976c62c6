"""Removes defaulted fields of a newer CRD, which this release does not know, from a resource. Pure.

During an upgrade the new CRD is installed first, and the API server then writes its defaults into every object that is
read. A field with its default value means the same as no field, so the old operator can ignore it. A field with another
value was set by a user and remains an error.
"""

import copy
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from mmrouter_lib.api.crd import definition
from mmrouter_lib.api.deployment import KIND

Object = dict[str, Any]


def without_defaults(resource: Mapping[str, Any], served: Mapping[str, Any]) -> tuple[Object, tuple[str, ...], bool]:
    """Return a resource without unknown defaulted fields, the paths of these, and whether the schema is complete.

    ``served``: the schema of the whole object as the API server publishes it, empty if it does not. It is incomplete if
    neither this release nor the schema knows a field: the CRD was just replaced, and its schema is published shortly.
    """
    result = copy.deepcopy(dict(resource))
    theirs = (served.get("properties") or {}).get("spec") or {}
    unknown = list(_unknown(result.get("spec"), _ours(), theirs, "spec"))
    complete = True
    dropped = []
    for holder, name, schema, path in unknown:
        complete = complete and (schema is not None or not served)
        if schema is not None and "default" in schema and holder[name] == schema["default"]:
            del holder[name]
            dropped.append(path)
    return result, tuple(dropped), complete


def schema_in(published: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schema of our kind in the OpenAPI document of its group; empty if it has none."""
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
    """Yield the fields that our schema lacks: the map that has them, their name, served schema and path."""
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
