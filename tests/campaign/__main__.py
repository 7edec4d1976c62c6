"""Hostile inputs, faults and soak for a given time, and one table of the results. ``make campaign`` runs it.

    python -m campaign [TARGET ...] [--seconds 7200] [--seed N] [--count N] [--lanes N] [--keep]
    python -m campaign --replay FILE

Every target gets an equal share of the time, in processes of its own; ``soak`` runs beside all of them. An input that
fails is written to ``build/campaign``, with the command that checks it again. ``--keep`` adds new outcomes to the
committed corpus. Exit status 1 where anything failed, or a process's memory is not flat.
"""

import argparse
import os
import shlex
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path

from campaign import corpus
from campaign.report import problems, table
from campaign.target import Counts, check
from campaign.targets import TARGETS
from campaign.worker import ROOT, Task, supervise

FOLDER = ROOT / "build" / "campaign"


def write_failures(name: str, counts: Counts) -> list[str]:
    """Write failed inputs and the slowest one; return a paragraph for each failure."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / f"{name}-slowest").write_bytes(counts.slowest)
    found = []
    for failure in counts.failures:
        file = FOLDER / f"{name}-{blake2b(failure.data, digest_size=6).hexdigest()}"
        file.write_bytes(failure.data)
        replay = f'make campaign ARGS="--replay {shlex.quote(str(file.relative_to(ROOT)))}"'
        found.append(f"{name}, {failure.kind}: {failure.message}\n    {replay}")
    return found


def replay(file: Path) -> int:
    """Check one input in this process."""
    target = TARGETS[file.name.rpartition("-")[0]]()
    counts = Counts()
    with target:
        check(target, file.read_bytes(), counts)
    print(*counts.outcomes, f"in {counts.worst_s * 1e3:.1f} ms of CPU time")
    for failure in counts.failures:
        print(failure.message)
    return len(counts.failures)


def main() -> int:
    parser = argparse.ArgumentParser(prog="campaign", description="Check hostile inputs and print one table.")
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"default: all of {' '.join(TARGETS)}")
    parser.add_argument("--seconds", type=float, default=float(os.environ.get("CAMPAIGN_SECONDS", "7200")))
    parser.add_argument("--count", type=int, default=0, help="inputs of each target, 0: as many as there is time for")
    parser.add_argument("--seed", default=time.strftime("%Y%m%d"), help="default: the day")
    parser.add_argument("--lanes", type=int, default=os.cpu_count() or 1, help="targets at a time")
    parser.add_argument("--keep", action="store_true", help="add new outcomes to the committed corpus")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="check one input that failed")
    options = parser.parse_args()
    if options.replay is not None:
        return min(replay(options.replay), 1)
    names = options.targets or list(TARGETS)
    if unknown := set(names) - set(TARGETS):
        parser.error(f"unknown: {' '.join(sorted(unknown))}; known: {' '.join(TARGETS)}")
    absent = {name: reason for name in names if (reason := TARGETS[name].missing())}
    names = [name for name in names if name not in absent]
    if not names:
        parser.error("; ".join(f"{name}: not run: {reason}" for name, reason in absent.items()))
    beside = [name for name in names if TARGETS[name].whole_run]
    names = [*beside, *(name for name in names if name not in beside)]
    sharing = len(names) - len(beside)
    lanes = min(options.lanes, sharing)
    seconds = {name: options.seconds if name in beside else options.seconds * lanes / sharing for name in names}
    tasks = [Task(name, options.seed, seconds[name], options.count, FOLDER / "runs" / name) for name in names]
    with ThreadPoolExecutor(len(beside) + lanes) as pool:
        runs = pool.map(lambda task: supervise(task, TARGETS[task.target].limit_s), tasks)
        results = dict(zip(names, runs, strict=True))
    known = corpus.load()
    failures = []
    for name, counts in results.items():
        failures += write_failures(name, counts)
        if TARGETS[name].short:
            corpus.merge(known, name, counts.shortest)
    if options.keep:
        corpus.write(known)
    print("\n\n".join(failures))
    print(table(results, options.seed))
    for name, reason in absent.items():
        print(f"{name}: not run: {reason}")
    for name in names:
        if left_out := TARGETS[name].left_out():
            print(f"{name}: {left_out}")
    print("\n".join(problems(results)))
    return 1 if failures or problems(results) else 0


if __name__ == "__main__":
    sys.exit(main())
