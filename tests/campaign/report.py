"""The table of a campaign."""

from collections.abc import Mapping

from campaign.target import FLAT_BYTES, Counts
from campaign.targets import TARGETS

_COLUMNS = ("target", "inputs", "outcomes", "crashes", "hangs", "5xx", "differences", "worst ms", "MiB", "grown MiB")
_KINDS = ("crash", "hang", "5xx", "difference")


def table(results: Mapping[str, Counts], seed: str) -> str:
    """Return a Markdown table. ``worst ms``: CPU time of the slowest input; ``grown``: between the last quarters."""
    rows: list[tuple[str, ...]] = [_COLUMNS, tuple("---" if column == "target" else "--:" for column in _COLUMNS)]
    for name, counts in results.items():
        size = counts.memory[-1][1] if counts.memory else 0
        numbers = (f"{counts.inputs:,}", str(len(counts.outcomes)), *(str(counts.kinds[kind]) for kind in _KINDS))
        rows.append((name, *numbers, f"{counts.worst_s * 1e3:.1f}", _mib(size), _mib(counts.growth)))
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    lines += ["", f"{sum(counts.inputs for counts in results.values()):,} inputs, seed {seed}"]
    lines += [f"{name}: {figures}" for name, counts in results.items() if (figures := _figures(counts))]
    return "\n".join(lines)


def _figures(counts: Counts) -> str:
    figures = [f"{value:,} {name}" for name, value in sorted(counts.totals.items())]
    return ", ".join([*figures, *(f"at most {value:g} {name}" for name, value in sorted(counts.largest.items()))])


def problems(results: Mapping[str, Counts]) -> list[str]:
    """Return a line for every target in whose process the product has grown, and for every one without inputs."""
    judged = {name: counts for name, counts in results.items() if TARGETS[name].in_process}
    grown = [f"{name}: memory grew by {_mib(c.growth)} MiB" for name, c in judged.items() if c.growth > FLAT_BYTES]
    return [*grown, *(f"{name}: no input was checked" for name, counts in results.items() if not counts.inputs)]


def _mib(size: int) -> str:
    return f"{size / 1024**2:.1f}"
