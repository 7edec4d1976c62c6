"""Figures, the committed baseline, and the verdict on each figure."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, Literal

import msgspec

FILE: Final = Path(__file__).with_name("baseline.json")
ALLOWED: Final = 1.25
"""Factor over the baseline from which a figure fails, unless it has its own."""

State = Literal["ok", "better", "worse", "slower", "not run", "new", "gone"]
FAILS: Final = frozenset({"worse", "new", "gone"})


class BaselineError(ValueError):
    """The baseline file cannot be read."""


class Figure(msgspec.Struct, frozen=True):
    """One figure, of which less is better; ``value`` is null where it was not measured, for the reason ``why``.
    ``slack``: an insignificant difference, for counts near 0. ``allowed``: the factor by which it may be larger.
    ``noisy``: a time; it may be measured again and the least of all attempts counts, because other load only adds.
    """

    name: str
    value: float | None
    unit: str
    slack: float = 0.0
    allowed: float = ALLOWED
    noisy: bool = False
    why: str = ""


class Verdict(msgspec.Struct, frozen=True):
    """A figure beside its baseline."""

    figure: Figure
    committed: float | None
    state: State

    @property
    def fails(self) -> bool:
        """Whether the run ends with status 1."""
        return self.state in FAILS

    def text(self) -> str:
        name, value, unit = self.figure.name, self.figure.value, self.figure.unit
        if value is None:
            return f"{name}: {self.state}: {self.figure.why}"
        if self.committed is None:
            return f"{name}: {value:.4g} {unit}, and no value is committed"
        change = f", {value / self.committed - 1:+.0%}" if self.committed else ""
        return f"{name}: {value:.4g} {unit}, committed {self.committed:.4g}{change}"


def judge(committed: Mapping[str, float], measured: Sequence[Figure], *, gate_times: bool = True) -> list[Verdict]:
    """Return a verdict for each figure that was measured or is committed. Without ``gate_times`` a worse time is
    ``slower``, which does not fail.
    """
    gone = committed.keys() - {figure.name for figure in measured}
    verdicts = [Verdict(each, committed.get(each.name), _state(each, committed, gate_times)) for each in measured]
    why = "committed, and no longer measured"
    return verdicts + [Verdict(Figure(name, None, "", why=why), committed[name], "gone") for name in sorted(gone)]


def _state(figure: Figure, committed: Mapping[str, float], gate_times: bool) -> State:
    if figure.value is None:
        return "not run"
    base = committed.get(figure.name)
    if base is None:
        return "new"
    if figure.value > max(base * figure.allowed, base + figure.slack):
        return "slower" if figure.noisy and not gate_times else "worse"
    return "better" if figure.value < min(base / figure.allowed, base - figure.slack) else "ok"


def least(first: Sequence[Figure], again: Iterable[Figure]) -> list[Figure]:
    repeated = {figure.name: figure.value for figure in again if figure.value is not None}
    return [
        figure
        if figure.value is None
        else msgspec.structs.replace(figure, value=min(figure.value, repeated.get(figure.name, figure.value)))
        for figure in first
    ]


def read(path: Path = FILE) -> tuple[str, dict[str, float]]:
    """Return the baseline's Python release and values. Raises :class:`BaselineError`."""
    try:
        baseline = json.loads(path.read_text())
        return str(baseline["python"]), {str(name): float(value) for name, value in baseline["figures"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BaselineError(f"{path}: {error!r}; --write-baseline makes one") from error


def write(figures: Iterable[Figure], python: str, path: Path = FILE) -> None:
    """Write the baseline; a figure that was not measured here keeps its value."""
    try:
        _, values = read(path)
    except BaselineError:
        values = {}
    now = {f.name: float(f"{f.value:.4g}") if f.value is not None else values.get(f.name) for f in figures}
    kept = {name: value for name, value in now.items() if value is not None}
    path.write_text(json.dumps({"python": python, "figures": kept}, indent=2) + "\n")
