"""`mmrouter status`, `doctor` and `bench` behind a URL, on a deployment of processes: healthy, and a silent sidecar."""

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from local.rig import ROOT, Deployment
from waiting import wait_for

from mmrouter_cli.bench.types import Result


def doctor(demo: Deployment) -> tuple[int, list[dict[str, str]]]:
    done = demo.mmrouter("doctor", "--url", demo.url, "--json")
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)["subjects"][0]["findings"]


def test_a_healthy_deployment_has_no_finding_but_ok(settled: Deployment) -> None:
    status, findings = doctor(settled)
    assert (status, {finding["level"] for finding in findings}) == (0, {"ok"}), findings
    assert {"devices", "frontends", "events", "exactness"} == {finding["check"] for finding in findings}


def test_a_silent_sidecar_is_named_by_every_frontend_until_it_speaks(settled: Deployment) -> None:
    name, process = next(iter(sorted(settled.processes("sidecar").items())))
    process.send_signal(signal.SIGSTOP)
    try:
        wait_for(lambda: not settled.settled(), 10, "a frontend has noticed")
        found: list[Any] = []

        def both() -> bool:
            status, findings = doctor(settled)
            found[:] = [f["seen"] for f in findings if (f["check"], f["level"]) == ("events", "problem")]
            return status == 1 and len(found) == len(settled.controls)

        wait_for(both, 30, "both frontends miss it")
        assert all(seen.endswith(f": {name}") and "received the last heartbeat" in seen for seen in found)
        view = json.loads(settled.mmrouter("status", "--url", settled.url, "--json").stdout)[0]
        assert [worker["name"] for worker in view["workers"] if not worker["routable"]] == [name]
        assert view["phase"] == "Degraded"
    finally:
        process.send_signal(signal.SIGCONT)
    wait_for(settled.settled, 30, "it is heard again")
    assert doctor(settled)[0] == 0


def test_status_shows_the_same_as_a_table_and_as_json(settled: Deployment) -> None:
    view = json.loads(settled.mmrouter("status", "--url", settled.url, "--json").stdout)[0]
    assert (view["phase"], view["frontends"]) == ("Ready", f"{len(settled.controls)}/{len(settled.controls)}")
    assert {worker["exact"] for worker in view["workers"]} == {"True"}
    shown = settled.mmrouter("status", "--url", settled.url).stdout
    for worker in view["workers"]:
        assert worker["name"][:16] in shown


def test_watching_ends_cleanly_by_ctrl_c(settled: Deployment) -> None:
    argv = [sys.executable, "-m", "mmrouter_cli", "status", "--url", settled.url, "--watch", "--json"]
    process = subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert json.loads(process.stdout.readline())[0]["workers"]
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 0, errors
    assert "Traceback" not in errors


def test_a_terminal_shows_a_live_table_and_ctrl_c_leaves_it_there(settled: Deployment) -> None:
    ours, theirs = pty.openpty()
    argv = [sys.executable, "-m", "mmrouter_cli", "status", "--url", settled.url, "--watch"]
    env = os.environ | {"TERM": "xterm", "COLUMNS": "160", "LINES": "40"}
    process = subprocess.Popen(argv, cwd=ROOT, env=env, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    seen = b""

    def drawn(enough: Callable[[bytes], bool]) -> bytes:
        """Read until there is enough, or the terminal's other end is closed."""
        text = b""
        deadline = time.monotonic() + 20
        while not enough(text):
            ready, _, _ = select.select([ours], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"nothing more came after {text[-200:]!r}"
            try:
                text += os.read(ours, 65536)
            except OSError:  # how a terminal says that its other end is closed
                break
        return text

    try:
        seen += drawn(lambda text: text.count(b"in flight") >= 2)  # drawn, and drawn again
        process.send_signal(signal.SIGINT)
        seen += drawn(lambda _: False)
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    assert b"Traceback" not in seen
    assert b"demo-worker" in seen


SMALL = ("--image-size", "56x56", "--output-tokens", "8", "--concurrency", "2")


def test_two_policies_are_compared_and_every_request_is_accounted_for(settled: Deployment, tmp_path: Path) -> None:
    results, page = tmp_path / "both.json", tmp_path / "both.html"
    options = ("--requests", "40", "--turns", "5", *SMALL, "--json", str(results), "--html", str(page))
    done = settled.mmrouter("bench", settled.url, "--against", settled.url, "--against-policy", "roundRobin", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "second against first" in done.stdout
    kv, turns = msgspec.json.decode(results.read_bytes(), type=list[Result])
    for result in (kv, turns):
        assert (result.sent, result.answered, result.failures) == (40, 40, {})
        assert result.routing is not None
        assert (result.routing.events, result.routing.decisions) == ("on", {"exact": 40})
        assert sum(result.routing.workers.values()) == 40
        assert Counter(row.worker for row in result.rows) == result.routing.workers
        assert {bool(row.images) for row in result.rows} == {False, True}
        assert result.hit_ratio is not None
        assert result.routing.overlap is not None
        # What was found before a request was sent is there when it is computed; more may have come meanwhile.
        assert 0 < result.routing.overlap <= result.hit_ratio + 0.02
    assert (kv.load, kv.left_out, turns.policy) == (turns.load, turns.left_out, "roundRobin")
    assert kv.salt != turns.salt
    assert kv.hit_ratio is not None
    assert turns.hit_ratio is not None
    assert kv.hit_ratio > turns.hit_ratio
    assert page.read_text().count("<svg") == 4
    # The file alone gives the same comparison.
    again = settled.mmrouter("bench", str(results))
    assert (again.returncode, again.stdout) == (0, done.stdout)


def test_a_comparison_is_refused_when_an_engine_is_not_heard(settled: Deployment) -> None:
    name, process = next(iter(sorted(settled.processes("sidecar").items())))
    process.send_signal(signal.SIGSTOP)
    try:
        wait_for(
            lambda: any(w["standing"] != "verified" for n in range(2) for w in settled.state(n)["workers"]),
            10,
            "a frontend has noticed",
        )
        done = settled.mmrouter("bench", settled.url, "--against", settled.url, "--requests", "2", *SMALL)
    finally:
        process.send_signal(signal.SIGCONT)
    wait_for(settled.settled, 30, "it is heard again")
    assert done.returncode == 1
    assert f"not compared: the first run's events were off: {name} is unsynced" in done.stderr
    assert "second against first" not in done.stdout
    assert done.stdout.count("2 answered and 0 failed") == 2


def test_ctrl_c_shows_what_was_measured_so_far(settled: Deployment) -> None:
    def decisions() -> int:
        return sum(settled.state(number)["decisions"] for number in range(len(settled.controls)))

    before = decisions()
    argv = [sys.executable, "-m", "mmrouter_cli", "bench", settled.url, "--requests", "5000", *SMALL, "--json", "-"]
    process = subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        wait_for(lambda: decisions() > before + 8, 30, "requests arrive")
        os.kill(process.pid, signal.SIGINT)
        out, shown = process.communicate(timeout=20)
    finally:
        process.kill()
    result = msgspec.json.decode(out, type=Result)
    assert (process.returncode, result.interrupted) == (1, True), shown
    assert 4 < result.answered < 5000
    assert result.failures == {}
    assert result.answered + result.unanswered == result.sent
    assert "interrupted" in shown
    assert "Traceback" not in shown
