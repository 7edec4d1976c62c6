"""``python -m bench.quick``: exit status 1 where something became worse by more than a quarter, and what."""

import argparse
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from typing import Final

from bench.quick import counts, figures, proxy
from bench.quick.figures import Figure
from bench.quick.scenarios import scenarios
from mmrouter_lib import native

ATTEMPTS: Final = 3
"""Times that are worse are taken so often before they count."""
Take = Callable[[], list[Figure]]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, compare, say what came of it; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.quick", description="Fail where a ratio or a count is a quarter worse than committed."
    )
    parser.add_argument("--write-baseline", action="store_true", help=f"commit to the figures: {figures.FILE.name}")
    options = parser.parse_args(argv)
    release = ".".join(platform.python_version_tuple()[:2])
    if options.write_baseline:
        figures.write(measured(), release)
        return 0
    committed_by, committed = figures.read()
    if release != committed_by:
        sys.stdout.write(f"not run: the committed figures are of Python {committed_by}, this is {release}\n")
        return 0
    return told(attempts(committed, measured, repeated))


def measured() -> list[Figure]:
    """Return every figure."""
    found = []
    with scenarios() as pieces:
        parts: dict[str, Take] = {
            "times": lambda: counts.times(pieces),
            "calls": lambda: counts.calls(pieces),
            "memory": lambda: counts.memory(pieces),
            "kept": lambda: [counts.kept(pieces[-1])],
            "instructions": lambda: counts.instructions(pieces),
            "router": proxy.measure,
        }
        for name, take in parts.items():
            began = time.monotonic()
            found += take()
            sys.stderr.write(f"bench quick: {name} took {time.monotonic() - began:.0f} s\n")
    return found


def repeated() -> list[Figure]:
    """Return the figures that other load disturbs, once more."""
    with scenarios() as pieces:
        return [*counts.times(pieces), *proxy.measure()]


def attempts(committed: dict[str, float], first: Take, again: Take) -> list[figures.Verdict]:
    """Return the verdicts; where times alone are worse, the least of up to :data:`ATTEMPTS` counts."""
    found = first()
    for _ in range(ATTEMPTS - 1):
        worse = {verdict.name for verdict in figures.judge(committed, found) if verdict.fails}
        if not worse or not all(figure.noisy for figure in found if figure.name in worse):
            break
        found = figures.least(found, (figure for figure in again() if figure.noisy))
    return figures.judge(committed, found)


def told(verdicts: Sequence[figures.Verdict]) -> int:
    """Show the verdicts, what fails last; return the exit status."""
    for verdict in sorted(verdicts, key=lambda verdict: verdict.fails):
        sys.stdout.write(f"{verdict.state:8} {verdict.text()}\n")
    failed = sum(verdict.fails for verdict in verdicts)
    if failed:
        sys.stdout.write(
            f"{failed} of {len(verdicts)} figures fail; python -m bench.quick --write-baseline commits to them\n"
        )
    return 1 if failed else 0


if __name__ == "__main__":
    # Like is compared with like, here and in the processes that are started: the committed figures are of the form in
    # Python, which every machine has.
    os.environ[native.SWITCH] = "0"
    native.load()
    sys.exit(main())
