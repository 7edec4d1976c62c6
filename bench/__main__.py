"""``python -m bench``: run benchmarks and show their rows. Exit status 0 whether goals are met or not."""

import argparse
import importlib
import os
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from bench import report, rows
from bench.cluster import cluster
from bench.cluster import weight_sweep as clustersweep
from bench.peers.environment import MODE, MODES

NAMES = (
    *("cluster", "connections", "decision", "encoders", "handover", "ingest", "media", "memory", "prompt", "proxy"),
    *("replicas", "requests", "restart", "routing", "tracing"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run what the command line names (default: everything); return the exit status.

    Errors are raised, because a figure that is wrong is none; with ``--write`` the other parts are run all the same.
    """
    parser = argparse.ArgumentParser(prog="python -m bench", description="Measure the router against peers and floors.")
    parser.add_argument("names", nargs="*", metavar="name", help=f"which: {', '.join(NAMES)} (default: all)")
    parser.add_argument("--json", action="store_true", help='print {"rows": [...]}')
    parser.add_argument(
        "--write", action="store_true", help=f"put the figures of each part into {report.PAGE.name} when it has ended"
    )
    parser.add_argument("--quick", action="store_true", help="cluster: not the largest one")
    parser.add_argument("--sweep", action="store_true", help="cluster: what other weights of the scorer would give")
    parser.add_argument("--traces", type=Path, help="cluster: folder of traces (default: $MMROUTER_TRACES)")
    parser.add_argument("--peers", choices=MODES, help=f"other routers (default: ${MODE}, else install)")
    options = parser.parse_args(argv)
    names = options.names or list(NAMES)
    unknown = sorted(set(names) - set(NAMES))
    if unknown:
        parser.error(f"no benchmark is named {', '.join(unknown)}; there are {', '.join(NAMES)}")
    if (options.quick or options.sweep) and (options.write or "cluster" not in names):
        parser.error("--quick and --sweep are of the benchmark cluster, and not for --write")
    if options.peers:
        os.environ[MODE] = options.peers
    machine = report.machine()
    found: list[rows.Row] = []
    failed: list[str] = []
    for name in names:
        began, before = time.monotonic(), report.machine()
        sys.stderr.write(f"bench: {name} ...\n")
        try:
            part = _run(name, options)
        except Exception:  # whatever it is: the other parts are measured all the same, and the exit status tells
            if not options.write:
                raise
            # Hours of other parts are not to be lost with it; its figures on the page stay those of before.
            sys.stderr.write(f"bench: {name} failed\n{traceback.format_exc()}")
            failed.append(name)
            continue
        sys.stderr.write(f"bench: {name} took {time.monotonic() - began:.0f} s\n")
        found += part
        if options.write:
            report.write(name, part, f"{before[:-1]}; {time.monotonic() - began:.0f} s.")
    if options.json:
        sys.stdout.write(rows.to_json(found) + "\n")
    else:
        console = Console(width=None if sys.stdout.isatty() else 160)
        console.print(rows.table(found))
        console.print(machine, style="dim")
    if failed:
        sys.stderr.write(f"bench: failed: {', '.join(failed)}\n")
    return 1 if failed else 0


def _run(name: str, options: argparse.Namespace) -> list[rows.Row]:
    """Return the rows of one part. Raises whatever went wrong in it."""
    if name == "cluster":
        if options.sweep:
            return clustersweep.swept(options.traces)
        return cluster.run(quick=options.quick, traces=options.traces)
    found: list[rows.Row] = importlib.import_module(f"bench.{name}").run()
    return found


if __name__ == "__main__":
    sys.exit(main())
