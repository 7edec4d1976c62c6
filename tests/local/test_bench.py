"""`mmrouter bench` against a deployment: two policies compared, events that stop, and ctrl-C."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
from local.rig import ROOT, Deployment
from waiting import wait_for

from mmrouter_cli.bench.types import Result

SMALL = ("--image-size", "56x56", "--output-tokens", "8", "--concurrency", "2")


def test_two_policies_are_compared_and_every_request_is_accounted_for(demo: Deployment, tmp_path: Path) -> None:
    wait_for(demo.settled, 30, "every worker is verified")
    results, page = tmp_path / "both.json", tmp_path / "both.html"
    options = ("--requests", "40", "--turns", "5", *SMALL, "--json", str(results), "--html", str(page))
    done = demo.mmrouter("bench", demo.url, "--against", demo.url, "--against-policy", "roundRobin", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "second against first" in done.stdout
    kv, turns = msgspec.json.decode(results.read_bytes(), type=list[Result])
    for result in (kv, turns):
        assert (result.sent, result.answered, result.failures) == (40, 40, {})
        assert result.routing is not None
        assert (result.routing.events, result.routing.decisions) == ("on", {"exact": 40})
        assert sum(result.routing.workers.values()) == 40
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
    again = demo.mmrouter("bench", str(results))
    assert (again.returncode, again.stdout) == (0, done.stdout)


def test_a_comparison_is_refused_when_an_engine_is_not_heard(demo: Deployment) -> None:
    wait_for(demo.settled, 30, "every worker is verified")
    name, process = next(iter(sorted(demo.processes("sidecar").items())))
    process.send_signal(signal.SIGSTOP)
    try:
        wait_for(
            lambda: any(w["standing"] != "verified" for n in range(2) for w in demo.state(n)["workers"]),
            10,
            "a frontend has noticed",
        )
        done = demo.mmrouter("bench", demo.url, "--against", demo.url, "--requests", "2", *SMALL)
    finally:
        process.send_signal(signal.SIGCONT)
    wait_for(demo.settled, 30, "it is heard again")
    assert done.returncode == 1
    assert f"not compared: the first run's events were off: {name} is unsynced" in done.stderr
    assert "second against first" not in done.stdout
    assert done.stdout.count("2 answered and 0 failed") == 2


def test_ctrl_c_shows_what_was_measured_so_far(demo: Deployment) -> None:
    def decisions() -> int:
        return sum(demo.state(number)["decisions"] for number in range(len(demo.controls)))

    before = decisions()
    argv = [sys.executable, "-m", "mmrouter_cli", "bench", demo.url, "--requests", "5000", *SMALL, "--json", "-"]
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
