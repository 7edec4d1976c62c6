"""Generate the CustomResourceDefinition from the models.

Pydantic's JSON schema becomes a structural one: references are inlined, optional fields lose their ``null``, and
constraints that Kubernetes cannot express (names of map keys, quantities) get their nearest form. Non-empty defaults
are written out, so that objects show them, ``kubectl scale`` finds its field and rules need no ``has()`` for them.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Final

from mmrouter_lib.api.cross_field_rules import NO_DEFAULT, VALIDATIONS, Resource, validation
from mmrouter_lib.api.deployment import API_VERSION, KIND, NAME_LENGTH
from mmrouter_lib.api.shared_types import DNS_LABEL
from mmrouter_lib.api.spec import Spec
from mmrouter_lib.api.status import Status

PLURAL: Final = "mmrouterdeployments"
GROUP, VERSION = API_VERSION.split("/")
NAME: Final = f"{PLURAL}.{GROUP}"
HASH_ANNOTATION: Final = "mmrouter.io/schema-hash"
"""Annotation of the definition: :func:`schema_hash` of its ``spec``, by which an operator detects an older one."""

_KEPT: Final = (
    "description type format enum pattern minimum maximum minLength maxLength minItems maxItems minProperties "
    "maxProperties default x-kubernetes-int-or-string x-kubernetes-preserve-unknown-fields x-kubernetes-list-type "
    f"x-kubernetes-list-map-keys x-kubernetes-map-type {VALIDATIONS}"
)

Schema = dict[str, Any]


class SchemaError(ValueError):
    """A model cannot be expressed as a structural schema; the message names the place."""


def definition() -> dict[str, Any]:
    """Return the CustomResourceDefinition as plain values, in a stable order."""
    spec: dict[str, Any] = {
        "group": GROUP,
        "names": {
            "kind": KIND,
            "listKind": f"{KIND}List",
            "plural": PLURAL,
            "singular": KIND.lower(),
            "shortNames": ["mmrd"],
            "categories": ["all", "mmrouter"],
        },
        "scope": "Namespaced",
        "versions": [
            {
                "name": VERSION,
                "served": True,
                "storage": True,
                "additionalPrinterColumns": _columns(),
                "subresources": {
                    "status": {},
                    "scale": {
                        "specReplicasPath": ".spec.frontend.replicas",
                        "statusReplicasPath": ".status.frontend.ready",
                        "labelSelectorPath": ".status.frontend.selector",
                    },
                },
                "schema": {"openAPIV3Schema": _root()},
            }
        ],
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": NAME, "annotations": {HASH_ANNOTATION: schema_hash(spec)}},
        "spec": spec,
    }


def schema_hash(spec: Mapping[str, Any]) -> str:
    """Return 16 hex digits that change when the definition's ``spec`` does."""
    # The prefix keeps YAML readers from taking a hash like 12345e67 for a number.
    return f"sha256-{hashlib.sha256(json.dumps(spec, sort_keys=True).encode()).hexdigest()[:16]}"


def _columns() -> list[dict[str, Any]]:
    ready = ".status.conditions[?(@.type=='Ready')]"

    def column(name: str, path: str, about: str, *, kind: str = "string", wide: bool = False) -> dict[str, Any]:
        shown = {"name": name, "type": kind, "description": about, "jsonPath": path}
        return {**shown, "priority": 1} if wide else shown

    return [
        column("Engine", ".spec.engine.type", "What runs the model."),
        column("Pools", ".status.poolsReady", "Pools with every replica Ready, of all pools."),
        column("Ready", f"{ready}.status", "Whether the endpoint answers."),
        column("Exact", ".status.routing.exactRatio", "Share of routing decisions that were exact."),
        column("Hit", ".status.routing.hitRatio", "Share of prompt blocks that were found cached."),
        column("Age", ".metadata.creationTimestamp", "Time since creation.", kind="date"),
        column("Model", ".spec.model.id", "Which weights are served.", wide=True),
        column("Reason", f"{ready}.reason", "Why it is Ready, or not.", wide=True),
        column("Endpoint", ".status.endpoint", "URL for clients in the cluster.", wide=True),
    ]


def _root() -> Schema:
    return {
        "description": "One model behind one OpenAI-compatible endpoint, on any number of engine pools.",
        "type": "object",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"description": "Version of this kind: mmrouter.io/v1alpha1.", "type": "string"},
            "kind": {"description": f"Always {KIND}.", "type": "string"},
            "metadata": {"type": "object"},
            "spec": _section(Spec, "What is wanted"),
            "status": _section(Status, "What is there"),
        },
        VALIDATIONS: [
            validation(
                f"size(self.metadata.name) <= {NAME_LENGTH}",
                f"metadata.name has at most {NAME_LENGTH} characters, as children append the names of pools",
            ),
            validation(
                f"self.metadata.name.matches('{DNS_LABEL}')",
                "metadata.name is a DNS label: lower-case letters, digits and `-`, beginning with a letter",
            ),
        ],
    }


def _section(model: type[Resource], about: str) -> Schema:
    schema = structural(model.model_json_schema(by_alias=True))
    return {**schema, "description": f"{about}. {schema['description']}"}


def structural(schema: Schema) -> Schema:
    """Return the structural form of a model's JSON schema. Raises :class:`SchemaError`."""
    return _structural(schema, schema.get("$defs", {}), ())


def _structural(schema: Schema, models: Mapping[str, Schema], inside: tuple[str, ...]) -> Schema:
    flat = _resolved(schema, models, inside)
    if "$model" in flat:
        inside = (*inside, flat["$model"])
    if flat.get("x-kubernetes-int-or-string"):
        del flat["type"]
    elif "type" not in flat:
        raise SchemaError(f"{'.'.join(inside) or 'schema'}: {json.dumps(flat)} has no single type")
    if "const" in flat:
        flat["enum"] = [flat.pop("const")]
    result: Schema = {key: flat[key] for key in _KEPT.split() if key in flat}
    if "description" in result:
        result["description"] = " ".join(result["description"].split())
    if "properties" in flat:
        _add_fields(result, flat, models, inside)
    elif isinstance(flat.get("additionalProperties"), dict):
        result["additionalProperties"] = _structural(flat["additionalProperties"], models, inside)
        if longest := flat.get("propertyNames", {}).get("maxLength"):
            rule = validation(f"self.all(key, size(key) <= {longest})", f"a key has at most {longest} characters")
            result[VALIDATIONS] = [*result.get(VALIDATIONS, []), rule]
    if "items" in flat:
        result["items"] = _structural(flat["items"], models, inside)
        result.setdefault("x-kubernetes-list-type", "atomic")
    if flat.get(NO_DEFAULT) or result.get("default") in (None, "", [], {}):
        result.pop("default", None)
    return result


def _add_fields(result: Schema, flat: Schema, models: Mapping[str, Schema], inside: tuple[str, ...]) -> None:
    """Add an object's fields. Its default consists of theirs, as the server validates a default before filling it."""
    fields = {name: _structural(field, models, (*inside, name)) for name, field in flat["properties"].items()}
    if required := flat.get("required"):
        result["required"] = list(required)
    result["properties"] = fields
    if result.get("default") is not None:
        result["default"] = {name: field["default"] for name, field in fields.items() if "default" in field}


def _resolved(schema: Schema, models: Mapping[str, Schema], inside: tuple[str, ...]) -> Schema:
    """Return the schema with its reference and its ``null`` branch merged in; ``$model`` names the reference."""
    flat = dict(schema)
    if "anyOf" in flat:
        branches = [branch for branch in flat.pop("anyOf") if branch.get("type") != "null"]
        if len(branches) != 1:
            raise SchemaError(f"{'.'.join(inside)}: a union of {len(branches)} types; use optional fields and a rule")
        flat = {**branches[0], **flat}
    if "$ref" in flat:
        name = flat.pop("$ref").rsplit("/", 1)[1]
        if name in inside:
            raise SchemaError(f"{'.'.join(inside)}: {name} contains itself; make the field opaque")
        flat = {**models[name], **flat, "$model": name}
    return flat
