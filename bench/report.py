"""Writes docs/performance-figures.md: one section per benchmark, between two markers."""

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
    """Return the page's text with the section of one benchmark replaced or inserted in alphabetical order.

    Raises :class:`PageError` without the two markers in order.
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
    """Replace one benchmark's figures in the page."""
    page.write_text(insert(page.read_text(), part, rows, machine))
