"""Tests that only the long form has, `make test LONG=1`: what repeats a property in a further setup, or measures.

They are marked ``long_form``, or given as :func:`parameters`. ``MMROUTER_FAMILIES`` selects the long form; the
conformance level reads families from it.
"""

import os
from collections.abc import Iterable
from typing import Any

import pytest

IS_LONG = bool(os.environ.get("MMROUTER_FAMILIES"))


def parameters(names: Iterable[Any], *always: Any) -> list[Any]:
    """Return ``names`` as parameters, of which all but ``always`` are only part of the long form."""
    return [name if name in always else pytest.param(name, marks=pytest.mark.long_form) for name in names]


def leave_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests of the long form where the run is not that."""
    if not IS_LONG and (left_out := [item for item in items if item.get_closest_marker("long_form")]):
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=left_out)
