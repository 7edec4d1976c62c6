"""What a check says."""

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warning", "problem"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at. ``do`` is empty where nothing is to be done."""

    level: Level
    check: str
    """Which check, in a word or two; stable, for programs."""
    seen: str
    do: str = ""


def ok(check: str, seen: str) -> Finding:
    """Return a finding of something that is as it should be."""
    return Finding("ok", check, seen)


def warning(check: str, seen: str, do: str) -> Finding:
    """Return a finding of something that works, is under way, or could not be looked at."""
    return Finding("warning", check, seen, do)


def problem(check: str, seen: str, do: str) -> Finding:
    """Return a finding of something that keeps the deployment from what it should do."""
    return Finding("problem", check, seen, do)
