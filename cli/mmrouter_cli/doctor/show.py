"""How a diagnosis is shown: what is wrong first to the eye, and what to do below it."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from mmrouter_cli.doctor import Diagnosis

_MARKS = {"ok": ("ok", "green"), "warning": ("warning", "yellow"), "problem": ("PROBLEM", "bold red")}


def as_json(diagnoses: Sequence[Diagnosis]) -> dict[str, Any]:
    """Return the diagnoses for machines."""
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
    """Print the diagnoses for people."""
    for diagnosis in diagnoses:
        console.print(Text(diagnosis.subject, style="bold"))
        table = Table.grid(padding=(0, 2, 0, 0))
        for _ in ("level", "check", "said"):
            table.add_column(overflow="fold")  # the end of a URL or of a pod's name is what tells it from others
        for item in diagnosis.findings:
            mark, style = _MARKS[item.level]
            said = Text(item.seen)
            if item.do:
                said.append(f"\n-> {item.do}", style="cyan")
            table.add_row(Text(mark, style=style), Text(item.check), said)
        console.print(Padding(table, (0, 0, 1, 2)))
    problems = sum(diagnosis.problems for diagnosis in diagnoses)
    warnings = sum(item.level == "warning" for diagnosis in diagnoses for item in diagnosis.findings)
    total = f"{problems} problem{'' if problems == 1 else 's'}, {warnings} warning{'' if warnings == 1 else 's'}"
    console.print(Text(total, style="red" if problems else "green"))
