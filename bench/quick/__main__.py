"""``python -m bench.quick``: fail where a ratio or a count is over a quarter worse than the committed baseline."""

import argparse
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from typing import Final

from bench.quick import measurements
from bench.quick.loop_and_index import compiled_index, longest_turn
from bench.quick.scenarios import scenarios
from bench.quick.verdicts import FILE, Figure, Verdict, judge, least, read, write
from mmrouter_lib import native

ATTEMPTS: Final = 3
"""How often times are measured before a worse one counts."""
Measure = Callable[[], list[Figure]]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, compare and print the verdicts; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.quick", description="Fail where a ratio or a count is a quarter worse than committed."
    )
    parser.add_argument("--write-baseline", action="store_true", help=f"write the figures into {FILE.name}")
    parser.add_argument(
        "--counts", action="store_true", help="measure once, and fail only by figures that other load does not change"
    )
    options = parser.parse_args(argv)
    release = ".".join(platform.python_version_tuple()[:2])
    if options.write_baseline:
        write(measure_all(), release)
        return 0
    baseline_release, committed = read()
    if release != baseline_release:
        sys.stdout.write(f"not run: the committed figures are of Python {baseline_release}, this is {release}\n")
        return 0
    if options.counts:
        return print_verdicts(judge(committed, measure_all(rounds=1), gate_times=False))
    return print_verdicts(attempts(committed, measure_all, measure_times))


def measure_all(rounds: int = measurements.ROUNDS) -> list[Figure]:
    """Return all figures. ``rounds``: of the scenarios' times, one where these decide nothing."""
    figures = []
    with scenarios() as pieces:
        parts: dict[str, Measure] = {
            "times": lambda: measurements.times(pieces, rounds),
            "calls": lambda: measurements.calls(pieces),
            "memory": lambda: measurements.memory(pieces),
            "kept": lambda: [measurements.kept(pieces[-1])],
            "instructions": lambda: measurements.instructions(pieces),
            "router": measurements.router,
            "loop and index": loop_and_index,
        }
        for name, measure in parts.items():
            began = time.monotonic()
            figures += measure()
            sys.stderr.write(f"bench quick: {name} took {time.monotonic() - began:.0f} s\n")
    return figures


def measure_times() -> list[Figure]:
    with scenarios() as pieces:
        return [*measurements.times(pieces), *measurements.router(), *loop_and_index()]


def loop_and_index() -> list[Figure]:
    return [longest_turn(), compiled_index()]


def attempts(committed: dict[str, float], first: Measure, again: Measure) -> list[Verdict]:
    """Return the verdicts; where times alone are worse, the least of up to :data:`ATTEMPTS` counts."""
    figures = first()
    for _ in range(ATTEMPTS - 1):
        worse = {verdict.figure.name for verdict in judge(committed, figures) if verdict.fails}
        if not worse or not all(figure.noisy for figure in figures if figure.name in worse):
            break
        figures = least(figures, (figure for figure in again() if figure.noisy))
    return judge(committed, figures)


def print_verdicts(verdicts: Sequence[Verdict]) -> int:
    """Print the verdicts, failures last; return the exit status."""
    for verdict in sorted(verdicts, key=lambda verdict: verdict.fails):
        sys.stdout.write(f"{verdict.state:8} {verdict.text()}\n")
    failed = sum(verdict.fails for verdict in verdicts)
    if failed:
        sys.stdout.write(
            f"{failed} of {len(verdicts)} figures fail; python -m bench.quick --write-baseline accepts them\n"
        )
    return 1 if failed else 0


if __name__ == "__main__":
    # The baseline is of the pure Python form, which every machine has; child processes inherit the variable.
    os.environ[native.SWITCH] = "0"
    native.load()
    sys.exit(main())
