"""`mmrouter status` and `mmrouter doctor` behind a URL, on a deployment of processes: health, and a silent sidecar."""

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from local.rig import ROOT, Deployment
from waiting import wait_for


def doctor(demo: Deployment) -> tuple[int, list[dict[str, str]]]:
    done = demo.mmrouter("doctor", "--url", demo.url, "--json")
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)["subjects"][0]["findings"]


def test_a_healthy_deployment_has_no_finding_but_ok(demo: Deployment) -> None:
    wait_for(demo.settled, 30, "every worker is verified")
    status, findings = doctor(demo)
    assert (status, {finding["level"] for finding in findings}) == (0, {"ok"}), findings
    assert {"frontends", "events", "exactness"} == {finding["check"] for finding in findings}


def test_a_silent_sidecar_is_named_by_every_frontend_until_it_speaks(demo: Deployment) -> None:
    wait_for(demo.settled, 30, "every worker is verified")
    name, process = next(iter(sorted(demo.processes("sidecar").items())))
    process.send_signal(signal.SIGSTOP)
    try:
        wait_for(lambda: not demo.settled(), 10, "a frontend has noticed")
        found: list[Any] = []

        def both() -> bool:
            status, findings = doctor(demo)
            found[:] = [f["seen"] for f in findings if (f["check"], f["level"]) == ("events", "problem")]
            return status == 1 and len(found) == len(demo.controls)

        wait_for(both, 30, "both frontends miss it")
        assert all(seen.endswith(f": {name}") and "received the last heartbeat" in seen for seen in found)
        view = json.loads(demo.mmrouter("status", "--url", demo.url, "--json").stdout)[0]
        assert [worker["name"] for worker in view["workers"] if not worker["routable"]] == [name]
        assert view["phase"] == "Degraded"
    finally:
        process.send_signal(signal.SIGCONT)
    wait_for(demo.settled, 30, "it is heard again")
    assert doctor(demo)[0] == 0


def test_status_shows_the_same_as_a_table_and_as_json(demo: Deployment) -> None:
    wait_for(demo.settled, 30, "every worker is verified")
    view = json.loads(demo.mmrouter("status", "--url", demo.url, "--json").stdout)[0]
    assert (view["phase"], view["frontends"]) == ("Ready", f"{len(demo.controls)}/{len(demo.controls)}")
    assert {worker["exact"] for worker in view["workers"]} == {"True"}
    shown = demo.mmrouter("status", "--url", demo.url).stdout
    for worker in view["workers"]:
        assert worker["name"][:16] in shown


def test_watching_ends_cleanly_by_ctrl_c(demo: Deployment) -> None:
    argv = [sys.executable, "-m", "mmrouter_cli", "status", "--url", demo.url, "--watch", "--json"]
    process = subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert json.loads(process.stdout.readline())[0]["workers"]
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 0, errors
    assert "Traceback" not in errors


def test_a_terminal_shows_a_live_table_and_ctrl_c_leaves_it_there(demo: Deployment) -> None:
    wait_for(demo.settled, 30, "every worker is verified")
    ours, theirs = pty.openpty()
    argv = [sys.executable, "-m", "mmrouter_cli", "status", "--url", demo.url, "--watch"]
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
