"""What every model of the resource is made of: the base class, bounded types and the rule helper."""

import re
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.alias_generators import to_camel
from pydantic_core import PydanticCustomError

from mmrouter.api.quantity import quantity_bytes, quantity_value


class Resource(BaseModel):
    """Immutable values; camelCase in JSON and YAML, snake_case in Python; a field that is not known is an error.

    Strict, as the API server is: "2" is no number and "yes" no boolean.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        alias_generator=to_camel,
        validate_by_name=True,
        validate_by_alias=True,
        use_attribute_docstrings=True,
    )


def broken(path: str, sentence: str) -> PydanticCustomError:
    """Return the error of a rule over several fields; ``path`` (camelCase, relative) names the field to correct."""
    return PydanticCustomError("rule", "{sentence}", {"path": path, "sentence": sentence})


def _decimal(value: Any) -> Any:
    if isinstance(value, int | float) and not isinstance(value, bool):
        raise ValueError(f'decimals are written as strings: "{value}", not {value}')
    return value


def _quantity(value: Any) -> Any:
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if isinstance(value, str):
        quantity_value(value)
    return value


def _size(value: Any) -> Any:
    value = _quantity(value)
    if isinstance(value, str) and quantity_bytes(value) < 1:
        raise ValueError("a size is at least 1 byte")
    return value


DNS_LABEL = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"
OBJECT_NAME = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"
DECIMAL = r"^[0-9]{1,9}(\.[0-9]{1,9})?$"
QUANTITY = r"^[0-9]+(\.[0-9]+)?([eE][0-9]+|[kMGTPE]|[KMGTPE]i|m)?$"

ObjectName = Annotated[str, Field(min_length=1, max_length=253, pattern=OBJECT_NAME)]
"""The name of another object in the same namespace."""

DataKey = Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[-._a-zA-Z0-9]+$")]
"""A key in a Secret or ConfigMap."""

Decimal = Annotated[str, Field(max_length=20, pattern=DECIMAL), BeforeValidator(_decimal)]
"""A decimal number as a string, because floating point numbers do not survive every JSON reader."""

Quantity = Annotated[
    str,
    Field(max_length=40, pattern=QUANTITY, json_schema_extra={"x-kubernetes-int-or-string": True}),
    BeforeValidator(_quantity),
]
"""A Kubernetes quantity; whole numbers may be written without quotes."""

Size = Annotated[
    str,
    Field(max_length=40, pattern=QUANTITY, json_schema_extra={"x-kubernetes-int-or-string": True}),
    BeforeValidator(_size),
]
"""A quantity of at least one byte."""

Image = Annotated[str, Field(max_length=500, pattern=r"^([^\s]+)?$")]
"""A container image reference; empty for the default."""

Argument = Annotated[str, Field(max_length=4096)]

LabelValue = Annotated[str, Field(max_length=63, pattern=r"^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$")]

Opaque = Annotated[dict[str, Any], Field(json_schema_extra={"x-kubernetes-preserve-unknown-fields": True})]
"""Part of a pod in Kubernetes' own words; it is passed on, not modelled."""

_KEY = re.compile(r"^([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$")


def _label_keys(value: dict[str, str]) -> dict[str, str]:
    for key in value:
        if not _KEY.match(key):
            raise ValueError(f"{key!r} is not a label name: write `name` or `domain/name`")
    return value


class ConfigMapKey(Resource):
    """One key of a ConfigMap in the same namespace."""

    name: ObjectName
    """Name of the ConfigMap."""
    key: DataKey
    """Key in the ConfigMap's data."""


class SecretKey(Resource):
    """One key of a Secret in the same namespace."""

    name: ObjectName
    """Name of the Secret."""
    key: DataKey
    """Key in the Secret's data."""


class SecretName(Resource):
    """A Secret in the same namespace."""

    name: ObjectName
    """Name of the Secret."""


class Resources(Resource):
    """Compute resources of one container. Accelerators are not named here but in `pools[].accelerator`."""

    requests: dict[Annotated[str, Field(max_length=316)], Quantity] = Field(default={}, max_length=16)
    """What the scheduler sets aside, by resource name."""
    limits: dict[Annotated[str, Field(max_length=316)], Quantity] = Field(default={}, max_length=16)
    """What the container may use at most, by resource name."""


NodeLabels = Annotated[
    dict[Annotated[str, Field(max_length=316)], LabelValue],
    Field(max_length=32),
    BeforeValidator(lambda value: _label_keys(value) if isinstance(value, dict) else value),
]
