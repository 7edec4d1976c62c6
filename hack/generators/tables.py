"""Markdown tables between two marks of a page."""

from collections.abc import Iterable, Sequence


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" if cells[0] != "---" else f"|{'|'.join(cells)}|" for cells in lines)


def replaced(page: str, name: str, text: str) -> str:
    """Return the page with the text between ``<!-- NAME: begin -->`` and its end. Raises ``ValueError``."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, began, rest = page.partition(begin)
    _, ended, after = rest.partition(end)
    if not (began and ended):
        raise ValueError(f"the page has no {begin} and {end}")
    return f"{before}{begin}\n{text}\n{end}{after}"
