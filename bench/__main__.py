"""``python -m bench``: run benchmarks and print their rows. Exit status 0 whether goals are met or not."""

import argparse
import os
import pkgutil
import sys
import time
import traceback
from collections.abc import Sequence

from rich.console import Console

from bench import plots, report
from bench.peer_routers import MODE, MODES

BENCHMARKS = {
    "cluster": "cluster.policy_comparison:run",
    "connections": "serving.resource_usage:connections",
    "decision": "placing.decision_time:run",
    "encoders": "encoders.image_spreading:run",
    "fleet": "placing.large_fleet:run",
    "gateway": "serving.gateway_overhead:run",
    "handover": "shm_transfer:run",
    "index": "placing.index_forms:run",
    "ingest": "feed.router_ingest:run",
    "job": "serving.whole_job:run",
    "memory": "feed.router_index:memory",
    "picker": "serving.picker_overhead:run",
    "proxy": "serving.proxy_overhead:run",
    "replicas": "serving.resource_usage:replicas",
    "requests": "serving.proxy_overhead:run_large",
    "restart": "feed.router_index:restart",
    "routing": "placing.request_path:run",
    "scale": "cluster.many_engines:run",
    "stall": "serving.stalls:run",
    "tracing": "serving.tracing_cost:run",
}
"""Name on the command line -> the module below ``bench`` and its function that returns the rows."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the named benchmarks (default: all); return the exit status. A benchmark that raises has no figures. With
    ``--write`` the others still run; without it the error propagates.
    """
    parser = argparse.ArgumentParser(prog="python -m bench", description="Measure the router against peers and floors.")
    parser.add_argument("names", nargs="*", metavar="name", help=f"which: {', '.join(BENCHMARKS)} (default: all)")
    parser.add_argument("--json", action="store_true", help='print {"rows": [...]}')
    parser.add_argument(
        "--write", action="store_true", help=f"write the figures of each benchmark into {report.PAGE.name} as it ends"
    )
    parser.add_argument("--plots", action="store_true", help=f"only draw that page's figures into {plots.FILE.name}")
    parser.add_argument("--peers", choices=MODES, help=f"other routers (default: ${MODE}, else install)")
    options = parser.parse_args(argv)
    if options.plots:
        plots.FILE.write_text(plots.svg(report.PAGE.read_text()))
        return 0
    names = options.names or list(BENCHMARKS)
    if unknown := sorted(set(names) - set(BENCHMARKS)):
        parser.error(f"no benchmark is named {', '.join(unknown)}; there are {', '.join(BENCHMARKS)}")
    if options.peers:
        os.environ[MODE] = options.peers
    machine = report.machine()
    measured: list[report.Row] = []
    failed: list[str] = []
    for name in names:
        began, machine_before = time.monotonic(), report.machine()
        sys.stderr.write(f"bench: {name} ...\n")
        try:
            part = run_benchmark(name)
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
        sys.stdout.write(report.to_json(measured) + "\n")
    else:
        console = Console(width=None if sys.stdout.isatty() else 160)
        console.print(report.table(measured))
        console.print(machine, style="dim")
    if failed:
        sys.stderr.write(f"bench: failed: {', '.join(failed)}\n")
    return 1 if failed else 0


def run_benchmark(name: str) -> list[report.Row]:
    measured: list[report.Row] = pkgutil.resolve_name(f"bench.{BENCHMARKS[name]}")()
    return measured


if __name__ == "__main__":
    sys.exit(main())
