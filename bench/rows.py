"""Rows of benchmark figures with their goals, and their tables."""

import math
from collections.abc import Iterable, Sequence

import msgspec
from rich.table import Table

NOT_RUN = "not run: "
LONGEST_CELL = 120
"""Characters of a peer's text in a Markdown table."""


class Row(msgspec.Struct, frozen=True):
    """One figure of one run.

    ``peer`` names the other side of a ratio with its own figure, or the reason it was not run. ``goal`` is a bound such
    as ``<= 160``; ``met`` is null without a goal or a value.
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
