"""What fails the quick benchmark, and that what it counts is counted."""

import json
import os
import subprocess
from types import SimpleNamespace

import psutil
import pytest
from waiting import wait_for

from bench.quick import __main__ as command
from bench.quick import loop_and_index, measurements, scenarios, verdicts
from bench.quick.scenarios import Scenario
from bench.quick.verdicts import BaselineError, Figure, judge, least, read, write
from mmrouter_router.request import prepare

COMMITTED = {"time: a": 4.0, "calls: b": 100.0}


def figure(name: str, value: float | None, **more) -> Figure:
    return Figure(name, value, "x", noisy=name.startswith("time"), **more)


def states(*measured: Figure) -> dict[str, str]:
    return {verdict.figure.name: verdict.state for verdict in judge(COMMITTED, measured)}


@pytest.mark.parametrize(
    ("measured", "state"),
    [
        (figure("time: a", 5.0), "ok"),
        (figure("calls: b", 125.1), "worse"),
        (figure("time: a", 3.1), "better"),
        (figure("calls: b", 100.0), "ok"),
        (figure("time: a", 5.9, allowed=1.5), "ok"),
        (figure("time: a", 6.1, allowed=1.5), "worse"),
        (figure("kept", 7.9, slack=8.0), "ok"),  # near zero
        (figure("kept", 8.1, slack=8.0), "worse"),
    ],
)
def test_more_than_a_quarter_or_the_figures_own_factor_or_slack_is_worse(measured, state):
    verdicts = judge(COMMITTED | {"kept": 0.0}, [measured])
    assert [verdict.state for verdict in verdicts if verdict.figure.name == measured.name] == [state]


def test_a_new_or_unmeasured_figure_fails_and_one_that_cannot_be_measured_does_not():
    state_of = states(figure("time: new", 1.0), figure("time: a", None, why="no tool"))
    assert state_of == {"time: new": "new", "time: a": "not run", "calls: b": "gone"}
    assert {"worse", "new", "gone"} == verdicts.FAILS


def test_without_a_gate_for_times_only_worse_counts_fail():
    verdicts = judge(COMMITTED, [figure("time: a", 9.0), figure("calls: b", 200.0)], gate_times=False)
    assert [(verdict.state, verdict.fails) for verdict in verdicts] == [("slower", False), ("worse", True)]


def test_the_end_names_the_figure_with_both_values_and_is_status_1(capsys):
    assert command.print_verdicts(judge(COMMITTED, [figure("time: a", 6.0), figure("calls: b", 90.0)])) == 1
    *_, line, last = capsys.readouterr().out.splitlines()
    assert line == "worse    time: a: 6 x, committed 4, +50%"
    assert last.startswith("1 of 2 figures fail")
    assert command.print_verdicts(judge(COMMITTED, [figure("time: a", 4.0), figure("calls: b", 90.0)])) == 0


def test_only_times_are_measured_again_and_the_least_counts():
    again = iter([[figure("time: a", 9.0)], [figure("time: a", 4.5), figure("calls: b", 1.0)]])
    judged = command.attempts(
        COMMITTED, lambda: [figure("time: a", 6.0), figure("calls: b", 100.0)], lambda: next(again)
    )
    assert [(verdict.state, verdict.figure.value) for verdict in judged] == [("ok", 4.5), ("ok", 100.0)]
    never = pytest.fail
    judged = command.attempts(COMMITTED, lambda: [figure("time: a", 6.0), figure("calls: b", 126.0)], never)
    assert [verdict.state for verdict in judged] == ["worse", "worse"]
    forever = command.attempts(COMMITTED, lambda: [figure("time: a", 6.0), figure("calls: b", 90.0)], lambda: [])
    assert forever[0].state == "worse"
    assert least([figure("time: a", None)], [figure("time: a", 1.0)])[0].value is None


def test_what_was_not_measured_here_keeps_what_was_committed(tmp_path):
    path = tmp_path / "baseline.json"
    with pytest.raises(BaselineError, match="--write-baseline"):
        read(path)
    write([figure("time: a", 1.23456), figure("calls: b", 2.0)], "3.11", path)
    write([figure("time: a", None, why="no tool")], "3.11", path)
    assert read(path) == ("3.11", {"time: a": 1.235})
    path.write_text(json.dumps({"figures": []}))
    with pytest.raises(BaselineError):
        read(path)


def test_the_committed_figures_are_those_that_are_measured():
    _, committed = read()
    with scenarios.scenarios() as pieces:
        names = {f"{kind}: {piece.name}" for piece in pieces for kind in ("calls", "memory")}
        over = {f"{kind}: {piece.name}, over {piece.against}" for piece in pieces for kind in ("time", "instructions")}
        kept = f"kept: {pieces[-1].name}"
    router = {*measurements.CALLS.values(), *measurements.TIMES.values()}
    assert set(committed) == {*names, *over, kept, *router, loop_and_index.TURN, loop_and_index.INDEX}


def work(size: int) -> Scenario:
    def once(_: object) -> int:
        return sum(map(abs, [n % 7 for n in range(size)]))

    return Scenario("work", "unit", "a tenth of it", once, lambda _: sum(range(size // 10)))


def test_twice_the_work_is_twice_the_calls_and_memory():
    (once,), (twice,) = measurements.memory([work(50_000)]), measurements.memory([work(100_000)])
    assert twice.value == pytest.approx(2 * once.value, rel=0.1)

    def called(times: int) -> Scenario:
        return Scenario("calls", "unit", "", lambda _: [abs(n) for n in range(times)], len, units=times)

    assert measurements.calls([called(1000)])[0].value == pytest.approx(1.0, abs=0.01)
    (slow,) = measurements.times([work(50_000)], rounds=3)
    assert slow.value > 2


def test_what_a_repetition_keeps_is_seen():
    leak: list[object] = []
    keeps = Scenario("leak", "unit", "", lambda _: leak.extend([object() for _ in range(100)]), len)
    assert measurements.kept(keeps).value == pytest.approx(100, abs=5)
    assert measurements.kept(work(100)).value < measurements.BLOCKS_SLACK


def test_a_tool_that_is_not_there_is_a_reason_and_no_failure(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    missing = [*measurements.instructions([work(1)]), *measurements.system_calls(SimpleNamespace(), SimpleNamespace())]
    assert [(each.value, "is not installed" in each.why) for each in missing] == [(None, True)] * 3


def test_a_measured_command_ends_at_its_limit_with_the_processes_it_started(tmp_path):
    pid, limit_s = tmp_path / "pid", 0.5
    holds_the_output = f"sleep 600 & echo $! > {pid}.part; mv {pid}.part {pid}; wait"
    while not pid.exists():  # a slow machine needs more time to start it
        limit_s *= 2
        with pytest.raises(subprocess.TimeoutExpired):
            measurements.run_child(["sh", "-c", holds_the_output], dict(os.environ), limit_s)
    started = int(pid.read_text())

    def has_ended() -> bool:
        """A killed process may wait for its parent to collect it."""
        try:
            return psutil.Process(started).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    wait_for(has_ended, 5, "the end of a process that was killed")


def test_the_words_of_a_measured_command_that_fails_are_kept():
    with pytest.raises(subprocess.CalledProcessError) as raised:
        measurements.run_child(["sh", "-c", "echo no valgrind >&2; exit 3"], dict(os.environ), 60.0)
    assert (raised.value.returncode, raised.value.stderr) == (3, "no valgrind\n")


def test_dumps_of_callgrind_and_logs_of_strace_are_read():
    assert measurements.totals("version: 1\nsummary: 0\n\ntotals: 25448090\n") == 25448090
    log = [
        "100   1700000000.100000 epoll_wait(3, [], 1024, 5) = 0",
        "101   1700000000.200000 read(5, <unfinished ...>",
        "101   1700000000.300000 <... read resumed>) = 1",
        '100   1700000000.400000 sendto(5, ""..., 3, 0, NULL, 0) = 3',
        "100   1700000000.500000 --- SIGTERM {si_signo=SIGTERM} ---",
    ]
    assert measurements.between(log, 1700000000.15, 1700000001.0) == 2


def test_a_long_prompt_is_tokenized_beside_the_event_loop(monkeypatch):
    monkeypatch.setattr(loop_and_index, "ROUNDS", 1)
    beside = loop_and_index.longest_turn()
    monkeypatch.setattr(prepare, "INLINE_TEXT", 10**9)
    monkeypatch.setattr(prepare, "INLINE_BYTES", 10**9)
    within = loop_and_index.longest_turn()
    assert beside.value < 0.5 < within.value


def test_the_compiled_index_has_a_reason_where_it_is_not_measured(monkeypatch):
    monkeypatch.setattr(loop_and_index.native, "load", lambda environment: None)
    monkeypatch.setattr(loop_and_index.native, "form", "python")
    monkeypatch.setattr(loop_and_index.native, "why", "not installed")
    assert loop_and_index.compiled_index() == Figure(loop_and_index.INDEX, None, "x", noisy=True, why="not installed")
