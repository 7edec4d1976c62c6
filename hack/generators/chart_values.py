"""The table of values in the chart's README, made from the comments of its values.yaml.

    python hack/chart_values.py            # exit status 1 when the README is not current
    python hack/chart_values.py --write    # brings it up to date

A comment right above a key is its description. A section without one stands for its keys; what has a description is one
row, with its default.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import yaml

CHART = Path(__file__).resolve().parents[2] / "charts" / "mmrouter"
BEGIN, END = "<!-- values: begin -->", "<!-- values: end -->"
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
        said = _comment(lines, key.start_mark.line)
        if said:
            yield path, json.dumps(inner), said
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


def table(values: str) -> str:
    """Return the rows as Markdown."""
    shown = [
        "| value | default | what |",
        "|---|---|---|",
        *(f"| `{path}` | `{default}` | {said.replace('|', '&#124;')} |" for path, default, said in rows(values)),
    ]
    return "\n".join(shown)


def current(readme: str, values: str) -> str:
    """Return the README with the table of these values between its marks. Raises ``ValueError`` without marks."""
    before, began, rest = readme.partition(BEGIN)
    _, ended, after = rest.partition(END)
    if not (began and ended):
        raise ValueError(f"the README has no {BEGIN} and {END}")
    return f"{before}{BEGIN}\n{table(values)}\n{END}{after}"


def main() -> int:
    parser = argparse.ArgumentParser(description="Check the table of values in the chart's README.")
    parser.add_argument("--write", action="store_true", help="bring it up to date")
    file = CHART / "README.md"
    wanted = current(file.read_text(), (CHART / "values.yaml").read_text())
    if parser.parse_args().write:
        file.write_text(wanted)
    elif file.read_text() != wanted:
        print(f"{file.name} is not current: python hack/chart_values.py --write", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
