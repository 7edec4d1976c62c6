"""Run the test levels of this repository and say what ran.

    .venv/bin/python -m hack.levels check [local] [cluster] [e2e] [conformance]

Each level is a list of commands; a failing one does not stop the others, so that one run shows everything. The commands
of a level run two or three at a time where there is memory for it; each one's output is shown when it ends. What the
others need runs before them, and what is timed after them. The end is what failed once more, shortened, then a table of
the levels, with the reason of everything that was not run, and one line ``N passed, N failed, N skipped`` over all.

A level was not run when tests of it were skipped and none passed that needs what the level is about: a cluster, a real
engine (``making.py`` says which tests do). Exit status 1 when anything failed; 3 when the one level that was asked for
was not run. Among others, it stands in the table with its reasons, and is no failure.

``passed`` and ``skipped`` count tests. ``failed`` counts tests and also commands that failed without a failing test
(a linter, a crash, a time limit), so that a red run never says ``0 failed``.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Literal

import psutil

from hack.outcomes import Outcome, add_report, summary, told_again

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
NO_TESTS = 5  # pytest's exit status
NOT_RUN = 3
RUNNING: set["subprocess.Popen[bytes]"] = set()
CANCELLED = threading.Event()


@dataclass(frozen=True)
class Step:
    """One command of a level. A step with ``tests`` is a pytest run over that folder, ``without`` leaves parts out.

    ``when``: beside the others, or alone, ``before`` all of them or ``after``. ``limit_s``: instead of its level's.
    ``nice``: it leaves the CPUs to others, whose times are looked at.
    """

    name: str
    command: tuple[str, ...] = ()
    tests: str | tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    when: Literal["before", "beside", "after"] = "beside"
    limit_s: float | None = None
    nice: int = 0

    @property
    def paths(self) -> tuple[str, ...]:
        return (self.tests,) if isinstance(self.tests, str) else self.tests


@dataclass(frozen=True)
class Level:
    steps: tuple[Step, ...]
    limit_s: float  # for each step: a hang is a failure that names the step
    lanes: int = 1  # with one lane the output is shown as it comes
    lane_gb: float = 0.0  # memory that a lane needs: where there is less, the steps run one after the other


def program(name: str, *arguments: str) -> Step:
    return Step(" ".join((name, *arguments[:1])), (str(BIN / name), *arguments))


LARGE_ROOMS = tuple(f"tests/unit/{room}" for room in ("router", "operator", "cli", "render"))
OTHERS = ("tests/unit", "handover/tests")
# Of the router: what waits for connections, for the most part.
WAITING = (
    "tests/unit/router/media",
    *(
        f"tests/unit/router/test_{name}.py"
        for name in ("server", "control_stream", "pod_watch", "fetch_metadata", "app", "process", "connection")
    ),
)
# Not the product, and they start processes: not for who waits.
ASIDE = tuple(f"tests/unit/{room}" for room in ("bench", "hack"))
# Deployments of their own, which they wait for and break; the other files share one.
BREAKS = ("broken_routing", "failures", "frontend_restart", "handover", "renderer")
BREAKING = tuple(f"tests/local/test_{name}.py" for name in BREAKS)
# Deployments whose engines share the work, and those of the other engine; what lasts for other reasons.
STAGED, LASTING = (
    tuple(f"tests/local/test_{name}.py" for name in names)
    for names in (
        ("disaggregated", "disaggregated_sglang", "encoders_sglang", "expired", "sglang"),
        ("janitor", "unresolved_images", "tracing"),
    )
)
FAULTS, SCALE, SPEED = (f"tests/cluster/test_{name}.py" for name in ("faults", "scale", "speed"))
# What people ask of a cluster, and who may write to it: what is left of the level takes about as long.
ASKED = tuple(f"tests/cluster/test_{name}.py" for name in ("doctor", "plan", "leadership", "operator_restart"))
# Engines that are real, which start slowly, and a cluster that is made as the README says; deployments that change
# while they are asked, and a chain of pods. What is left of the level takes about as long.
OWN, CHANGING = (
    tuple(f"tests/e2e/test_{name}.py" for name in names)
    for names in (("vllm", "tour", "tracing", "upgrade", "plugin"), ("rollout", "scaling", "disaggregated"))
)
REAL = "tests/conformance"
ROUTED, FIELDS, RENDERER = (f"{REAL}/vllm/test_{name}.py" for name in ("routing", "fields", "renderer"))
# Engines that serve a request together; images that reach one otherwise than inside a request.
TOGETHER = tuple(f"{REAL}/vllm/test_{name}.py" for name in ("encoders", "disaggregated"))
HANDED_OVER = tuple(f"{REAL}/vllm/test_{name}.py" for name in ("handover", "transfer", "nixl_reads"))
NATIVE = (sys.executable, "-m", "hack.native_env", "--optional")
LEVELS = {
    "check": Level(
        (
            # Where there is no Rust, only the form in Python is tested, and the tests that compare say so.
            Step("the compiled form, beside this interpreter", (*NATIVE, "--install"), when="before"),
            # The longest first, so that all lanes end at about the same time.
            Step("unit tests of the router's connections", tests=WAITING),
            Step(
                "unit tests of the other rooms", tests=("tests/unit", "handover/tests"), without=(*LARGE_ROOMS, *ASIDE)
            ),
            *(
                Step(f"unit tests of {folder.rpartition('/')[2]}", tests=folder, without=WAITING)
                for folder in LARGE_ROOMS
            ),
            program("ruff", "format", "--check", "."),
            program("ruff", "check", "."),
            program("mypy"),
            Step("mypy hack", (str(BIN / "mypy"), "hack")),
            # Engines have other Pythons than we do.
            Step("mypy for Python 3.10", (str(BIN / "mypy"), "--python-version", "3.10", "handover")),
            program("lint-imports"),
        ),
        limit_s=300,
        lanes=4,  # on two CPUs: some tests wait more than they compute
    ),
    "local": Level(
        (
            Step("tests on local processes", tests="tests/local", without=(*BREAKING, *STAGED, *LASTING)),
            Step("tests on local processes that break", tests=BREAKING),
            Step("tests on local processes, in stages", tests=STAGED),
            Step("tests on local processes that take long", tests=LASTING),
            Step("tests of the benchmarks and of what runs tests", tests=ASIDE),
            Step("rustfmt and clippy", (*NATIVE, "--lint")),
        ),
        limit_s=1200,
        lanes=3,
    ),
    # Three lanes, each with a control plane: many tests wait, for pods and for a minute in which nothing may happen.
    "cluster": Level(
        (
            Step(
                "what a control plane needs", (sys.executable, "tests/cluster/prepare.py"), when="before", limit_s=2700
            ),
            Step(
                "tests on a real control plane",
                tests="tests/cluster",
                without=("tests/cluster/running", *ASKED, FAULTS, SCALE, SPEED),
            ),
            Step("tests on a real control plane, faults", tests=FAULTS),
            Step("tests on a real control plane, what is asked", tests=ASKED),
            Step("tests on a real control plane, size", tests=SCALE),
            Step("tests on a real control plane with running pods", tests="tests/cluster/running"),
            Step("tests of the chart", tests="tests/chart"),
            Step("tests on a real control plane, speed", tests=SPEED, when="after"),
        ),
        limit_s=1200,
        lanes=3,
        lane_gb=3,
    ),
    # Three lanes, each with a node: a rollout under load waits three times as long as it computes. What is built once
    # per machine, or once per change of the images, has a limit of its own. The environment of vLLM is not among it: it
    # takes 3 minutes, where it is made.
    "e2e": Level(
        (
            Step(
                "what a node with real pods needs",
                (sys.executable, "tests/e2e/prepare.py"),
                when="before",
                limit_s=2700,
            ),
            Step("tests on a node with real pods", tests="tests/e2e", without=(*OWN, *CHANGING)),
            Step("tests on a node with real pods that change", tests=CHANGING, nice=10),
            Step("tests on nodes of their own", tests=OWN, nice=8),
        ),
        limit_s=1500,
        # Another cluster is one, which they would share.
        lanes=1 if os.environ.get("MMROUTER_KUBECONFIG") else 3,
        lane_gb=5,
    ),
    # An engine that starts keeps one CPU busy, one that is asked waits now and then. The longest first. What a run
    # compares is put together in the folder that its steps share.
    "conformance": Level(
        (
            Step("SGLang", tests=f"{REAL}/sglang"),
            Step("vLLM engines that serve together", tests=TOGETHER),
            Step(
                "vLLM, a family after the other",
                tests=f"{REAL}/vllm",
                without=(ROUTED, FIELDS, RENDERER, *TOGETHER, *HANDED_OVER),
            ),
            Step("images handed over to vLLM", tests=HANDED_OVER),
            Step("vLLM behind routers", tests=ROUTED),
            Step("tests without a served model", tests=REAL, without=(f"{REAL}/vllm", f"{REAL}/sglang")),
            Step("vLLM, field by field", tests=(FIELDS, RENDERER)),
        ),
        limit_s=3300,
        lanes=3,
        lane_gb=6,
    ),
}


def run_level(level: Level, scratch: Path) -> Outcome:
    outcome = Outcome()
    began = time.monotonic()
    for when in ("before", "beside", "after"):
        steps = [step for step in level.steps if step.when == when]
        with ThreadPoolExecutor(lane_count(level) if when == "beside" else 1) as lanes:
            try:
                for part in lanes.map(partial(run_step, level, scratch), steps):
                    outcome.add(part)
            except KeyboardInterrupt:
                lanes.shutdown(wait=False, cancel_futures=True)
                end_all()
                raise
    outcome.seconds = time.monotonic() - began
    return outcome


def lane_count(level: Level) -> int:
    """Return how many of a level's steps run side by side on this machine, as it is now."""
    if not level.lane_gb:
        return level.lanes
    return max(1, min(level.lanes, int(psutil.virtual_memory().available / 1e9 / level.lane_gb)))


def run_step(level: Level, scratch: Path, step: Step) -> Outcome:
    """Run one command and count what came of it. Whatever keeps pytest from reporting is a failure."""
    outcome = Outcome()
    began = time.monotonic()
    name = step.name.replace("/", "-").replace(" ", "-")
    report = scratch / f"{name}.xml"
    command = step.command
    if step.paths:
        left_out = tuple(f"--ignore={folder}" for folder in step.without)
        command = (sys.executable, "-m", "pytest", *step.paths, *left_out, "-q", f"--junit-xml={report}")
    if step.nice:
        command = ("nice", "-n", str(step.nice), *command)
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
        why = f"no test was found in {' '.join(step.paths)}" if step.paths and status == NO_TESTS else ended(status)
        outcome.failures.append(f"{step.name}: {why}")
    return outcome


def execute(command: tuple[str, ...], limit_s: float, out: IO[bytes] | None, env: dict[str, str]) -> int:
    """Return the exit status of a command; its whole process group is ended when it outlives the limit."""
    stderr = None if out is None else subprocess.STDOUT
    process = subprocess.Popen(command, cwd=ROOT, env=env, start_new_session=True, stdout=out, stderr=stderr)
    RUNNING.add(process)
    if CANCELLED.is_set():  # it started while the others were ended
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
    """End every command that still runs: nothing that a test started outlives the run."""
    CANCELLED.set()
    for process in list(RUNNING):
        end(process)


def end(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        # As ctrl-C does, so that pytest tears its fixtures down and with them the engines that they started.
        os.killpg(process.pid, signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def ended(status: int) -> str:
    return f"ended by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"


def main() -> int:
    parser = argparse.ArgumentParser(description="Run test levels and say what ran.")
    parser.add_argument("levels", nargs="+", choices=list(LEVELS))
    outcomes: dict[str, Outcome] = {}
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a cancelled run cleans up as an interrupted one does
    # A shell has what it starts in the background ignore ctrl-C, and so would every command that a test interrupts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with tempfile.TemporaryDirectory(prefix="mmrouter-levels-") as scratch:
            for name in dict.fromkeys(parser.parse_args().levels):
                outcomes[name] = run_level(LEVELS[name], Path(scratch))
    except KeyboardInterrupt:
        print("\ninterrupted", flush=True)
        return 130
    if again := told_again(outcomes):
        print(f"\n{again}", flush=True)
    print(f"\n{summary(outcomes)}", flush=True)
    return exit_status(outcomes)


def exit_status(outcomes: dict[str, Outcome]) -> int:
    """Return the exit status of a run, and say what is easily overlooked."""
    if any(outcome.failed for outcome in outcomes.values()):
        return 1
    if [outcome.verdict for outcome in outcomes.values()] == ["not run"]:
        print(f"{next(iter(outcomes))} was asked for and was NOT RUN: the reasons stand above", file=sys.stderr)
        return NOT_RUN
    return 0


if __name__ == "__main__":
    sys.exit(main())
