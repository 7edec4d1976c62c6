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

    name: str
    committed: float | None
    value: float | None
    unit: str
    state: State
    why: str = ""

    @property
    def fails(self) -> bool:
        """Whether the run ends with status 1."""
        return self.state in FAILS

    def text(self) -> str:
        if self.state == "not run":
            return f"{self.name}: not run: {self.why}"
        if self.state == "gone":
            return f"{self.name}: committed as {self.committed:g}, and no longer measured"
        if self.state == "new":
            return f"{self.name}: {self.value:.4g} {self.unit}, and no value is committed"
        assert self.value is not None
        assert self.committed is not None
        change = f", {self.value / self.committed - 1:+.0%}" if self.committed else ""
        return f"{self.name}: {self.value:.4g} {self.unit}, committed {self.committed:.4g}{change}"


def judge(committed: Mapping[str, float], measured: Sequence[Figure], *, gate_times: bool = True) -> list[Verdict]:
    """Return a verdict for each figure that was measured or is committed. Without ``gate_times`` a worse time is
    ``slower``, which does not fail.
    """
    names = {figure.name for figure in measured}
    gone = [
        Verdict(name, value, None, "", "gone", "nothing measures it")
        for name, value in committed.items()
        if name not in names
    ]
    return [_judged(figure, committed.get(figure.name), gate_times) for figure in measured] + gone


def _judged(figure: Figure, base: float | None, gate_times: bool) -> Verdict:
    if figure.value is None:
        state: State = "not run"
    elif base is None:
        state = "new"
    elif figure.value > max(base * figure.allowed, base + figure.slack):
        state = "slower" if figure.noisy and not gate_times else "worse"
    elif figure.value < min(base / figure.allowed, base - figure.slack):
        state = "better"
    else:
        state = "ok"
    return Verdict(figure.name, base, figure.value, figure.unit, state, figure.why)


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
