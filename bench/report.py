"""Write docs/performance-figures.md: between two markers, a section per benchmark, each from one run of it."""

import os
import platform
import re
from collections.abc import Iterable
from pathlib import Path

from bench.rows import Row, markdown
from mmrouter_lib import native

PAGE = Path(__file__).resolve().parent.parent / "docs" / "performance-figures.md"
BEGIN = "<!-- figures: written by python -m bench --write -->"
END = "<!-- end of figures -->"
SECTION = re.compile(r"^### (\w+)\n(.*?)(?=^### |\Z)", re.MULTILINE | re.DOTALL)


class PageError(ValueError):
    """The page has no place for the table."""


def machine() -> str:
    """Return what the figures depend on, in one sentence; called before a run, so that the load is others'."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    load = os.getloadavg()[0]
    return (
        f"{_processor()}, {cpus} CPUs, {platform.system()} {platform.machine()}, "
        f"Python {platform.python_version()}, {_form()}, load average {load:.1f} before the run."
    )


def _form() -> str:
    """Return which form of the hot loops runs (docs/native.md), here and in the processes that are started."""
    return "with the compiled form" if native.form == "native" else f"without the compiled form ({native.why})"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or "unknown processor")


def insert(text: str, part: str, rows: Iterable[Row], machine: str) -> str:
    """Return the page's text with the section of one part replaced, or put where the alphabet has it.

    Raises :class:`PageError` without the two markers in order.
    """
    head, begin, rest = text.partition(BEGIN)
    table, end, tail = rest.partition(END)
    if not begin or not end:
        raise PageError(f"the page needs the lines {BEGIN!r} and {END!r}")
    kept = {name: body.strip() for name, body in SECTION.findall(table)}
    kept[part] = f"`python -m bench {part}` on {machine}\n\n{markdown(rows)}"
    sections = "\n\n".join(f"### {name}\n\n{kept[name]}" for name in sorted(kept))
    return f"{head}{BEGIN}\n\n{sections}\n\n{END}{tail}"


def write(part: str, rows: Iterable[Row], machine: str, page: Path = PAGE) -> None:
    """Replace one part's figures in the page."""
    page.write_text(insert(page.read_text(), part, rows, machine))
