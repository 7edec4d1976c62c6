"""Measurements of a scenario: time over its floor's, calls, memory, kept blocks, and instructions by callgrind."""

import gc
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from bench.quick.scenarios import Scenario
from bench.quick.verdicts import Figure

ROUNDS: Final = 7
KEPT_AFTER: Final = 20
"""Repetitions before and within the count of allocated blocks."""
BLOCKS_SLACK: Final = 8.0
LIMIT_SECONDS: Final = 150.0


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
    """Return the number of function calls, Python's and C's."""
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
    """Return the peak of allocated memory."""
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
    """Return the allocated blocks that a repetition leaves behind once caches are warm."""
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
        command += [sys.executable, "-m", "bench.quick.callgrind_child"]
        # Fixed hashes, and so fixed collisions, in every run.
        environment = {**os.environ, "PYTHONHASHSEED": "0"}
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            return [Figure(name, None, "x", why=f"callgrind took more than {LIMIT_SECONDS:g} s") for name in names]
        if done.returncode:
            words = " ".join(done.stderr.split())[-200:]
            return [Figure(name, None, "x", why=f"callgrind ended with {done.returncode}: {words}") for name in names]
        counted = [totals(out.with_name(f"out.{number + 1}").read_text()) for number in range(1 + 2 * len(names))]
    empty, *pairs = counted
    return [
        Figure(name, (own - empty) / (floor - empty), "x")
        for name, own, floor in zip(names, pairs[::2], pairs[1::2], strict=True)
    ]


def totals(dump: str) -> int:
    """Return the instruction count of a callgrind dump."""
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
