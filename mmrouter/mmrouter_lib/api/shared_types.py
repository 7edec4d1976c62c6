"""Bounded types and small objects that several sections of the resource share.

Patterns match the same texts in Python and in the API server's Go: no `\\s`, `\\d`, `\\w`, which differ outside ASCII.
"""

import decimal
import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from mmrouter_lib.api.cross_field_rules import VALIDATIONS, Resource, validation

QUANTITY = r"^[0-9]+(\.[0-9]+)?([eE][0-9]{1,2}|[kMGTPE]|[KMGTPE]i|m)?$"
_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]+)?)([eE][0-9]{1,2}|[kMGTPE]|[KMGTPE]i|m)?")
_DECIMAL_UNITS = {"m": decimal.Decimal("0.001"), "": decimal.Decimal(1)} | {
    u: decimal.Decimal(1000) ** (n + 1) for n, u in enumerate("kMGTPE")
}
_BINARY_UNITS = {f"{u}i": decimal.Decimal(1024) ** (n + 1) for n, u in enumerate("KMGTPE")}
_UNITS = _DECIMAL_UNITS | _BINARY_UNITS
_LIMIT = decimal.Decimal(2**63 - 1)  # Kubernetes caps larger quantities at this one


def quantity_value(text: str) -> decimal.Decimal:
    """Return the value of a quantity. Raises ``ValueError`` for anything else and from 2^63-1 on."""
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise ValueError(f'{text!r} is not a quantity: write for instance "500m", "20Mi" or "8Gi"')
    number, unit = match[1], match[2] or ""
    value = decimal.Decimal(number) * _UNITS[unit] if unit in _UNITS else decimal.Decimal(number + unit)
    if value >= _LIMIT:
        raise ValueError(f"quantity {text!r} is too large")
    return value


def quantity_bytes(text: str) -> int:
    """Return a quantity in whole bytes, fractions rounded up as Kubernetes does. Raises ``ValueError``."""
    return int(quantity_value(text).to_integral_value(decimal.ROUND_CEILING))


SIZE_SENTENCE = "a size is at least 1 byte"


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
    if isinstance(value, str) and quantity_value(value) <= 0:
        raise ValueError(SIZE_SENTENCE)
    return value


AcceleratorKind = Literal["nvidia", "amd", "intel-i915", "intel-xe", "gaudi", "cpu"]

DNS_LABEL = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"
OBJECT_NAME = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"
HOSTNAME = r"^([*][.])?[a-z0-9]([-a-z0-9]*[a-z0-9])?([.][a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"
DECIMAL = r"^[0-9]{1,9}(\.[0-9]{1,9})?$"
WORD = r"^[^\x00-\x20\x7f]+$"  # text without spaces and control characters
WORD_OR_EMPTY = r"^[^\x00-\x20\x7f]*$"

ObjectName = Annotated[str, Field(min_length=1, max_length=253, pattern=OBJECT_NAME)]
"""The name of another object in the same namespace."""

DataKey = Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[-._a-zA-Z0-9]+$")]
"""A key in a Secret or ConfigMap."""

Decimal = Annotated[str, Field(max_length=20, pattern=DECIMAL), BeforeValidator(_decimal)]
"""A decimal number as a string, because floating point numbers do not survive every JSON reader."""

QUANTITY_SCHEMA: dict[str, Any] = {
    "x-kubernetes-int-or-string": True,
    VALIDATIONS: [
        validation("type(self) != int || self >= 0", "a quantity is not negative"),
        validation(
            "type(self) == int ? self < 9223372036854775807 : "
            "!isQuantity(self) || quantity(self).isLessThan(quantity('9223372036854775807'))",
            "the quantity is too large",
        ),
    ],
}
SIZE_SCHEMA = QUANTITY_SCHEMA | {
    VALIDATIONS: [
        *QUANTITY_SCHEMA[VALIDATIONS],
        validation(
            "type(self) == int ? self > 0 : !isQuantity(self) || quantity(self).isGreaterThan(quantity('0'))",
            SIZE_SENTENCE,
        ),
    ]
}

Quantity = Annotated[
    str, Field(max_length=40, pattern=QUANTITY, json_schema_extra=QUANTITY_SCHEMA), BeforeValidator(_quantity)
]
"""A Kubernetes quantity; whole numbers may be written without quotes."""

Size = Annotated[str, Field(max_length=40, pattern=QUANTITY, json_schema_extra=SIZE_SCHEMA), BeforeValidator(_size)]
"""A quantity above zero, in bytes."""

Image = Annotated[str, Field(max_length=500, pattern=WORD_OR_EMPTY)]
"""A container image reference; empty for the default."""

Argument = Annotated[str, Field(max_length=2048)]
"""One argument of an engine's command line. The bound is what the API server can check for owned flags."""

LabelValue = Annotated[str, Field(max_length=63, pattern=r"^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$")]

Opaque = Annotated[dict[str, Any], Field(json_schema_extra={"x-kubernetes-preserve-unknown-fields": True})]
"""Part of a pod in Kubernetes' format; passed on, not modelled."""


def by_key(key: str) -> dict[str, Any]:
    """Return the ``json_schema_extra`` of a list of objects with one of their fields as the key."""
    return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [key]}


LABEL_NAME = r"^([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$"


def _label_keys(value: dict[str, str]) -> dict[str, str]:
    for key in value:
        if not re.match(LABEL_NAME, key):
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
    """Compute resources of one container, without accelerators (see `pools[].accelerator`)."""

    requests: dict[Annotated[str, Field(max_length=316)], Quantity] = Field(default={}, max_length=16)
    """Resources that the scheduler reserves, by resource name."""
    limits: dict[Annotated[str, Field(max_length=316)], Quantity] = Field(default={}, max_length=16)
    """Maximum resources of the container, by resource name."""


NodeLabels = Annotated[
    dict[Annotated[str, Field(max_length=316)], LabelValue],
    Field(max_length=32),
    BeforeValidator(lambda value: _label_keys(value) if isinstance(value, dict) else value),
]
