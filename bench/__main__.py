"""``python -m bench``: run benchmarks and print their rows. Exit status 0 whether goals are met or not."""

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
from bench.cluster import policy_comparison, weight_sweep
from bench.peers.peer_installation import MODE, MODES

BENCHMARKS = {
    "cluster": "cluster.policy_comparison",
    "connections": "serving.many_connections",
    "decision": "placing.decision_time",
    "encoders": "encoders.split_comparison",
    "handover": "handover.shared_memory",
    "ingest": "feed.router_ingest",
    "media": "handover.image_files",
    "memory": "feed.index_memory",
    "prompt": "placing.tokenization",
    "proxy": "serving.proxy_overhead",
    "replicas": "serving.router_replicas",
    "requests": "serving.large_requests",
    "restart": "feed.router_restart",
    "routing": "placing.request_path",
    "tracing": "serving.tracing_overhead",
}
"""Name on the command line -> the module below ``bench`` whose ``run()`` returns the rows."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the named benchmarks (default: all); return the exit status.

    A benchmark that raises has no figures. With ``--write`` the others still run; without it the error propagates.
    """
    parser = argparse.ArgumentParser(prog="python -m bench", description="Measure the router against peers and floors.")
    parser.add_argument("names", nargs="*", metavar="name", help=f"which: {', '.join(BENCHMARKS)} (default: all)")
    parser.add_argument("--json", action="store_true", help='print {"rows": [...]}')
    parser.add_argument(
        "--write", action="store_true", help=f"write the figures of each benchmark into {report.PAGE.name} as it ends"
    )
    parser.add_argument("--quick", action="store_true", help="cluster: skip the largest cluster")
    parser.add_argument("--sweep", action="store_true", help="cluster: compare other weights of the scorer")
    parser.add_argument("--traces", type=Path, help="cluster: folder of traces (default: $MMROUTER_TRACES)")
    parser.add_argument("--peers", choices=MODES, help=f"other routers (default: ${MODE}, else install)")
    options = parser.parse_args(argv)
    names = options.names or list(BENCHMARKS)
    if unknown := sorted(set(names) - set(BENCHMARKS)):
        parser.error(f"no benchmark is named {', '.join(unknown)}; there are {', '.join(BENCHMARKS)}")
    if (options.quick or options.sweep) and (options.write or "cluster" not in names):
        parser.error("--quick and --sweep apply to the benchmark cluster and exclude --write")
    if options.peers:
        os.environ[MODE] = options.peers
    machine = report.machine()
    measured: list[rows.Row] = []
    failed: list[str] = []
    for name in names:
        began, machine_before = time.monotonic(), report.machine()
        sys.stderr.write(f"bench: {name} ...\n")
        try:
            part = run_benchmark(name, options)
        except Exception:
            if not options.write:
                raise
            # The other benchmarks take hours: keep them, and leave this one's earlier figures on the page.
            sys.stderr.write(f"bench: {name} failed\n{traceback.format_exc()}")
            failed.append(name)
            continue
        sys.stderr.write(f"bench: {name} took {time.monotonic() - began:.0f} s\n")
        measured += part
        if options.write:
            report.write(name, part, f"{machine_before[:-1]}; {time.monotonic() - began:.0f} s.")
    if options.json:
        sys.stdout.write(rows.to_json(measured) + "\n")
    else:
        console = Console(width=None if sys.stdout.isatty() else 160)
        console.print(rows.table(measured))
        console.print(machine, style="dim")
    if failed:
        sys.stderr.write(f"bench: failed: {', '.join(failed)}\n")
    return 1 if failed else 0


def run_benchmark(name: str, options: argparse.Namespace) -> list[rows.Row]:
    if name == "cluster":
        if options.sweep:
            return weight_sweep.sweep(options.traces)
        return policy_comparison.run(quick=options.quick, traces=options.traces)
    measured: list[rows.Row] = importlib.import_module(f"bench.{BENCHMARKS[name]}").run()
    return measured


if __name__ == "__main__":
    sys.exit(main())
