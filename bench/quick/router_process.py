"""Cost of a request in a router process: system calls, and CPU time over that of the engine that answers it."""

import re
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import psutil

from bench.feed.fake_sidecars import address
from bench.feed.sidecar_ingest import cpu_of
from bench.measured_process import Child
from bench.quick.verdicts import Figure
from bench.serving.router_processes import Process, ServingRig

TRACED: Final = address(901)
ROUNDS: Final = 4
PLAIN: Final = 300
CONNECTIONS, STREAMS, PAUSE_MS = 16, 2, 10
FEW: Final = 4
"""Connections under the slow tracer: few, so that tokens arrive one at a time."""
CALLS: Final = {"plain answer": "system calls: plain answer", "token": "system calls: token of a paced stream"}
TIMES: Final = {
    "plain answer": "time: plain answer through the router, over the bench's engine",
    "token": "time: token of a paced stream through the router, over the bench's engine",
}
ACROSS_PROCESSES: Final = 1.5
"""Allowed factor for times of two processes: one computes more and the other calls the kernel more, whose cost differs
between machines."""
_LINE: Final = re.compile(r"^\d+ +(\d+\.\d+) (\w+)\(")


def measure() -> list[Figure]:
    """Return all figures of a router with policy kv."""
    with ServingRig() as rig:
        router = rig.start(rig.ours(policy="kv"))
        load = rig.load_generator()
        return [*times(load, router, rig.engine), *system_calls(load, rig)]


def times(load: Child, router: Process, engine: Process) -> list[Figure]:
    """Return CPU time over the engine's, both of one run; the least of rounds."""
    plain, token = [], []
    for _ in range(ROUNDS):
        own, floor = _spent(load, router, engine, "plain", count=PLAIN)
        plain.append(own / floor)
        shape = {"connections": CONNECTIONS, "count": STREAMS, "pause_ms": PAUSE_MS}
        own, floor = _spent(load, router, engine, "streams", **shape)
        token.append(own / floor)
    return [
        Figure(TIMES["plain answer"], min(plain), "x", allowed=ACROSS_PROCESSES, noisy=True),
        Figure(TIMES["token"], min(token), "x", allowed=ACROSS_PROCESSES, noisy=True),
    ]


def system_calls(load: Child, rig: ServingRig) -> list[Figure]:
    """Return system calls of all threads of a router that runs under strace."""
    if shutil.which("strace") is None:
        return [Figure(name, None, "", why="strace is not installed") for name in CALLS.values()]
    with tempfile.TemporaryDirectory(prefix="mmrouter-bench-") as folder:
        log = Path(folder) / "strace"
        under = ["strace", "-f", "-ttt", "-s", "0", "-o", str(log)]
        with rig.ours(TRACED, policy="kv", under=under) as router:
            router.wait()
            load.call("plain", **router.address, count=PLAIN // 4)  # warm up
            began = time.time()
            load.call("plain", **router.address, count=PLAIN)
            middle = time.time()
            shape = {"connections": FEW, "count": STREAMS, "pause_ms": 4 * PAUSE_MS}
            tokens = load.call("streams", **router.address, **shape)["tokens"]
            ended = time.time()
        text = log.read_text(errors="replace").splitlines()
    return [
        Figure(CALLS["plain answer"], between(text, began, middle) / PLAIN, "per request"),
        Figure(CALLS["token"], between(text, middle, ended) / tokens, "per token"),
    ]


def between(lines: Sequence[str], began: float, ended: float) -> int:
    """Return the number of system calls that began within a period, from the log of ``strace -f -ttt``."""
    calls = (_LINE.match(line) for line in lines)
    return sum(1 for call in calls if call and began <= float(call[1]) < ended)


def _spent(load: Child, router: Process, engine: Process, do: str, **shape: int) -> tuple[float, float]:
    """Return the CPU seconds of the router and of the engine for requests through the router."""
    processes = [psutil.Process(target.pid) for target in (router, engine)]
    before = [cpu_of(process) for process in processes]
    load.call(do, **router.address, **shape)
    own, floor = (cpu_of(process) - start for process, start in zip(processes, before, strict=True))
    return own, floor
