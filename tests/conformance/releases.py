"""What runs against an engine's release without a model: cache layouts, prompts and request fields, row by row.

A test of it is marked ``adopts(engine=, check=)``. ``make adopt`` (``hack/engines/adopt.py``) runs these tests in the
environment of a release, with the file of their results in ``MMROUTER_ADOPTION``. ``docs/conformance.json`` has the
rows of each release that was taken into it, or why it could not be run.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest
from conformance.own_code import EngineError
from packaging.version import Version

from hack.engines.adopt import PROVED

MARK = "adopts"
PASSED = "passed"
SHOWN = {"vllm": "vLLM", "sglang": "SGLang"}
Figures = Mapping[str, Any]


@dataclass
class Row:
    """What a test found. ``figures``: what it recorded; names in a list are counted where they are shown, and compared
    one by one.
    """

    check: str
    case: str
    result: str
    figures: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> tuple[str, str]:
        return self.check, self.case

    @property
    def level(self) -> str:
        """``exact``, ``bounded`` (less is promised than the engine has, never more), or why it is neither."""
        return self.result if self.result != PASSED else "bounded" if self.figures.get("below") else "exact"

    @property
    def text(self) -> str:
        """The level, with what was compared."""
        names = sum(len(value) for value in self.figures.values() if isinstance(value, list))
        counts = {name: value for name, value in self.figures.items() if not isinstance(value, list)} | {"names": names}
        shown = ", ".join(f"{name} {count}" for name, count in counts.items() if count)
        return f"{self.level}: {shown}" if shown and self.result == PASSED else self.level


class Adoption:
    """Collects the rows of a run in a file."""

    def __init__(self, file: Path) -> None:
        self._file, self._rows = file, dict[tuple[str, str], Row]()

    def add(self, item: pytest.Item, report: pytest.TestReport, figures: Figures, error: BaseException | None) -> None:
        mark = item.get_closest_marker(MARK)
        if mark is None or (report.passed and report.when != "call"):
            return
        case = item.callspec.id.removesuffix("-None") if hasattr(item, "callspec") else ""
        case = case.removeprefix(f"{mark.kwargs['engine']}-")
        row = Row(mark.kwargs["check"], case, result(report, error), dict(figures))
        if row.case == mark.kwargs["engine"]:
            row.case = ""
        self._rows[row.name] = row
        self._file.write_text(json.dumps([asdict(row) for row in self._rows.values()], indent=1))


def adoption() -> Adoption | None:
    """Return the collector of a run that is one of ``make adopt``."""
    file = os.environ.get("MMROUTER_ADOPTION")
    return Adoption(Path(file)) if file else None


def result(report: pytest.TestReport, error: BaseException | None) -> str:
    if report.passed:
        return PASSED
    if report.skipped and isinstance(report.longrepr, tuple):
        return f"not run: {report.longrepr[2].removeprefix('Skipped: ').removeprefix('not run: ')}"
    if isinstance(error, EngineError):
        return f"not run: {error}"
    message, _, _ = str(error).partition("\n  \n")  # what follows is pytest's list of differences
    return f"differs: {' '.join(message.split())[:200]}"


def changed(before: Row | None, now: Row) -> str:
    """Return how a row differs from the same row of another release, empty where it does not."""
    if before is None:
        return "new"
    if now.result != before.result:
        return f"was {before.level}"
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
    """Yield the lines of one table per engine, with a column for every release, and how each differs from the proved
    one. ``releases``: engine -> release -> ``date``, ``rows``, and ``not_run`` where it has none.
    """
    for engine, found in releases.items():
        proved, order = PROVED[engine], sorted(found, key=Version)
        columns = {release: {row.name: row for row in read(found[release])} for release in order}
        names = dict.fromkeys(name for rows in (columns.get(proved, {}), *columns.values()) for name in rows)
        missing = {release: f"not run: {why}" if (why := found[release].get("not_run")) else "-" for release in order}
        yield from ("", f"### {SHOWN[engine]} by release", "")
        yield line("check", "case", *(f"{release} ({found[release]['date']})" for release in order))
        yield "|" + "---|" * (2 + len(order))
        for name in names:
            yield line(*name, *(rows[name].text if name in rows else missing[at] for at, rows in columns.items()))
        lines = [
            f"- {release}, {check}{f' of {case}' if case else ''}: {difference}"
            for release, rows in columns.items()
            for (check, case), row in rows.items()
            if row.result == PASSED and (difference := changed(columns.get(proved, {}).get(row.name, row), row))
        ]
        yield from (
            ("", f"Names and counts that are not those of {proved}, the proved release:", "", *lines) if lines else ()
        )


def read(release: Mapping[str, Any]) -> list[Row]:
    return [Row(**row) for row in release["rows"]]


def line(*cells: str) -> str:
    return f"| {' | '.join(cell.replace('|', '/') or '-' for cell in cells)} |"
