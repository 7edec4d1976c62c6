"""What runs against an engine's release without a model: cache layouts, prompts and request fields, row by row.

A test of it is marked ``adopts(engine=, check=)``. ``make adopt`` (``hack/engines/adopt.py``) runs these tests in the
environment of a release, with the file of their results in ``MMROUTER_ADOPTION``. ``docs/conformance.json`` has the
rows of each release that was taken into it.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest

MARK = "adopts"
PASSED = "passed"
SHOWN = {"vllm": "vLLM", "sglang": "SGLang"}
Figures = Mapping[str, Any]


@dataclass
class Row:
    """What a test found. ``figures``: what it recorded; a list is shown by its length and compared by its items."""

    check: str
    case: str
    result: str
    figures: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> tuple[str, str]:
        return self.check, self.case

    @property
    def text(self) -> str:
        if self.result != PASSED:
            return self.result
        shown = ((name, len(value) if isinstance(value, list) else value) for name, value in self.figures.items())
        return ", ".join(f"{name} {value}" for name, value in shown) or PASSED


class Adoption:
    """Collects the rows of a run in a file."""

    def __init__(self, file: Path) -> None:
        self._file, self._rows = file, dict[tuple[str, str], Row]()

    def add(self, item: pytest.Item, report: pytest.TestReport, figures: Figures) -> None:
        mark = item.get_closest_marker(MARK)
        if mark is None or (report.passed and report.when != "call"):
            return
        case = item.callspec.id if hasattr(item, "callspec") else ""
        row = Row(mark.kwargs["check"], case.removeprefix(f"{mark.kwargs['engine']}-"), result(report), dict(figures))
        if row.case == mark.kwargs["engine"]:
            row.case = ""
        self._rows[row.name] = row
        self._file.write_text(json.dumps([asdict(row) for row in self._rows.values()], indent=1))


def adoption() -> Adoption | None:
    """Return the collector of a run that is one of ``make adopt``."""
    file = os.environ.get("MMROUTER_ADOPTION")
    return Adoption(Path(file)) if file else None


def result(report: pytest.TestReport) -> str:
    if report.passed:
        return PASSED
    if report.skipped and isinstance(report.longrepr, tuple):
        return f"not run: {report.longrepr[2].removeprefix('Skipped: ').removeprefix('not run: ')}"
    crash = getattr(report.longrepr, "reprcrash", None)
    return f"failed: {' '.join(str(crash.message if crash else report.longrepr).split())[:200]}"


def changed(before: Row | None, now: Row) -> str:
    """Return how a row differs from the same row of another release, empty where it does not."""
    if before is None:
        return "new"
    if now.result != before.result:
        return "failed" if now.result.startswith("failed") else f"was {before.result}"
    parts = []
    for name in [*before.figures, *(name for name in now.figures if name not in before.figures)]:
        old, new = before.figures.get(name), now.figures.get(name)
        if isinstance(old, list) and isinstance(new, list):
            items = [f"+{item}" for item in sorted({*new} - {*old})] + [f"-{item}" for item in sorted({*old} - {*new})]
            parts += [f"{name} {' '.join(items)}"] if items else []
        elif old != new:
            parts.append(f"{name} {old} -> {new}")
    return ", ".join(parts)


def comparison(before: Sequence[Row], now: Sequence[Row], proved: str, release: str) -> Iterator[str]:
    """Yield the lines of a table of two releases."""
    earlier = {row.name: row for row in before}
    yield f"| check | case | {proved} | {release} | changed |"
    yield "|---|---|---|---|---|"
    for row in now:
        old = earlier.pop(row.name, None)
        yield line(row.check, row.case, old.text if old else "-", row.text, changed(old, row))
    for row in earlier.values():
        yield line(row.check, row.case, row.text, "-", "did not run")


def tables(releases: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield the lines of one table per engine, with a column for every release. ``releases``: engine -> release ->
    ``date`` and ``rows``.
    """
    for engine, found in releases.items():
        columns = {release: {row.name: row for row in read(one)} for release, one in found.items()}
        names = dict.fromkeys(name for rows in columns.values() for name in rows)
        yield from ("", f"### {SHOWN[engine]} by release", "")
        yield line("check", "case", *(f"{release} ({found[release]['date']})" for release in columns))
        yield "|" + "---|" * (2 + len(columns))
        for name in names:
            yield line(*name, *(rows[name].text if name in rows else "-" for rows in columns.values()))


def read(release: Mapping[str, Any]) -> list[Row]:
    return [Row(**row) for row in release["rows"]]


def line(*cells: str) -> str:
    return f"| {' | '.join(cell.replace('|', '/') or '-' for cell in cells)} |"
