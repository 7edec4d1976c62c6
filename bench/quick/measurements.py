"""Measurements of scenarios (time over the floor's, calls, memory, kept blocks, instructions) and of a router process.

Of a router process: system calls of a request, and CPU time over that of the engine that answers it. Run as a program,
it is the child that callgrind counts.
"""

import gc
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from bench.child_process import Child
from bench.feed.fake_sidecars import address
from bench.quick.scenarios import Scenario, scenarios
from bench.quick.verdicts import Figure
from bench.serving.router_processes import Server, ServingRig

ROUNDS: Final = 7
KEPT_AFTER: Final = 20
"""Repetitions before and within the count of allocated blocks."""
BLOCKS_SLACK: Final = 8.0
LIMIT_SECONDS: Final = 150.0
EMPTY: Final = 4
"""Counts of an empty function, of which the last is subtracted: the first uses of callgrind's control cost up to
100,000 instructions more, a third of the least floor."""
TRACED: Final = address(901)
ROUTER_ROUNDS: Final = 4
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


def times(scenarios: Iterable[Scenario], rounds: int = ROUNDS) -> list[Figure]:
    """Return CPU time over the floor's: the least of alternating rounds."""
    figures = []
    for scenario in scenarios:
        own, floor = [], []
        scenario.once(scenario.fresh())
        for _ in range(rounds):
            own.append(_timed(scenario.once, scenario.fresh()))
            floor.append(_timed(scenario.floor, scenario.fresh()))
        name = f"time: {scenario.name}, over {scenario.against}"
        figures.append(Figure(name, min(own) / min(floor), "x", noisy=True))
    return figures


def calls(scenarios: Iterable[Scenario]) -> list[Figure]:
    figures = []
    for scenario in scenarios:
        scenario.once(scenario.fresh())
        state, number = scenario.fresh(), 0

        def count_call(frame: object, event: str, argument: object) -> None:
            nonlocal number
            number += event in ("call", "c_call")

        sys.setprofile(count_call)
        try:
            scenario.once(state)
        finally:
            sys.setprofile(None)
        figures.append(Figure(f"calls: {scenario.name}", number / scenario.units, f"per {scenario.unit}", slack=1.0))
    return figures


def memory(scenarios: Iterable[Scenario]) -> list[Figure]:
    figures = []
    for scenario in scenarios:
        scenario.once(scenario.fresh())
        state = scenario.fresh()
        gc.collect()
        tracemalloc.start()
        try:
            scenario.once(state)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        figures.append(Figure(f"memory: {scenario.name}", peak / 1024, "KiB at the most", slack=1.0))
    return figures


def kept(scenario: Scenario) -> Figure:
    state = scenario.fresh()

    def repeat() -> int:
        for _ in range(KEPT_AFTER):
            scenario.once(state)
        gc.collect()
        return sys.getallocatedblocks()

    before = repeat()
    more = (repeat() - before) / KEPT_AFTER
    return Figure(f"kept: {scenario.name}", max(0.0, more), f"blocks per {scenario.unit}", slack=BLOCKS_SLACK)


def instructions(scenarios: Sequence[Scenario]) -> list[Figure]:
    """Return instructions over the floor's by callgrind, from a process of its own."""
    names = [f"instructions: {scenario.name}, over {scenario.against}" for scenario in scenarios]
    if shutil.which("valgrind") is None or shutil.which("callgrind_control") is None:
        return [Figure(name, None, "x", why="valgrind is not installed") for name in names]
    with tempfile.TemporaryDirectory(prefix="mmrouter-bench-") as folder:
        out = Path(folder) / "out"
        command = ["valgrind", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={out}"]
        command += [sys.executable, "-m", "bench.quick.measurements"]
        # Fixed hashes, and so fixed collisions, in every run.
        environment = {**os.environ, "PYTHONHASHSEED": "0"}
        try:
            run_child(command, environment, LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            return [Figure(name, None, "x", why=f"callgrind took more than {LIMIT_SECONDS:g} s") for name in names]
        except subprocess.CalledProcessError as error:
            words = " ".join(error.stderr.split())[-200:]
            return [Figure(name, None, "x", why=f"callgrind ended with {error.returncode}: {words}") for name in names]
        counted = [totals(out.with_name(f"out.{number + 1}").read_text()) for number in range(EMPTY + 2 * len(names))]
    empty, *pairs = counted[EMPTY - 1 :]
    return [
        Figure(name, (own - empty) / (floor - empty), "x")
        for name, own, floor in zip(names, pairs[::2], pairs[1::2], strict=True)
    ]


def run_child(command: Sequence[str], environment: dict[str, str], limit_s: float) -> None:
    """Run a command and the processes that it starts, for ``limit_s`` seconds at most.

    At the limit all of them are killed: callgrind_control traces the command, and a wait for a killed process does not
    end before that of its tracer. Raises ``TimeoutExpired`` and ``CalledProcessError``, with what the command wrote to
    standard error.
    """
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as child:
        try:
            _, errors = child.communicate(timeout=limit_s)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):  # an interrupt does not reach the session of the child
            os.killpg(child.pid, signal.SIGKILL)
            raise
    if child.returncode:
        raise subprocess.CalledProcessError(child.returncode, command, stderr=errors)


def totals(dump: str) -> int:
    (line,) = (line for line in dump.splitlines() if line.startswith("totals:"))
    return int(line.split()[1])


def _timed(work: Callable[[Any], object], state: Any) -> float:
    gc.collect()
    gc.disable()
    try:
        began = time.thread_time_ns()
        work(state)
        return (time.thread_time_ns() - began) / 1e9
    finally:
        gc.enable()


def router() -> list[Figure]:
    with ServingRig() as rig:
        process = rig.start(rig.ours(policy="kv"))
        load = rig.load_generator()
        return [*router_times(load, process, rig.engine), *system_calls(load, rig)]


def router_times(load: Child, router: Server, engine: Server) -> list[Figure]:
    """Return CPU time over the engine's, both of one run; the least of rounds."""
    plain, token = [], []
    for _ in range(ROUTER_ROUNDS):
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


def _spent(load: Child, router: Server, engine: Server, do: str, **shape: int) -> tuple[float, float]:
    """Return the CPU seconds of the router and of the engine for requests through the router."""
    before = router.thread_cpu(), engine.thread_cpu()
    load.call(do, **router.address, **shape)
    return router.thread_cpu() - before[0], engine.thread_cpu() - before[1]


def _control(*options: str) -> None:
    """Control callgrind on this process. Raises ``CalledProcessError``."""
    subprocess.run(
        ["callgrind_control", *options, str(os.getpid())],
        check=True,
        stdout=subprocess.DEVNULL,
        stdin=subprocess.DEVNULL,
    )


def run_under_callgrind() -> None:
    """Run an empty function, then each scenario and its floor: to warm up, then counted, with a dump after each."""
    with scenarios() as pieces:
        works: list[tuple[Callable[[Any], object], Callable[[], Any]]] = [(lambda _: None, lambda: None)] * EMPTY
        works += [(work, scenario.fresh) for scenario in pieces for work in (scenario.once, scenario.floor)]
        gc.collect()
        gc.disable()
        for work, fresh in works:
            work(fresh())
            state = fresh()
            _control("-i", "on")
            work(state)
            _control("-i", "off")
            _control("-d")


if __name__ == "__main__":
    run_under_callgrind()
