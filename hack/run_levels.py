"""Run test levels of the repository, in parallel lanes, and summarize what ran.

    .venv/bin/python -m hack.run_levels check [local] [cluster] [e2e] [conformance] [bench-quick]

A level is a list of steps, each one command. A failing step does not stop the others, so that one run shows everything.
The steps run in lanes, as far as memory allows, those of several levels together; the output of each is shown when it
ends. The run ends with the slowest tests, the failures once more, shortened, a table of the levels with the reason of
everything that was not run, and one line ``N passed, N failed, N skipped`` over all.

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
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

import psutil

from hack.outcomes import Outcome, add_report, shortened_failures, slowest, summary

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
NO_TESTS = 5  # pytest's exit status
NOT_RUN = 3
RUNNING: set["subprocess.Popen[bytes]"] = set()
CANCELLED = threading.Event()


@dataclass(frozen=True)
class Step:
    """One command of a level. A step with ``tests`` is a pytest run over these paths, except ``without``.

    ``when``: beside other steps, or alone before or after all of them. ``limit_s`` overrides the level's limit.
    """

    name: str
    command: tuple[str, ...] = ()
    tests: str | tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    when: Literal["before", "beside", "after"] = "beside"
    limit_s: float | None = None

    @property
    def paths(self) -> tuple[str, ...]:
        return (self.tests,) if isinstance(self.tests, str) else self.tests


@dataclass(frozen=True)
class Level:
    steps: tuple[Step, ...]
    limit_s: float  # for each step: a hang is a failure that names the step
    lanes: int = 1  # with one lane the output is shown as it comes
    lane_gb: float = 0.0  # memory that a step needs


def program(name: str, *arguments: str) -> Step:
    return Step(" ".join((name, *arguments[:1])), (str(BIN / name), *arguments))


def module(name: str, *arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-m", name, *arguments)


def files(folder: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{folder}/test_{name}.py" for name in names)


UNIT, ROUTER = "tests/unit", "tests/unit/router"
SMALL = (UNIT, "handover/tests")
LARGE = {
    "router": (ROUTER,),
    "operator and renderer": (f"{UNIT}/operator", f"{UNIT}/render"),
    "cli and sidecar": (f"{UNIT}/cli", f"{UNIT}/sidecar"),
}
"""Unit tests by step. Few steps, because each one imports pytest, hypothesis and the product once more."""
CONNECTIONS = (f"{ROUTER}/media", *files(ROUTER, "server", "control", "pods", "app", "connection"))
"""Tests that mostly wait for connections."""
RELEASES = files(f"{UNIT}/hack", "python_releases")
TOOLS = (f"{UNIT}/bench", f"{UNIT}/hack")
"""Tests of benchmarks and of hack/, which start many processes and are not needed in the inner loop."""
SLOW_UNIT = (
    *("tests/campaign", f"{UNIT}/campaign", f"{UNIT}/cli/test_bench_run.py"),
    *(f"{UNIT}/sim/test_capture.py", f"{UNIT}/prompt/test_captures.py"),
    *files(ROUTER, "hostile_bodies", "tls", "tracing", "unresolved_images", "worker_threads"),
)
"""Unit tests that take seconds each, and are not needed in the inner loop."""
PROCESSES = (
    *files(f"{UNIT}/local", "cluster", "pods"),
    *(f"{UNIT}/{name}/test_process.py" for name in ("kv_events", "router", "sidecar", "sim")),
    *(f"{UNIT}/cli/test_command_line.py", f"{UNIT}/router/test_late_app.py"),
    *("handover/tests/shm/test_soak.py", "handover/tests/plugin/test_start.py"),
)
"""Tests that start interpreters, most of whose time is imports, and are not needed in the inner loop."""
LOCAL = "tests/local"
COMMANDS = files(LOCAL, "commands", "installed")
DISRUPTIVE = files(LOCAL, "broken_routing", "failures", "handover", "renderer", "upgrade")
"""Tests that start and break deployments of their own; most other files share one."""
STAGED = files(LOCAL, "disaggregated", "sglang", "staged_sglang")
SLOW_LOCAL = files(LOCAL, "bad_input", "janitor", "tracing")
SECURE = files(LOCAL, "engine_tls", "key_rotation", "limits", "streams", "tenants", "tls")
CLUSTER = "tests/cluster"
FAULTS, RUNNING_PODS, SCALE, SPEED = files(CLUSTER, "faults", "running", "scale", "speed")
DIAGNOSTICS = files(CLUSTER, "doctor", "plan", "leadership")
VERSIONS = files(CLUSTER, "upgrade", "rights", "operator_rights")
E2E = "tests/e2e"
OWN_NODE = files(E2E, "vllm", "tour", "upgrade", "options", "example")
CHANGING = files(E2E, "rollout", "disaggregated")
"""Deployments that change under load, and pipelines of pods."""
REAL, VLLM, PROCESSORS = "tests/conformance", "tests/conformance/vllm", "tests/conformance/processors"
ROUTED = files(VLLM, "routing", "sliding_window")
FIELDS = files(VLLM, "fields", "renderer", "unknown_families")
DISAGGREGATED = files(VLLM, "encoders", "disaggregated", "leases")
HANDED_OVER = files(VLLM, "handover", "handover_gain", "transfer")
SGLANG_PROMPTS = files(f"{REAL}/sglang", "llava", "prediction", "rendering")
(DEMO,) = files(REAL, "demo")
LONG_FORM = bool(os.environ.get("MMROUTER_FAMILIES"))
HANG_SECONDS = 6 * 3600 if LONG_FORM else 2 * 3600
"""For a step of a large level. A busy machine takes ten times as long as an idle one."""
CELLS = files(REAL, "cells") if LONG_FORM else ()
"""Every setup with each of these families (``tests/conformance/setups.py``); otherwise not collected."""
NATIVE = module("hack.native_wheel", "--optional")
LEVELS = {
    "check": Level(
        (
            # Without Rust only the Python form is tested, and the tests that compare both are skipped.
            Step("compiled form of the library", (*NATIVE, "--install"), when="before"),
            # The longest first, so that all lanes end at about the same time.
            *(
                Step(f"unit tests of {name}", tests=folders, without=(*CONNECTIONS, *SLOW_UNIT, *PROCESSES))
                for name, folders in LARGE.items()
            ),
            Step("unit tests of connections", tests=CONNECTIONS),
            Step(
                "unit tests of other packages",
                tests=SMALL,
                without=(*sum(LARGE.values(), ()), *TOOLS, *SLOW_UNIT, *PROCESSES),
            ),
            program("ruff", "format", "--check", "."),
            program("ruff", "check", "."),
            program("mypy"),
            Step("mypy hack", (str(BIN / "mypy"), "hack")),
            # Engines' interpreters load the hand-over, and some are Python 3.10.
            Step("mypy for Python 3.10", (str(BIN / "mypy"), "--python-version", "3.10", "handover")),
            program("lint-imports"),
            Step("prose, citations and links", module("hack.prose_lint")),
            Step("generated files", module("hack.generate", "--check")),
            Step("licences", module("hack.supply_chain.bill_of_materials", "--check")),
            Step("other Python releases", tests=RELEASES, limit_s=900),  # the first time, they install the lock
        ),
        limit_s=900,
        lanes=4,  # on two CPUs: some tests wait more than they compute
    ),
    "local": Level(
        (
            Step("local deployments, commands of the pages", tests=COMMANDS),
            Step("local deployments", tests=LOCAL, without=(*COMMANDS, *DISRUPTIVE, *STAGED, *SLOW_LOCAL, *SECURE)),
            Step("local deployments, security and streams", tests=SECURE),
            Step("local deployments, disruptive", tests=DISRUPTIVE),
            Step("local deployments, staged", tests=STAGED),
            Step("local deployments, slow", tests=SLOW_LOCAL),
            Step("behind a gateway", tests="tests/gateway"),
            Step("benchmarks and tools", tests=TOOLS, without=RELEASES),
            Step("slow unit tests and the campaign's short form", tests=SLOW_UNIT),
            Step("processes", tests=PROCESSES),
            Step("rustfmt and clippy", (*NATIVE, "--lint")),
        ),
        limit_s=HANG_SECONDS,
        lanes=3,
        lane_gb=1.5,
    ),
    # Each lane has a control plane of its own: many tests wait, for pods and for a minute in which nothing may happen.
    "cluster": Level(
        (
            Step("build the control plane", (sys.executable, "tests/cluster/prepare.py"), when="before", limit_s=2700),
            Step("control plane", tests=CLUSTER, without=(*DIAGNOSTICS, *VERSIONS, FAULTS, RUNNING_PODS, SCALE, SPEED)),
            Step("control plane, faults", tests=FAULTS),
            Step("control plane, diagnostics", tests=DIAGNOSTICS),
            Step("control plane, upgrades and rights", tests=VERSIONS),
            Step("control plane, scale", tests=SCALE),
            Step("control plane, running pods", tests=RUNNING_PODS),
            Step("chart", tests="tests/chart"),
            Step("control plane, speed", tests=SPEED, when="after"),
        ),
        limit_s=HANG_SECONDS,
        lanes=3,
        lane_gb=3,
    ),
    # Each lane has a node of its own. Images and programs are built before, with their own limit; vLLM's environment is
    # built inside a step, in 3 minutes.
    "e2e": Level(
        (
            Step("build images and a node", (sys.executable, "tests/e2e/prepare.py"), when="before", limit_s=2700),
            Step("real pods", tests=E2E, without=(*OWN_NODE, *CHANGING)),
            Step("real pods under change", tests=CHANGING),
            Step("real pods on their own nodes", tests=OWN_NODE),
        ),
        limit_s=HANG_SECONDS,
        lanes=1 if os.environ.get("MMROUTER_KUBECONFIG") else 3,  # an external cluster is shared
        lane_gb=5,
    ),
    # The longest first. The steps collect their comparisons in a shared folder.
    "conformance": Level(
        (
            Step("SGLang", tests=f"{REAL}/sglang", without=SGLANG_PROMPTS),
            Step("SGLang, prompts", tests=SGLANG_PROMPTS),
            Step("vLLM, disaggregated", tests=DISAGGREGATED),
            Step("vLLM, per family", tests=VLLM, without=(*ROUTED, *FIELDS, *DISAGGREGATED, *HANDED_OVER)),
            Step("vLLM, image hand-over", tests=HANDED_OVER),
            Step("vLLM behind routers", tests=ROUTED),
            Step("processors", tests=PROCESSORS),
            Step("without a served model", tests=REAL, without=(VLLM, f"{REAL}/sglang", PROCESSORS, *CELLS, DEMO)),
            Step("vLLM, field by field", tests=FIELDS),
            *((Step("every setup with every family", tests=CELLS, when="after"),) if CELLS else ()),
            # Alone: its verdict is that of `mmrouter up --demo`, which has a limit for late events.
            Step("demo with real engines", tests=DEMO, when="after"),
        ),
        limit_s=HANG_SECONDS,
        lanes=3,
        lane_gb=6,
    ),
    # Alone, after the others. Times are printed; only figures that other load does not change fail.
    "bench-quick": Level((Step("quick benchmarks", module("bench.quick", "--counts")),), limit_s=900),
}
TOGETHER = ("e2e", "conformance", "cluster", "local")
"""Levels that run at the same time where several of them are requested: many tests wait more than they compute. The
level with the longest steps is first, so that short steps fill the lanes at the end.
"""
MOST_LANES = 4
"""Steps at the same time, for two CPUs."""


class Queue:
    """Steps by level that wait for their turn. The first one starts whose level has a free lane and that finds memory.

    ``available`` is the machine's memory in GB, of which a step takes its level's ``lane_gb`` until it ends.
    """

    def __init__(self, levels: Mapping[str, Level], steps: Iterable[tuple[str, Step]], available: float) -> None:
        self._levels, self._waiting, self._available = levels, list(steps), available
        self._running: Counter[str] = Counter()
        self._changed = threading.Condition()

    def take(self) -> tuple[str, Step] | None:
        """Wait for a step that may start, and return it with its level's name; ``None`` where no step is left."""
        with self._changed:
            while self._waiting:
                if (pair := next((pair for pair in self._waiting if self._fits(pair[0])), None)) is not None:
                    self._waiting.remove(pair)
                    self._running[pair[0]] += 1
                    return pair
                self._changed.wait()
        return None

    def ended(self, name: str) -> None:
        """Free what a step of this level took."""
        with self._changed:
            self._running[name] -= 1
            self._changed.notify_all()

    def _fits(self, name: str) -> bool:
        taken = sum(self._levels[each].lane_gb * count for each, count in self._running.items())
        fits = not taken or taken + self._levels[name].lane_gb <= self._available
        return fits and self._running[name] < self._levels[name].lanes


def run_together(levels: Mapping[str, Level], scratch: Path) -> dict[str, Outcome]:
    """Run levels at the same time and return their outcomes. The steps start in the order of the levels."""
    outcomes = {name: Outcome() for name in levels}
    began, available = time.monotonic(), psutil.virtual_memory().available / 1e9

    def work(queue: Queue) -> None:
        while (pair := queue.take()) is not None:
            name, step = pair
            try:
                outcomes[name].add(run_step(levels[name], scratch, step))
                outcomes[name].seconds = time.monotonic() - began
            finally:
                queue.ended(name)

    for when in ("before", "beside", "after"):
        steps = ((name, step) for name, level in levels.items() for step in level.steps if step.when == when)
        queue = Queue(levels, steps, available)
        lanes = min(MOST_LANES, sum(level.lanes for level in levels.values())) if when == "beside" else 1
        with ThreadPoolExecutor(lanes) as pool:
            try:
                for lane in [pool.submit(work, queue) for _ in range(lanes)]:
                    lane.result()
            except KeyboardInterrupt:
                end_all()
                raise
    return outcomes


def run_step(level: Level, scratch: Path, step: Step) -> Outcome:
    """Run one command and count its results. A pytest that writes no report is a failure."""
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
    limit_s = level.limit_s if step.limit_s is None else step.limit_s
    if level.lanes == 1 or step.when != "beside":
        print(f"\n== {step.name}", flush=True)
        status = execute(command, limit_s, None, env)
    else:
        with (scratch / f"{name}.out").open("w+b") as out:
            status = execute(command, limit_s, out, env)
            out.seek(0)
            shown = out.read().decode(errors="replace").strip()
        print(f"\n== {step.name}, {time.monotonic() - began:.1f} s\n{shown}", flush=True)
    if report.is_file():
        add_report(report, outcome)
    if status and not outcome.failed:
        outcome.failed = 1
        why = f"no test was found in {' '.join(step.paths)}" if step.paths and status == NO_TESTS else ending(status)
        outcome.failures.append(f"{step.name}: {why}")
    return outcome


def execute(command: tuple[str, ...], limit_s: float, out: IO[bytes] | None, env: dict[str, str]) -> int:
    """Return the exit status of a command; its whole process group is ended when it outlives the limit."""
    stderr = None if out is None else subprocess.STDOUT
    process = subprocess.Popen(command, cwd=ROOT, env=env, start_new_session=True, stdout=out, stderr=stderr)
    RUNNING.add(process)
    if CANCELLED.is_set():  # the run was cancelled while this one started
        end(process)
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        print(f"ended after {limit_s:.0f} s: {' '.join(command)}", flush=True)
        end(process)
        return -signal.SIGKILL
    finally:
        RUNNING.discard(process)


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
