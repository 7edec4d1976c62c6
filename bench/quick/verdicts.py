"""What was measured against what is committed: pure."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, Literal

import msgspec

FILE: Final = Path(__file__).with_name("baseline.json")
ALLOWED: Final = 1.25
"""A figure that is larger than the committed one times this fails, unless it has a factor of its own."""

State = Literal["ok", "better", "worse", "not run", "new", "gone"]
FAILS: Final = frozenset({"worse", "new", "gone"})


class BaselineError(ValueError):
    """The committed file is not one of ours."""


class Figure(msgspec.Struct, frozen=True):
    """One figure; less is better for all of them. ``value`` is null where it was not measured, ``why`` says why.

    ``slack``: a difference that means nothing, for counts near 0. ``allowed``: the factor by which it may be larger.
    ``noisy``: it is a time, so it may be measured again and the least of all attempts counts, because other load only
    ever adds.
    """

    name: str
    value: float | None
    unit: str
    slack: float = 0.0
    allowed: float = ALLOWED
    noisy: bool = False
    why: str = ""


class Verdict(msgspec.Struct, frozen=True):
    """A figure beside the committed value."""

    name: str
    committed: float | None
    value: float | None
    unit: str
    state: State
    why: str = ""

    @property
    def fails(self) -> bool:
        """Whether it ends the run with status 1."""
        return self.state in FAILS

    def text(self) -> str:
        """Return it in one line."""
        if self.state == "not run":
            return f"{self.name}: not run: {self.why}"
        if self.state == "gone":
            return f"{self.name}: committed as {self.committed:g}, and nothing measures it any more"
        if self.state == "new":
            return f"{self.name}: {self.value:.4g} {self.unit}, and no value is committed"
        assert self.value is not None
        assert self.committed is not None
        change = f", {self.value / self.committed - 1:+.0%}" if self.committed else ""
        return f"{self.name}: {self.value:.4g} {self.unit}, committed {self.committed:.4g}{change}"


def judge(committed: Mapping[str, float], measured: Sequence[Figure]) -> list[Verdict]:
    """Return a verdict for each figure that was measured or is committed."""
    names = {figure.name for figure in measured}
    gone = [
        Verdict(name, value, None, "", "gone", "nothing measures it")
        for name, value in committed.items()
        if name not in names
    ]
    return [_judged(figure, committed.get(figure.name)) for figure in measured] + gone


def _judged(figure: Figure, base: float | None) -> Verdict:
    if figure.value is None:
        state: State = "not run"
    elif base is None:
        state = "new"
    elif figure.value > max(base * figure.allowed, base + figure.slack):
        state = "worse"
    elif figure.value < min(base / figure.allowed, base - figure.slack):
        state = "better"
    else:
        state = "ok"
    return Verdict(figure.name, base, figure.value, figure.unit, state, figure.why)


def least(first: Sequence[Figure], again: Iterable[Figure]) -> list[Figure]:
    """Return the figures with those that were measured again, each with the lesser value."""
    seen = {figure.name: figure.value for figure in again if figure.value is not None}
    found = []
    for figure in first:
        value = seen.get(figure.name)
        better = value is not None and figure.value is not None and value < figure.value
        found.append(msgspec.structs.replace(figure, value=value) if better else figure)
    return found


def read(path: Path = FILE) -> tuple[str, dict[str, float]]:
    """Return the Python release and the values that are committed. Raises :class:`BaselineError`."""
    try:
        found = json.loads(path.read_text())
        return str(found["python"]), {str(name): float(value) for name, value in found["figures"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BaselineError(f"{path}: {error!r}; --write-baseline makes one") from error


def write(figures: Iterable[Figure], python: str, path: Path = FILE) -> None:
    """Commit to what was measured; a figure that was not measured here keeps what was committed."""
    try:
        _, values = read(path)
    except BaselineError:
        values = {}
    now = {f.name: float(f"{f.value:.4g}") if f.value is not None else values.get(f.name) for f in figures}
    kept = {name: value for name, value in now.items() if value is not None}
    path.write_text(json.dumps({"python": python, "figures": kept}, indent=2) + "\n")
