"""The generated CustomResourceDefinition is a valid structural schema and covers the models completely."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import Field

from mmrouter_lib.api import parse_deployment, to_json
from mmrouter_lib.api.crd import HASH_ANNOTATION, SchemaError, definition, schema_hash, structural
from mmrouter_lib.api.cross_field_rules import VALIDATIONS, Resource, immutable
from mmrouter_lib.api.shared_types import QUANTITY_SCHEMA

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))
VERSION = definition()["spec"]["versions"][0]
SCHEMA = VERSION["schema"]["openAPIV3Schema"]


def nodes(schema: dict[str, Any] = SCHEMA, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, schema
    for name, child in schema.get("properties", {}).items():
        yield from nodes(child, f"{path}.{name}".lstrip("."))
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            yield from nodes(schema[key], f"{path}[]")


def models(model: type[Resource] = Resource) -> Iterator[type[Resource]]:
    for inner in model.__subclasses__():
        yield inner
        yield from models(inner)


def test_the_file_in_crds_is_current() -> None:
    loaded = yaml.safe_load((ROOT / "crds" / "mmrouter.io_mmrouterdeployments.yaml").read_text())
    assert loaded == definition(), "make generate"


def test_every_node_has_a_type_or_is_an_integer_or_string() -> None:
    for path, node in nodes():
        assert ("type" in node) != node.get("x-kubernetes-int-or-string", False), path
        assert not {"$ref", "anyOf", "allOf", "oneOf", "const", "title", "$defs"} & set(node), path


def test_every_field_is_bounded() -> None:
    """Without bounds the API server cannot estimate the cost of the rules and refuses the definition."""
    for path, node in [node for part in ("spec", "status") for node in nodes(SCHEMA["properties"][part], part)]:
        match node.get("type"):
            case "string":
                assert "maxLength" in node or "enum" in node, path
            case "integer":
                assert "minimum" in node, path
                # An object's generation has no bound of its own.
                assert "maximum" in node or (path.startswith("status.") and path.lower().endswith("generation")), path
            case "array":
                assert {"maxItems", "x-kubernetes-list-type"} <= set(node), path
            case "object" if "additionalProperties" in node:
                assert "maxProperties" in node, path


def test_every_field_is_described_on_one_line() -> None:
    for path, node in nodes():
        if path and not path.endswith("[]") and path != "metadata":
            assert node.get("description"), path
            assert "\n" not in node["description"], path


def test_every_rule_of_every_model_is_in_the_definition() -> None:
    written = {entry["rule"] for _, node in nodes() for entry in node.get(VALIDATIONS, [])}
    missing = {model.__name__: rule.cel for model in models() for rule in model.rules() if rule.cel not in written}
    assert not missing
    assert len([1 for model in models() for _ in model.rules()]) > 20


def test_every_rule_has_a_message() -> None:
    for path, node in nodes():
        for entry in node.get(VALIDATIONS, []):
            assert entry["message"].strip(), path
            assert "\n" not in entry["message"], path
            assert entry.get("fieldPath", ".x").startswith("."), path


def test_lists_of_named_objects_are_maps() -> None:
    maps = {path: node["x-kubernetes-list-map-keys"] for path, node in nodes() if "x-kubernetes-list-map-keys" in node}
    named = ("spec.frontend.tenants.named", "spec.pools", "spec.pools[].accelerator.claims", "status.pools")
    assert maps == {path: ["name"] for path in named} | {"status.conditions": ["type"]}


def test_fields_described_as_immutable_are_immutable() -> None:
    rules = {path: [entry["rule"] for entry in node.get(VALIDATIONS, [])] for path, node in nodes()}
    fixed = {path for path, written in rules.items() if "self == oldSelf" in written}
    assert fixed == {"spec.model.id", "spec.engine.type", "spec.pools[].role"}
    assert {path for path, node in nodes() if "Immutable" in node.get("description", "")} == fixed


def test_tls_of_engines_cannot_be_taken_away() -> None:
    """Routers that have lost the CA would reach no engine that runs."""
    (rule,) = (entry for entry in dict(nodes())["spec.engine"][VALIDATIONS] if entry.get("fieldPath") == ".tls")
    assert rule["rule"] == "!has(oldSelf.tls) || (has(self.tls) && self.tls == oldSelf.tls)"


def test_it_fits_the_annotation_of_a_client_side_apply() -> None:
    from mmrouter_cli.cluster_commands import crd_text

    assert len(crd_text()) < 256 * 1024


def test_the_hash_changes_with_the_schema() -> None:
    made = definition()
    assert made["metadata"]["annotations"][HASH_ANNOTATION] == schema_hash(made["spec"])
    made["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["description"] += "."
    assert made["metadata"]["annotations"][HASH_ANNOTATION] != schema_hash(made["spec"])


def test_fields_whose_absence_has_a_meaning_get_no_default() -> None:
    defaults = {path: node["default"] for path, node in nodes(SCHEMA["properties"]["spec"]) if "default" in node}
    assert defaults["frontend"]["service"] == {"type": "ClusterIP", "port": 80}
    assert not [value for value in defaults.values() if value in ("", [], {}, None)]
    for path in ("pools[].weight", "pools[].tolerations[].operator", "engine.image", "model.servedName"):
        assert path not in defaults


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_defaults_written_out_change_nothing(example: Path) -> None:
    written = yaml.safe_load(example.read_text())
    filled = {**written, "spec": _filled(written["spec"], SCHEMA["properties"]["spec"])}
    assert filled != written
    assert parse_deployment(filled).spec == parse_deployment(written).spec
    assert to_json(parse_deployment(filled)) == to_json(parse_deployment(written))


def _filled(value: Any, schema: dict[str, Any]) -> Any:
    """Fill in defaults as the API server does."""
    if isinstance(value, list) and "items" in schema:
        return [_filled(item, schema["items"]) for item in value]
    if not isinstance(value, dict) or "properties" not in schema:
        return value
    defaults = {name: field["default"] for name, field in schema["properties"].items() if "default" in field}
    return {
        name: _filled(inner, schema["properties"][name]) if name in schema["properties"] else inner
        for name, inner in (defaults | value).items()
    }


def test_the_full_example_names_every_field() -> None:
    text = (ROOT / "examples" / "full.yaml").read_text()
    fields = {path.rsplit(".", 1)[-1] for path, _ in nodes(SCHEMA["properties"]["spec"]) if not path.endswith("[]")}
    # Those of which an example can have only one of several, or that need another.
    left = {"", "resourceClaimName", "tolerationSeconds"}
    assert {field for field in fields - left if f"{field}:" not in text} == set()


class Tree(Resource):
    """Contains itself."""

    children: list["Tree"] = Field(default=[], max_length=2)
    """More of them."""


class Either(Resource):
    """Is one of two things."""

    size: int | str
    """A union."""


class Fields(Resource):
    """One of each special kind."""

    fixed: str = Field(max_length=9, json_schema_extra=immutable("it stays"))
    """Cannot change."""
    amount: str | None = Field(default=None, json_schema_extra=QUANTITY_SCHEMA)
    """A quantity."""
    labels: dict[str, str] = Field(default={}, max_length=2)
    """A map."""


@pytest.mark.parametrize(("model", "sentence"), [(Tree, "Tree contains itself"), (Either, "union of 2 types")])
def test_a_model_without_a_structural_schema_is_refused(model: type[Resource], sentence: str) -> None:
    with pytest.raises(SchemaError, match=sentence):
        structural(model.model_json_schema())


def test_optional_fields_lose_their_null_and_keep_their_rules() -> None:
    made = structural(Fields.model_json_schema(by_alias=True))
    assert made["required"] == ["fixed"]
    assert made["properties"]["fixed"][VALIDATIONS] == [{"rule": "self == oldSelf", "message": "it stays"}]
    amount = made["properties"]["amount"]
    assert amount["x-kubernetes-int-or-string"] is True
    assert not {"type", "default", "anyOf"} & set(amount)
    assert made["properties"]["labels"]["additionalProperties"] == {"type": "string"}
