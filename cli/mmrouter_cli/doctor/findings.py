"""Findings of the doctor, and how they are printed: problems and advice per subject."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

Level = Literal["ok", "warning", "problem"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check; ``do`` is the advice, empty where no action is needed."""

    level: Level
    check: str
    """Name of the check; stable, for programs."""
    seen: str
    do: str = ""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The findings on one subject: the cluster, or a deployment."""

    subject: str
    findings: tuple[Finding, ...]

    @property
    def problems(self) -> int:
        """Number of findings that need action."""
        return sum(finding.level == "problem" for finding in self.findings)


def ok(check: str, seen: str) -> Finding:
    """Return a finding of something that is right."""
    return Finding("ok", check, seen)


def warning(check: str, seen: str, do: str) -> Finding:
    """Return a finding of something that works imperfectly, is in progress, or could not be checked."""
    return Finding("warning", check, seen, do)


def problem(check: str, seen: str, do: str) -> Finding:
    """Return a finding of something that keeps the deployment from working as specified."""
    return Finding("problem", check, seen, do)


_MARKS = {"ok": ("ok", "green"), "warning": ("warning", "yellow"), "problem": ("PROBLEM", "bold red")}


def as_json(diagnoses: Sequence[Diagnosis]) -> dict[str, Any]:
    """Return the diagnoses as plain values."""
    return {
        "passed": not any(diagnosis.problems for diagnosis in diagnoses),
        "problems": sum(diagnosis.problems for diagnosis in diagnoses),
        "subjects": [
            {
                "subject": diagnosis.subject,
                "findings": [
                    {"level": item.level, "check": item.check, "seen": item.seen, "do": item.do}
                    for item in diagnosis.findings
                ],
            }
            for diagnosis in diagnoses
        ],
    }


def show(console: Console, diagnoses: Sequence[Diagnosis]) -> None:
    """Print the diagnoses as tables."""
    for diagnosis in diagnoses:
        console.print(Text(diagnosis.subject, style="bold"))
        table = Table.grid(padding=(0, 2, 0, 0))
        for _ in ("level", "check", "text"):
            table.add_column(overflow="fold")  # the end of a URL or a pod's name must stay visible
        for item in diagnosis.findings:
            mark, style = _MARKS[item.level]
            text = Text(item.seen)
            if item.do:
                text.append(f"\n-> {item.do}", style="cyan")
            table.add_row(Text(mark, style=style), Text(item.check), text)
        console.print(Padding(table, (0, 0, 1, 2)))
    problems = sum(diagnosis.problems for diagnosis in diagnoses)
    warnings = sum(item.level == "warning" for diagnosis in diagnoses for item in diagnosis.findings)
    total = f"{problems} problem{'' if problems == 1 else 's'}, {warnings} warning{'' if warnings == 1 else 's'}"
    console.print(Text(total, style="red" if problems else "green"))
