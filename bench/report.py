"""The table in docs/performance.md: written between two markers, from one run of everything."""

import os
import platform
from collections.abc import Iterable
from pathlib import Path

from bench.rows import Row, markdown

PAGE = Path(__file__).resolve().parent.parent / "docs" / "performance.md"
BEGIN = "<!-- figures: written by python -m bench --write -->"
END = "<!-- end of figures -->"


class PageError(ValueError):
    """The page has no place for the table."""


def machine() -> str:
    """Return what the figures depend on, in one sentence; called before a run, so that the load is others'."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    load = os.getloadavg()[0]
    return (
        f"{_processor()}, {cpus} CPUs, {platform.system()} {platform.machine()}, "
        f"Python {platform.python_version()}, load average {load:.1f} before the run."
    )


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or "unknown processor")


def insert(text: str, rows: Iterable[Row], machine: str) -> str:
    """Return the page's text with the table replaced. Raises :class:`PageError` without the two markers in order."""
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise PageError(f"the page needs the lines {BEGIN!r} and {END!r}")
    return f"{head}{BEGIN}\n{machine}\n\n{markdown(rows)}\n{END}{tail}"


def write(rows: Iterable[Row], machine: str, page: Path = PAGE) -> None:
    """Replace the table in the page."""
    page.write_text(insert(page.read_text(), rows, machine))
