"""Label selectors, matched as the API server matches them."""

from collections.abc import Mapping
from typing import Any


def selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Whether a ``metav1.LabelSelector`` selects something with these labels; an empty one selects everything."""
    for expression in selector.get("matchExpressions", []):
        value, values = labels.get(expression["key"]), expression.get("values", [])
        fits = {
            "Exists": value is not None,
            "DoesNotExist": value is None,
            "In": value in values,
            "NotIn": value not in values,
        }
        if not fits[expression["operator"]]:
            return False
    required: Mapping[str, str] = selector.get("matchLabels", {})
    return required.items() <= labels.items()
