"""Run test levels of the repository, in parallel lanes, and summarize what ran.

    .venv/bin/python -m hack.run_levels check [local] [cluster] [e2e] [conformance] [bench-quick]

A level is a list of steps, each one command. A failing step does not stop the others, so that one run shows everything.
The steps run in lanes, as far as memory allows, those of several levels together; the output of each is shown when it
ends, of a step before the others of its level as it comes. The run ends with the slowest tests, the failures once more,
shortened, a table of the levels with the reason of everything that was not run, and one line ``N passed, N failed, N
skipped`` over all.

A level is "not run" when tests of it were skipped and none passed that needs what the level is about: a cluster, a real
engine (``tests/artefacts.py`` marks these tests). Exit status 1 when anything failed, 3 when a single level was
requested and was not run; beside other levels it is listed with its reasons and is no failure.

``passed`` and ``skipped`` count tests. ``failed`` counts tests and commands that failed without a failing test (a
linter, a crash, a time limit), so that a red run never ends with ``0 failed``.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import IO

import psutil

from hack.levels import LEVELS, TOGETHER, Level, Step
from hack.outcomes import Outcome, add_report, shortened_failures, slowest, summary

ROOT = Path(__file__).resolve().parents[1]
NO_TESTS = 5  # pytest's exit status
NOT_RUN = 3
RUNNING: set["subprocess.Popen[bytes]"] = set()
CANCELLED = threading.Event()
POLL_SECONDS = 0.05
BEHIND = 5  # the niceness of a level that gives way to another: a third of its share of a CPU
MOST_LANES = 3
"""Steps of several levels at the same time, for two CPUs. Five take both CPUs whole and no less time: engines and
control planes poll while they wait, and so cost more the longer they run beside others."""


ORDER = ("before", "beside", "after")


class Queue:
    """Steps by level that wait for their turn. The first one starts whose level has a free lane and that finds memory.
    A step before or after the others of its level runs alone in it, beside steps of other levels.

    ``available`` is the machine's memory in GB, of which a step takes its level's ``lane_gb`` until it ends.
    """

    def __init__(self, levels: Mapping[str, Level], steps: Iterable[tuple[str, Step]], available: float) -> None:
        self._levels, self._waiting, self._available = levels, list(steps), available
        self._running: Counter[str] = Counter()
        self._alone: set[str] = set()  # levels whose running step runs alone
        self._changed = threading.Condition()

    def take(self) -> tuple[str, Step] | None:
        """Wait for a step that may start, and return it with its level's name; ``None`` where no step is left."""
        with self._changed:
            while self._waiting:
                if (pair := next((pair for pair in self._waiting if self._fits(*pair)), None)) is not None:
                    self._waiting.remove(pair)
                    self._running[pair[0]] += 1
                    if pair[1].when != "beside":
                        self._alone.add(pair[0])
                    return pair
                self._changed.wait()
        return None

    def ended(self, name: str) -> None:
        """Free what a step of this level took."""
        with self._changed:
            self._running[name] -= 1
            self._alone.discard(name)
            self._changed.notify_all()

    def _fits(self, name: str, step: Step) -> bool:
        earlier = ORDER[: ORDER.index(step.when)]
        if any(level == name and other.when in earlier for level, other in self._waiting):
            return False
        if name in self._alone or (self._running[name] and step.when != "beside"):
            return False
        taken = sum(self._levels[each].lane_gb * count for each, count in self._running.items())
        fits = not taken or taken + self._levels[name].lane_gb <= self._available
        return fits and self._running[name] < self._levels[name].lanes


def run_together(levels: Mapping[str, Level], scratch: Path) -> dict[str, Outcome]:
    """Run levels at the same time and return their outcomes. The steps start in the order of the levels.

    Where CPUs are short, those of the first level go before the others: it builds for minutes, one step after another,
    before its tests can start.
    """
    outcomes = {name: Outcome() for name in levels}
    adding = threading.Lock()
    began, available = time.monotonic(), psutil.virtual_memory().available / 1e9
    first = next(iter(levels))
    lanes = levels[first].lanes if len(levels) == 1 else MOST_LANES
    queue = Queue(levels, ((name, step) for name, level in levels.items() for step in level.steps), available)

    def work() -> None:
        while (pair := queue.take()) is not None:
            name, step = pair
            try:
                live, nice = lanes == 1 or step.when == "before", 0 if name == first else BEHIND
                part = run_step(levels[name], scratch, step, live=live, nice=nice)
                with adding:
                    outcomes[name].add(part)
                    outcomes[name].seconds = time.monotonic() - began
            finally:
                queue.ended(name)

    with ThreadPoolExecutor(lanes) as pool:
        try:
            for lane in [pool.submit(work) for _ in range(lanes)]:
                lane.result()
        except KeyboardInterrupt:
            end_all()
            raise
    return outcomes


def run_step(level: Level, scratch: Path, step: Step, *, live: bool, nice: int = 0) -> Outcome:
    """Run one command and count its results. A pytest that writes no report is a failure. ``live`` shows the output as
    it comes; ``nice`` is added to the niceness of the command's processes.
    """
    outcome = Outcome()
    if CANCELLED.is_set():
        return outcome
    began = time.monotonic()
    name = step.name.replace("/", "-").replace(" ", "-")
    report = scratch / f"{name}.xml"
    command = step.command
    if step.paths:
        left_out = tuple(f"--ignore={folder}" for folder in step.without)
        command = (sys.executable, "-m", "pytest", *step.paths, *left_out, "-q", f"--junit-xml={report}")
    env = {**os.environ, "MMROUTER_RUN_FOLDER": str(scratch)}
    env.pop("PYTHONDONTWRITEBYTECODE", None)  # without bytecode, each of a thousand processes compiles the product
    if live:
        print(f"\n== {step.name}", flush=True)
        status, _ = execute(command, level.limit_s, None, env, nice)
    else:
        with (scratch / f"{name}.out").open("w+b") as out:
            status, cpu_s = execute(command, level.limit_s, out, env, nice)
            out.seek(0)
            shown = out.read().decode(errors="replace").strip()
        took = f"{time.monotonic() - began:.1f} s, {cpu_s:.0f} s of CPU"
        print(f"\n== {step.name}, {took}\n{shown}", flush=True)
    if report.is_file():
        add_report(report, outcome)
    if status and not outcome.failed:
        outcome.failed = 1
        why = f"no test was found in {' '.join(step.paths)}" if step.paths and status == NO_TESTS else ending(status)
        outcome.failures.append(f"{step.name}: {why}")
    return outcome


def execute(
    command: tuple[str, ...], limit_s: float, out: IO[bytes] | None, env: dict[str, str], nice: int
) -> tuple[int, float]:
    """Return the exit status of a command, and the CPU seconds of it and of the processes that it waited for. Its whole
    process group is ended when it outlives the limit.
    """
    stderr = None if out is None else subprocess.STDOUT
    process = subprocess.Popen(command, cwd=ROOT, env=env, start_new_session=True, stdout=out, stderr=stderr)
    if nice:
        with suppress(ProcessLookupError):
            os.setpriority(os.PRIO_PROCESS, process.pid, os.getpriority(os.PRIO_PROCESS, 0) + nice)
    RUNNING.add(process)
    if CANCELLED.is_set():  # the run was cancelled while this one started
        end(process)
    try:
        cpu_s = wait_unreaped(process.pid, limit_s)
        return process.wait(0), cpu_s
    except subprocess.TimeoutExpired:
        print(f"ended after {limit_s:.0f} s: {' '.join(command)}", flush=True)
        end(process)
        return -signal.SIGKILL, 0.0
    finally:
        RUNNING.discard(process)


def wait_unreaped(pid: int, limit_s: float) -> float:
    """Wait until a child has ended, and return its CPU seconds, which the kernel forgets once it is reaped."""
    deadline = time.monotonic() + limit_s
    with suppress(ChildProcessError, psutil.NoSuchProcess):  # reaped by :func:`end`
        while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
            if time.monotonic() > deadline:
                break
            time.sleep(POLL_SECONDS)
        times = psutil.Process(pid).cpu_times()
        return float(times.user + times.system + times.children_user + times.children_system)
    return 0.0


def end_all() -> None:
    """End every running command, so that no process of a test outlives the run."""
    CANCELLED.set()
    for process in list(RUNNING):
        end(process)


def end(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        # As ctrl-C, so that pytest tears down its fixtures and the engines that they started.
        os.killpg(process.pid, signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def ending(status: int) -> str:
    return f"ended by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"


def main() -> int:
    parser = argparse.ArgumentParser(description="Run test levels and summarize them.")
    parser.add_argument("levels", nargs="+", choices=list(LEVELS))
    outcomes: dict[str, Outcome] = {}
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a cancelled run cleans up as an interrupted one does
    # A shell starts background commands with SIGINT ignored; children would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with tempfile.TemporaryDirectory(prefix="mmrouter-levels-") as scratch:
            names = list(dict.fromkeys(parser.parse_args().levels))
            while names:
                group = [name for name in TOGETHER if name in names] if names[0] in TOGETHER else names[:1]
                outcomes |= run_together({name: LEVELS[name] for name in group}, Path(scratch))
                names = [name for name in names if name not in outcomes]
    except KeyboardInterrupt:
        print("\ninterrupted", flush=True)
        return 130
    print(f"\n{slowest(outcomes)}", flush=True)
    if again := shortened_failures(outcomes):
        print(f"\n{again}", flush=True)
    print(f"\n{summary(outcomes)}", flush=True)
    return exit_status(outcomes)


def exit_status(outcomes: dict[str, Outcome]) -> int:
    """Return the exit status of a run; print a line where the only requested level was not run."""
    if any(outcome.failed for outcome in outcomes.values()):
        return 1
    if [outcome.verdict for outcome in outcomes.values()] == ["not run"]:
        print(f"{next(iter(outcomes))} was requested and was NOT RUN: see the reasons above", file=sys.stderr)
        return NOT_RUN
    return 0


if __name__ == "__main__":
    sys.exit(main())
