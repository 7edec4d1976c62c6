"""The table of values in the chart's README, made from the comments of its values.yaml.

A comment right above a key describes it and gives it one row, with its default; a section without a comment stands for
the keys below it.
"""

import json
from collections.abc import Iterator

import yaml

from hack.generators.tables import replaced, table

Row = tuple[str, str, str]
"""Path, default as JSON, description."""


class UndescribedError(ValueError):
    """A value has no comment; the text is its path."""


def rows(values: str) -> Iterator[Row]:
    """Yield the rows of a values.yaml in its order. Raises :class:`UndescribedError`."""
    root = yaml.compose(values)
    assert isinstance(root, yaml.MappingNode), "values.yaml is no mapping"
    yield from _section(root, yaml.safe_load(values), values.splitlines(), "")


def _section(node: yaml.MappingNode, value: dict[str, object], lines: list[str], prefix: str) -> Iterator[Row]:
    for key, below in node.value:
        path, inner = f"{prefix}{key.value}", value[key.value]
        description = _comment(lines, key.start_mark.line)
        if description:
            yield path, json.dumps(inner), description
        elif isinstance(inner, dict) and inner and below.start_mark.line > key.start_mark.line:
            yield from _section(below, inner, lines, f"{path}.")
        else:
            raise UndescribedError(path)


def _comment(lines: list[str], line: int) -> str:
    """Return the comment that ends right above a line."""
    first = line
    while first > 0 and lines[first - 1].lstrip().startswith("#"):
        first -= 1
    return " ".join(text.lstrip().lstrip("#").strip() for text in lines[first:line])


def current(readme: str, values: str) -> str:
    """Return the README with the table of these values. Raises ``ValueError`` where it lacks the table's marks."""
    body = ((f"`{path}`", f"`{default}`", text.replace("|", "&#124;")) for path, default, text in rows(values))
    return replaced(readme, "values", table(("value", "default", "what"), body))
