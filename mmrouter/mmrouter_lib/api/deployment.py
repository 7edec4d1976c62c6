"""The `MMRouterDeployment` object: parsing, errors and JSON form."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, ValidationError, model_validator

from mmrouter_lib.api.cross_field_rules import Resource
from mmrouter_lib.api.engine_traits import ENGINE_TYPES
from mmrouter_lib.api.pools import Pool
from mmrouter_lib.api.shared_types import DNS_LABEL
from mmrouter_lib.api.spec import Spec
from mmrouter_lib.api.status import Status

API_VERSION = "mmrouter.io/v1alpha1"
KIND = "MMRouterDeployment"
NAME_LENGTH = 40
NO_SUCH_FIELD = "no such field"  # error of a field that this release does not have


class Metadata(Resource):
    """The used part of Kubernetes' object metadata; other fields are ignored, as the API server adds to them."""

    model_config = ConfigDict(extra="ignore")

    name: Annotated[str, Field(min_length=1, max_length=NAME_LENGTH, pattern=DNS_LABEL)]
    namespace: Annotated[str, Field(min_length=1, max_length=63)] = "default"
    uid: Annotated[str, Field(max_length=128)] = ""
    generation: Annotated[int, Field(ge=0)] = 0
    labels: dict[str, str] = Field(default={})
    annotations: dict[str, str] = Field(default={})


class MMRouterDeployment(Resource):
    """One model behind one OpenAI-compatible endpoint."""

    api_version: Literal["mmrouter.io/v1alpha1"]
    kind: Literal["MMRouterDeployment"]
    metadata: Metadata
    spec: Spec
    status: Status | None = None

    @model_validator(mode="after")
    def _default_name(self) -> "MMRouterDeployment":
        # A default that depends on another section, not marked as set: to_json() writes only the user's fields.
        if not self.spec.model.served_name:
            object.__setattr__(self.spec.model, "served_name", self.metadata.name)
        return self

    def pool(self, name: str) -> Pool:
        """Return the pool of that name. Raises ``KeyError`` when there is none."""
        return {pool.name: pool for pool in self.spec.pools}[name]


class SpecError(ValueError):
    """The resource is not valid. The message names each field to correct, ``errors`` lists (path, sentence)."""

    def __init__(self, errors: Sequence[tuple[str, str]]) -> None:
        self.errors = tuple(errors)
        super().__init__("; ".join(f"{path}: {sentence}" if path else sentence for path, sentence in self.errors))


def parse_deployment(obj: Any) -> MMRouterDeployment:
    """Return the typed resource of a decoded JSON or YAML document. Raises :class:`SpecError`."""
    if not isinstance(obj, dict):
        raise SpecError([("", f"an {KIND} is an object, not {type(obj).__name__}")])
    try:
        return MMRouterDeployment.model_validate(obj, by_alias=True, by_name=False)
    except ValidationError as error:
        raise SpecError([_explain(detail) for detail in error.errors(include_url=False)]) from error


def load_deployment(path: Path) -> MMRouterDeployment:
    """Read the resource from a JSON file. Raises ``OSError`` or :class:`SpecError`."""
    try:
        obj = json.loads(path.read_bytes())
    except ValueError as error:
        raise SpecError([(path.name, f"not JSON: {error}")]) from error
    return parse_deployment(obj)


def to_json(dep: MMRouterDeployment) -> dict[str, Any]:
    """Return the document that :func:`parse_deployment` reads back: the user's fields, without status and defaults.

    Defaults are left out, also those that the API server filled in. So pods of the previous release can read it unless
    it uses a newer field, and a field that a release adds changes no rendering. Of the metadata only name and namespace
    are kept.
    """
    metadata = {"name": dep.metadata.name, "namespace": dep.metadata.namespace}
    spec = dep.spec.model_dump(mode="json", by_alias=True, exclude_unset=True, exclude_defaults=True)
    return {"apiVersion": dep.api_version, "kind": dep.kind, "metadata": metadata, "spec": spec}


def block_size_of(dep: MMRouterDeployment, pool: Pool) -> int:
    """Return a pool's tokens per KV block: its own, else the engine's, else the default of engine and accelerator."""
    defaults = ENGINE_TYPES[dep.spec.engine.type].default_block_sizes
    return pool.block_size or dep.spec.engine.block_size or defaults[pool.accelerator.kind]


def _explain(detail: Any) -> tuple[str, str]:
    path = ""
    for part in detail["loc"]:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part != "[key]":
            path += f".{part}" if path else str(part)
    context = detail.get("ctx", {})
    match detail["type"]:
        case "rule":
            path = ".".join(part for part in (path, context["path"]) if part)
            sentence = context["sentence"]
        case "value_error":
            sentence = str(context["error"])
        case "extra_forbidden":
            sentence = NO_SUCH_FIELD
        case "missing":
            sentence = "is required"
        case "literal_error" | "enum":
            sentence = f"must be {context['expected']}, not {detail['input']!r:.80}"
        case "string_pattern_mismatch":
            sentence = f"{detail['input']!r:.80} does not match {context['pattern']}"
        case _:
            message = str(detail["msg"])
            sentence = message[0].lower() + message[1:] + f", not {detail['input']!r:.80}"
    return path, sentence
