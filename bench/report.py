"""Rows of benchmark figures with their goals, their tables, and docs/performance-figures.md with a section of each."""

import math
import os
import platform
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
from rich.table import Table

from mmrouter_lib import native

NOT_RUN = "not run: "
LONGEST_CELL = 120
"""Characters of a peer's text in a Markdown table."""


class AnswersDifferError(Exception):
    """Two implementations gave different answers, so their times are not comparable."""


class Row(msgspec.Struct, frozen=True):
    """One figure of one run. ``peer`` names the other side of a ratio with its own figure, or the reason it was not
    run. ``goal`` is a bound such as ``<= 160``; ``met`` is null without a goal or a value.
    """

    name: str
    value: float | None
    unit: str
    peer: str | None = None
    goal: str | None = None
    met: bool | None = None


def row(name: str, value: float | None, unit: str, *, peer: str | None = None, goal: str | None = None) -> Row:
    """Return a row, rounded to four digits. Raises ``ValueError`` for a malformed goal."""
    if value is not None:
        value = float(f"{value:.4g}")
    return Row(name, value, unit, peer, goal, _met(value, goal))


def not_run(name: str, unit: str, reason: str, *, goal: str | None = None) -> Row:
    """Return the row of a comparison that was not run."""
    return Row(name, None, unit, NOT_RUN + reason, goal, None)


def _met(value: float | None, goal: str | None) -> bool | None:
    if goal is None:
        return None
    sign, _, bound = goal.partition(" ")
    if sign not in ("<=", ">="):
        raise ValueError(f"a goal begins with <= or >=, not {goal!r}")
    limit = float(bound)
    if value is None:
        return None
    return value <= limit if sign == "<=" else value >= limit


def percentile(values: Sequence[float], share: float) -> float:
    """Return the nearest-rank percentile, ``share`` from 0 to 1. Raises ``ValueError`` without values."""
    if not values:
        raise ValueError("no values")
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def to_json(rows: Iterable[Row]) -> str:
    """Return ``{"rows": [...]}``."""
    return msgspec.json.encode({"rows": list(rows)}).decode()


def cells(item: Row) -> tuple[str, str, str, str, str]:
    """Return one line of a table: name, value with unit, goal, whether it is met, peer."""
    met = {None: "", True: "yes", False: "no"}[item.met]
    value = "-" if item.value is None else f"{item.value:,.6g} {item.unit}"
    return item.name, value, item.goal or "", met, item.peer or ""


def table(rows: Iterable[Row]) -> Table:
    shown = Table(box=None, pad_edge=False)
    for title in ("figure", "value", "goal", "met", "peer"):
        shown.add_column(title, justify="right" if title in ("value", "goal") else "left", overflow="fold")
    colours = {None: "", True: "green", False: "red"}
    for item in rows:
        name, value, goal, met, peer = cells(item)
        shown.add_row(name, value, goal, met, peer, style=None if item.met is None else colours[item.met])
    return shown


def markdown(rows: Iterable[Row]) -> str:
    """Return the rows as a Markdown table; a peer's text that is too long for a cell becomes a note below it."""
    lines = ["| figure | value | goal | met | peer |", "|---|---:|---:|---|---|"]
    notes: list[str] = []
    for item in rows:
        *left, peer = (cell.replace("|", "\\|") for cell in cells(item))
        if len(peer) > LONGEST_CELL:
            notes.append(f"{len(notes) + 1}. {peer}")
            peer = f"note {len(notes)}"
        lines.append("| " + " | ".join([*left, peer]) + " |")
    return "\n".join([*lines, "", *notes] if notes else lines)


PAGE = Path(__file__).resolve().parent.parent / "docs" / "performance-figures.md"
BEGIN = "<!-- figures: written by python -m bench --write -->"
END = "<!-- end of figures -->"
SECTION = re.compile(r"^### (\w+)\n(.*?)(?=^### |\Z)", re.MULTILINE | re.DOTALL)


class PageError(ValueError):
    """The page has no markers."""


def machine() -> str:
    """Describe the machine in one sentence; call it before a run, so that the load average is of other work."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    load = os.getloadavg()[0]
    return (
        f"{_processor()}, {cpus} CPUs, {platform.system()} {platform.machine()}, "
        f"Python {platform.python_version()}, {_form()}, load average {load:.1f} before the run."
    )


def _form() -> str:
    """Return the form of the hot loops (docs/native.md) in this process and its children."""
    return "with the compiled form" if native.form == "native" else f"without the compiled form ({native.why})"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or "unknown processor")


def insert(text: str, part: str, rows: Iterable[Row], machine: str) -> str:
    """Return the page's text with the section of one benchmark replaced or inserted in alphabetical order. Raises
    :class:`PageError` without the two markers in order.
    """
    head, begin, rest = text.partition(BEGIN)
    table, end, tail = rest.partition(END)
    if not begin or not end:
        raise PageError(f"the page needs the lines {BEGIN!r} and {END!r}")
    parts = {name: body.strip() for name, body in SECTION.findall(table)}
    parts[part] = f"`python -m bench {part}` on {machine}\n\n{markdown(rows)}"
    sections = "\n\n".join(f"### {name}\n\n{parts[name]}" for name in sorted(parts))
    return f"{head}{BEGIN}\n\n{sections}\n\n{END}{tail}"


def write(part: str, rows: Iterable[Row], machine: str, page: Path = PAGE) -> None:
    page.write_text(insert(page.read_text(), part, rows, machine))
