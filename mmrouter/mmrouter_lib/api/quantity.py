"""Parse Kubernetes quantities: "20Mi", "1500m", "2e3"."""

import re
from decimal import ROUND_CEILING, Decimal

QUANTITY = r"^[0-9]+(\.[0-9]+)?([eE][0-9]{1,2}|[kMGTPE]|[KMGTPE]i|m)?$"
_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]+)?)([eE][0-9]{1,2}|[kMGTPE]|[KMGTPE]i|m)?")
_DECIMAL_UNITS = {"m": Decimal("0.001"), "": Decimal(1)} | {u: Decimal(1000) ** (n + 1) for n, u in enumerate("kMGTPE")}
_BINARY_UNITS = {f"{u}i": Decimal(1024) ** (n + 1) for n, u in enumerate("KMGTPE")}
_UNITS = _DECIMAL_UNITS | _BINARY_UNITS
_LIMIT = Decimal(2**63 - 1)
"""Kubernetes caps larger quantities at this one."""


def quantity_value(text: str) -> Decimal:
    """Return the value of a quantity. Raises ``ValueError`` for anything else and from 2^63-1 on."""
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise ValueError(f'{text!r} is not a quantity: write for instance "500m", "20Mi" or "8Gi"')
    number, unit = match[1], match[2] or ""
    value = Decimal(number) * _UNITS[unit] if unit in _UNITS else Decimal(number + unit)
    if value >= _LIMIT:
        raise ValueError(f"quantity {text!r} is too large")
    return value


def quantity_bytes(text: str) -> int:
    """Return a quantity in whole bytes, fractions rounded up as Kubernetes does. Raises ``ValueError``."""
    return int(quantity_value(text).to_integral_value(ROUND_CEILING))
