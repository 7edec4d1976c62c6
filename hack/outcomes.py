"""Results of test levels: counts from JUnit reports, the shortened failures and the summary table."""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

NEEDS = "needs"  # tests/artefacts.py
SHOWN_LINES = 40
"""Last lines of a failed test's report that the end of a run repeats."""
SLOWEST = 15
"""Tests of a level that the end of a run names with their time, so that a gate that grows shows by what."""


@dataclass
class Outcome:
    """Results of one level. ``failures`` names failed commands and tests, ``reports`` holds pytest's report of each
    failed test, ``skips`` counts tests per reason. ``needing`` counts the tests that need what the level is about,
    ``served`` those that passed.
    """

    passed: int = 0
    failed: int = 0
    needing: int = 0
    served: int = 0
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)
    reports: dict[str, str] = field(default_factory=dict)
    skips: Counter[str] = field(default_factory=Counter)
    times: dict[str, float] = field(default_factory=dict)

    def add(self, other: "Outcome") -> None:
        self.passed += other.passed
        self.failed += other.failed
        self.needing += other.needing
        self.served += other.served
        self.failures += other.failures
        self.reports |= other.reports
        self.skips += other.skips
        self.times |= other.times

    @property
    def skipped(self) -> int:
        return self.skips.total()

    @property
    def verdict(self) -> str:
        if self.failed:
            return "failed"
        counts = self.served if self.needing else self.passed
        return "passed" if counts or not self.skipped else "not run"


def add_report(report: Path, outcome: Outcome) -> None:
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        skip = case.find("skipped")
        needing = case.find(f"properties/property[@name='{NEEDS}']") is not None
        outcome.needing += needing
        name = f"{case.get('classname')}.{case.get('name')}"
        outcome.times[name] = float(case.get("time", 0))
        failure = next((part for tag in ("failure", "error") if (part := case.find(tag)) is not None), None)
        if failure is not None:
            outcome.failed += 1
            outcome.failures.append(name)
            outcome.reports[name] = (failure.text or failure.get("message") or "").strip()
        elif skip is not None:
            outcome.skips[skip.get("message", "").removeprefix("Skipped: ") or "no reason given"] += 1
        else:
            outcome.passed += 1
            outcome.served += needing


def shortened_failures(outcomes: dict[str, Outcome]) -> str:
    """Return the end of each failed test's report, which an hour of output would hide."""
    parts = []
    for name, report in ((n, r) for outcome in outcomes.values() for n, r in outcome.reports.items()):
        lines = report.splitlines()
        left_out = [f"... {len(lines) - SHOWN_LINES} more lines above"] if len(lines) > SHOWN_LINES else []
        parts.append("\n".join([f"== failed: {name}", *left_out, *lines[-SHOWN_LINES:]]))
    return "\n\n".join(parts)


def slowest(outcomes: dict[str, Outcome]) -> str:
    """Return the tests that took the most time, by level."""
    parts = []
    for level, outcome in outcomes.items():
        first = sorted(outcome.times.items(), key=lambda item: -item[1])[:SLOWEST]
        parts.append("\n".join([f"== slowest of {level}", *(f"{seconds:7.1f} s  {name}" for name, seconds in first)]))
    return "\n\n".join(parts)


def summary(outcomes: dict[str, Outcome]) -> str:
    row = "{:<12} {:<8} {:>7} {:>7} {:>8} {:>8}"
    lines = [row.format("level", "result", "passed", "failed", "skipped", "seconds")]
    for name, outcome in outcomes.items():
        counts = (outcome.passed, outcome.failed, outcome.skipped)
        lines.append(row.format(name, outcome.verdict, *counts, f"{outcome.seconds:.1f}"))
        lines += [f"    failed: {text}" for text in outcome.failures]
        for reason, count in sorted(outcome.skips.items()):
            text = reason if reason.startswith("not run: ") else f"not run: {reason}"
            lines.append(f"    {text} ({count} test{'s' if count > 1 else ''})")
    every = outcomes.values()
    totals = (sum(o.passed for o in every), sum(o.failed for o in every), sum(o.skipped for o in every))
    return "\n".join([*lines, "", "{} passed, {} failed, {} skipped".format(*totals)])
