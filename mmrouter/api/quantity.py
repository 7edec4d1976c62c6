"""Kubernetes quantities: "20Mi", "1500m", "2e3"."""

import re
from decimal import ROUND_CEILING, Decimal

_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]+)?)([eE][0-9]+|[kMGTPE]|[KMGTPE]i|m)?")
_DECIMAL_UNITS = {"m": Decimal("0.001"), "": Decimal(1)} | {u: Decimal(1000) ** (n + 1) for n, u in enumerate("kMGTPE")}
_BINARY_UNITS = {f"{u}i": Decimal(1024) ** (n + 1) for n, u in enumerate("KMGTPE")}
_UNITS = _DECIMAL_UNITS | _BINARY_UNITS
_MAX = Decimal(2**63 - 1)


def quantity_value(text: str) -> Decimal:
    """Return the number that a quantity stands for. Raises ``ValueError`` for anything else and above 2^63-1."""
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise ValueError(f'{text!r} is not a quantity: write for instance "500m", "20Mi" or "8Gi"')
    number, unit = match[1], match[2] or ""
    if unit[:1] in "eE" and unit not in _UNITS and unit:
        if int(unit[1:]) > 18:
            raise ValueError(f"quantity {text!r} is too large")
        value = Decimal(number + unit)
    else:
        value = Decimal(number) * _UNITS[unit]
    if value > _MAX:
        raise ValueError(f"quantity {text!r} is too large")
    return value


def quantity_bytes(text: str) -> int:
    """Return a quantity in whole bytes, fractions rounded up as Kubernetes does. Raises ``ValueError``."""
    return int(quantity_value(text).to_integral_value(ROUND_CEILING))
