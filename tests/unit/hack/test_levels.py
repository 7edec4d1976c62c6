"""The level runner counts every result, failure and skip, and never hides one."""

import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import pytest

from hack import run_levels
from hack.levels import HANG_SECONDS, Level, Step
from hack.outcomes import SHOWN_LINES, SLOWEST, Outcome, shortened_failures, slowest, summary
from hack.run_levels import BEHIND, Queue, run_together


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load no pytest plugins: that takes longer than the few lines that these tests run."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


def python(code: str) -> Step:
    return Step(code[:20], (sys.executable, "-c", code))


def run_level(level: Level, scratch: Path) -> Outcome:
    (outcome,) = run_together({"level": level}, scratch).values()
    return outcome


def over(folder: Path, code: str) -> Outcome:
    """The outcome of a level of one file of tests."""
    (folder / "tests").mkdir()
    (folder / "tests" / "test_it.py").write_text(code)
    return run_level(Level((Step("tests", tests=str(folder / "tests")),), limit_s=600), folder)


MIXED = """
import pytest
def test_good(): pass
def test_bad(): assert False
def test_broken(nothing_of_that_name): pass
def test_left_out(): pytest.skip("not run: no engine")
"""


def test_tests_are_counted_by_result(tmp_path: Path) -> None:
    outcome = over(tmp_path, MIXED)
    assert (outcome.passed, outcome.failed, outcome.skips) == (1, 2, Counter({"not run: no engine": 1}))
    assert [text.rpartition(".")[2] for text in outcome.failures] == ["test_bad", "test_broken"]
    assert outcome.verdict == "failed"


def test_the_last_lines_of_a_failure_are_repeated(tmp_path: Path) -> None:
    body = "    1 + 1\n" * 3 * SHOWN_LINES
    code = f"def test_long():\n{body}    assert 'this' == 'that'\ndef test_good(): pass\n"
    outcome = over(tmp_path, code)
    lines = shortened_failures({"check": outcome, "local": Outcome(passed=1)}).splitlines()
    assert lines[0].endswith(".test_long")
    assert lines[1].endswith("more lines above")
    assert len(lines) == 2 + SHOWN_LINES
    assert any("'this' == 'that'" in line for line in lines)
    assert shortened_failures({"local": Outcome(passed=1)}) == ""


def test_the_slowest_tests_of_a_level_are_named_with_their_time() -> None:
    times = {f"tests.test_{number}": float(number) for number in range(SLOWEST + 5)}
    first, *named = slowest({"check": Outcome(times=times)}).splitlines()
    assert (first, len(named)) == ("== slowest of check", SLOWEST)
    assert named[0].split() == [f"{SLOWEST + 4:.1f}", "s", f"tests.test_{SLOWEST + 4}"]


def test_a_level_of_skips_only_did_not_run(tmp_path: Path) -> None:
    code = "import pytest\ndef test_it(): pytest.skip('not run: no engine')\n"
    outcome = over(tmp_path, code)
    assert outcome.verdict == "not run"
    *_, reason, _, totals = summary({"check": Outcome(passed=3, failed=1), "conformance": outcome}).splitlines()
    assert (reason, totals) == ("    not run: no engine (1 test)", "3 passed, 1 failed, 1 skipped")


@pytest.mark.parametrize(("code", "why"), [("", "no test was found in "), ("import nothing_of_that_name\n", "test_it")])
def test_a_folder_without_a_test_result_is_a_failure(tmp_path: Path, code: str, why: str) -> None:
    outcome = over(tmp_path, code)
    assert (outcome.passed, outcome.failed) == (0, 1)
    assert why in outcome.failures[0]


def test_a_failing_command_fails_the_level_and_does_not_stop_it(tmp_path: Path) -> None:
    steps = (python("raise SystemExit(3)"), python("import os; os.kill(os.getpid(), 9)"), python("pass"))
    outcome = run_level(Level(steps, limit_s=60, lanes=2), tmp_path)
    assert {text.partition(": ")[2] for text in outcome.failures} == {"exit status 3", "ended by SIGKILL"}
    assert summary({"check": outcome}).endswith("0 passed, 2 failed, 0 skipped")


def test_the_cpu_time_of_a_step_is_shown_with_that_of_its_children(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    burn = "import time\nwhile time.process_time() < 1.0: pass"
    step = Step(
        "parent", (sys.executable, "-c", f"import subprocess, sys; subprocess.run([sys.executable, '-c', {burn!r}])")
    )
    run_level(Level((step,), limit_s=60, lanes=2), tmp_path)
    (head,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("== parent")]
    assert float(head.split()[-4]) >= 1


def test_steps_that_run_alone_begin_before_all_others_or_when_they_have_ended(tmp_path: Path) -> None:
    # Each writes when it began and ended; their order in the level is not the order in which they must run.
    code = (
        "import sys, time; began = time.monotonic(); time.sleep(0.2)\n"
        "print(began, time.monotonic(), file=open(sys.argv[1], 'w'))"
    )
    steps = [
        Step(name, (sys.executable, "-c", code, str(tmp_path / name)), when=when)
        for name, when in (("last", "after"), ("one", "beside"), ("two", "beside"), ("first", "before"))
    ]
    assert not run_level(Level(tuple(steps), limit_s=60, lanes=3), tmp_path).failed
    times = {step.name: [float(text) for text in (tmp_path / step.name).read_text().split()] for step in steps}
    assert times["first"][1] <= min(times["one"][0], times["two"][0])
    assert times["last"][0] >= max(times["one"][1], times["two"][1])


def test_a_step_that_runs_alone_in_its_level_runs_beside_those_of_other_levels() -> None:
    levels = {name: Level((), limit_s=1, lanes=2) for name in ("slow", "quick")}
    build, then, other = Step("build", when="before"), Step("then"), Step("other")
    queue = Queue(levels, [("slow", build), ("slow", then), ("quick", other)], available=1)
    assert [queue.take(), queue.take()] == [("slow", build), ("quick", other)]
    queue.ended("slow")
    assert queue.take() == ("slow", then)


def test_every_test_file_is_in_exactly_one_step() -> None:
    steps_of = Counter(
        file
        for level in run_levels.LEVELS.values()
        for step in level.steps
        for path in step.paths
        for file in ([run_levels.ROOT / path] if path.endswith(".py") else (run_levels.ROOT / path).rglob("test_*.py"))
        if not any(file.is_relative_to(run_levels.ROOT / left_out) for left_out in step.without)
    )
    every = {path for top in ("tests", "handover/tests") for path in (run_levels.ROOT / top).rglob("test_*.py")}
    assert {file: times for file, times in steps_of.items() if times > 1} == {}
    assert every - set(steps_of) == set()


def test_a_command_that_hangs_is_ended_and_named(tmp_path: Path) -> None:
    forever = (sys.executable, "-c", "import threading; threading.Event().wait()")
    outcome = run_level(Level((Step("one", forever), Step("two", forever)), limit_s=0.3, lanes=1), tmp_path)
    assert outcome.failures == ["one: ended by SIGKILL", "two: ended by SIGKILL"]


@pytest.mark.parametrize("name", ["cluster", "e2e"])
def test_builds_come_before_the_tests_that_need_a_cluster_and_have_time(name: str) -> None:
    first, *then = run_levels.LEVELS[name].steps
    assert first.when == "before"
    assert first.command == (sys.executable, f"tests/{name}/prepare.py")
    assert (run_levels.ROOT / first.command[1]).is_file()
    assert {step.when for step in then} == {"beside"}
    assert run_levels.LEVELS[name].limit_s == HANG_SECONDS


NEEDING = """
import pytest
def test_aside(): pass
def test_real(record_property):
    record_property("needs", "yes")
    {}
"""


@pytest.mark.parametrize(("does", "verdict"), [("pytest.skip('not run: no engine')", "not run"), ("pass", "passed")])
def test_a_level_is_not_run_when_only_tests_without_its_requirement_passed(
    tmp_path: Path, does: str, verdict: str
) -> None:
    assert over(tmp_path, NEEDING.format(does)).verdict == verdict


SOME = (
    *("tests/cluster/test_doctor.py", "tests/chart/test_values.py", "tests/chart/test_rendered.py"),
    *("tests/e2e/test_tour.py", "tests/e2e/test_rollout.py"),
    *("tests/conformance/test_report.py", "tests/conformance/sglang/test_prediction.py"),
)
"""From each level with a requirement: tests that need it and tests that do not."""


def test_where_nothing_can_be_built_no_test_passes_that_needs_its_levels_requirement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "file"
    cache.touch()
    monkeypatch.delenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD")
    monkeypatch.setenv("MMROUTER_CACHE", str(cache))
    monkeypatch.setenv("MMROUTER_MODELS", str(tmp_path / "nowhere"))
    monkeypatch.delenv("MMROUTER_KUBECONFIG", raising=False)
    outcome = run_level(Level((Step("some", tests=SOME),), limit_s=600), tmp_path)
    assert outcome.failures == []
    assert outcome.passed
    assert outcome.verdict == "not run"
    cases = ElementTree.parse(tmp_path / "some.xml").getroot().iter("testcase")
    needing = {str(case.get("classname")).split(".")[1] for case in cases if case.find("properties") is not None}
    assert needing == {"cluster", "chart", "e2e", "conformance"}


@pytest.mark.parametrize(
    ("outcomes", "status"),
    [
        ({"e2e": Outcome(passed=1, needing=2, skips=Counter({"not run: no root": 2}))}, 3),
        ({"e2e": Outcome(passed=1, needing=2, served=1, skips=Counter({"not run: no GPU": 1}))}, 0),
        ({"check": Outcome(passed=1), "e2e": Outcome(skips=Counter({"not run: no root": 2}))}, 0),
        ({"e2e": Outcome(failed=1, skips=Counter({"not run: no root": 2}))}, 1),
        ({"check": Outcome()}, 0),
    ],
)
def test_a_single_level_that_was_not_run_has_its_own_status_and_a_message(
    outcomes: dict[str, Outcome], status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_levels.exit_status(outcomes) == status
    assert ("e2e was requested and was NOT RUN" in capsys.readouterr().err) == (status == 3)


def test_a_cancelled_run_ends_its_commands(tmp_path: Path) -> None:
    child = (
        "import signal, sys, threading\n"
        "signal.signal(signal.SIGINT, lambda *_: (open(sys.argv[1], 'w').write('ended'), sys.exit()))\n"
        "print('started', flush=True)\nthreading.Event().wait()\n"
    )
    mark = tmp_path / "mark"
    code = (
        "import sys\nfrom hack import run_levels\nfrom hack.levels import Level, Step\n"
        f"step = Step('hang', (sys.executable, '-c', {child!r}, {str(mark)!r}))\n"
        "run_levels.LEVELS = {'check': Level((step,), limit_s=600)}\n"
        "sys.argv = ['levels', 'check']\nsys.exit(run_levels.main())\n"
    )
    run = subprocess.Popen([sys.executable, "-c", code], cwd=run_levels.ROOT, stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    assert any(line == "started\n" for line in run.stdout)
    run.send_signal(signal.SIGTERM)
    assert run.wait(300) == 130
    assert mark.read_text() == "ended"
    run.stdout.close()


def test_a_step_starts_when_its_level_has_a_free_lane_and_its_memory_is_free() -> None:
    levels = {"large": Level((), limit_s=1, lanes=2, lane_gb=6), "small": Level((), limit_s=1, lanes=1, lane_gb=1)}
    first, second, third, small, last = (Step(name) for name in ("first", "second", "third", "small", "last"))
    steps = [*(("large", step) for step in (first, second, third)), *(("small", step) for step in (small, last))]
    queue = Queue(levels, steps, available=12)
    assert [queue.take() for _ in range(2)] == steps[:2]  # now both lanes and all memory of the large level are taken
    queue.ended("large")
    assert queue.take() == ("large", third)
    queue.ended("large")
    assert queue.take() == ("small", small)
    queue.ended("small")
    assert [queue.take(), queue.take()] == [("small", last), None]


def test_a_step_that_needs_more_memory_than_there_is_runs_alone() -> None:
    levels = {"large": Level((), limit_s=1, lanes=2, lane_gb=6), "small": Level((), limit_s=1, lane_gb=1)}
    queue = Queue(levels, [("small", Step("small")), ("large", Step("large"))], available=2)
    assert queue.take() == ("small", Step("small"))
    queue.ended("small")
    assert queue.take() == ("large", Step("large"))


def test_steps_of_several_levels_run_at_the_same_time(tmp_path: Path) -> None:
    # Each waits for the file of the other.
    code = (
        "import pathlib, sys, time\nown, other = map(pathlib.Path, sys.argv[1:])\nown.touch()\n"
        "while not other.exists(): time.sleep(0.01)\n"
    )
    files = [str(tmp_path / name) for name in "ab"]
    levels = {
        name: Level((Step(name, (sys.executable, "-c", code, *order)),), limit_s=60)
        for name, order in (("one", files), ("other", files[::-1]))
    }
    outcomes = run_together(levels, tmp_path)
    assert [outcome.failures for outcome in outcomes.values()] == [[], []]


def test_the_first_of_levels_at_the_same_time_has_the_cpus_before_the_others(tmp_path: Path) -> None:
    # The priority is set once the command runs: it waits for that, or for 5 s where it stays the same.
    code = (
        "import os, pathlib, sys, time\nfile, before = pathlib.Path(sys.argv[1]), int(sys.argv[2])\n"
        "end = time.monotonic() + 5 * (file.name != 'first')\n"
        "while os.nice(0) == before and time.monotonic() < end: pass\nfile.write_text(str(os.nice(0) - before))\n"
    )
    levels = {
        name: Level((Step(name, (sys.executable, "-c", code, str(tmp_path / name), str(os.nice(0)))),), limit_s=60)
        for name in ("first", "second", "third")
    }
    run_together(levels, tmp_path)
    seen = {name: int((tmp_path / name).read_text()) for name in levels}
    assert seen == {"first": 0, "second": BEHIND, "third": BEHIND}


def test_parts_of_a_folder_run_once_each_and_share_the_runs_folder(tmp_path: Path) -> None:
    code = "import os\ndef test_it(): open(os.environ['MMROUTER_RUN_FOLDER'] + '/seen', 'a').write(__name__[-1])\n"
    tests, scratch = tmp_path / "tests", tmp_path / "scratch"
    for name in "ab":
        (tests / name).mkdir(parents=True)
        (tests / name / f"test_{name}.py").write_text(code)
    scratch.mkdir()
    steps = (Step("a", tests=str(tests / "a")), Step("rest", tests=str(tests), without=(str(tests / "a"),)))
    outcome = run_level(Level(steps, limit_s=60, lanes=2), scratch)
    assert (outcome.passed, sorted((scratch / "seen").read_text())) == (2, ["a", "b"])
