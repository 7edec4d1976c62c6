"""What a request costs the process of a router: system calls, and CPU time over that of the engine that answers it."""

import re
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import psutil

from bench.command_child import Child
from bench.feed.fake_sidecars import FRONTEND, Curve, FeedEnds, address
from bench.feed.sidecar_ingest import cpu_of
from bench.quick.verdicts import Figure
from bench.serving.router_processes import Ours, Process

ENGINE_PORT: Final = 8000
TRACED: Final = address(901)
ROUNDS: Final = 4
PLAIN: Final = 300
CONNECTIONS, STREAMS, PAUSE_MS = 16, 2, 10
FEW: Final = 4
"""Connections under a tracer, which is slow: every token is to come alone."""
CALLS: Final = {"plain answer": "system calls: plain answer", "token": "system calls: token of a paced stream"}
TIMES: Final = {
    "plain answer": "time: plain answer through the router, over the bench's engine",
    "token": "time: token of a paced stream through the router, over the bench's engine",
}
ACROSS_PROCESSES: Final = 1.5
"""Allowed factor of times of two processes: one computes more, the other one calls the kernel more, and what a kernel
takes differs between machines. Counts are in the other figures."""
_LINE: Final = re.compile(r"^\d+ +(\d+\.\d+) (\w+)\(")


def measure() -> list[Figure]:
    """Return all figures of routers with policy kv."""
    curve = Curve.fresh()
    with ExitStack() as stack:
        command = [sys.executable, "-m", "bench.serving.plain_engine", address(0), str(ENGINE_PORT)]
        engine = stack.enter_context(Process("engine", command, address(0), ENGINE_PORT))
        engine.wait()
        stack.enter_context(FeedEnds(1, curve))
        router = stack.enter_context(Ours(FRONTEND, [address(0)], curve, policy="kv"))
        load = stack.enter_context(Child("load generator", [sys.executable, "-m", "bench.serving.load_client"]))
        router.wait()
        return [*times(load, router, engine), *system_calls(load, curve)]


def times(load: Child, router: Process, engine: Process) -> list[Figure]:
    """Return CPU time over the engine's own, both as they were in one run, the least of rounds."""
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


def system_calls(load: Child, curve: Curve) -> list[Figure]:
    """Return system calls of all threads, from a router that runs under strace."""
    if shutil.which("strace") is None:
        return [Figure(name, None, "", why="strace is not installed") for name in CALLS.values()]
    with tempfile.TemporaryDirectory(prefix="mmrouter-bench-") as folder:
        log = Path(folder) / "strace"
        under = ["strace", "-f", "-ttt", "-s", "0", "-o", str(log)]
        with Ours(TRACED, [address(0)], curve, policy="kv", under=under) as router:
            router.wait()
            load.call("plain", host=router.host, port=router.port, count=PLAIN // 4)  # connections and caches
            began = time.time()
            load.call("plain", host=router.host, port=router.port, count=PLAIN)
            middle = time.time()
            shape = {"connections": FEW, "count": STREAMS, "pause_ms": 4 * PAUSE_MS}
            tokens = load.call("streams", host=router.host, port=router.port, **shape)["tokens"]
            ended = time.time()
        text = log.read_text(errors="replace").splitlines()
    return [
        Figure(CALLS["plain answer"], between(text, began, middle) / PLAIN, "per request"),
        Figure(CALLS["token"], between(text, middle, ended) / tokens, "per token"),
    ]


def between(lines: Sequence[str], began: float, ended: float) -> int:
    """Return the system calls that began in a time, as ``strace -f -ttt`` tells them."""
    found = (_LINE.match(line) for line in lines)
    return sum(1 for call in found if call and began <= float(call[1]) < ended)


def _spent(load: Child, router: Process, engine: Process, do: str, **shape: int) -> tuple[float, float]:
    """Return CPU seconds of the router and of the engine, asked through it."""
    processes = [psutil.Process(target.pid) for target in (router, engine)]
    before = [cpu_of(process) for process in processes]
    load.call(do, host=router.host, port=router.port, **shape)
    own, floor = (cpu_of(process) - start for process, start in zip(processes, before, strict=True))
    return own, floor
