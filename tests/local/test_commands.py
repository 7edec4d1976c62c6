"""The commands of the README and of the pages against a running deployment."""

import json
import os
import re
import secrets
import shlex
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import httpx
import psutil
import pytest
from doc_commands import CHART_PAGE, commands, needs_a_cluster, tour
from local.rig import ROOT, running
from waiting import wait_for


def test_the_gate_passes_and_says_what_it_saw(demo):
    done = demo.mmrouter("verify", demo.url, "--json")
    result = json.loads(done.stdout)
    assert (done.returncode, result["passed"]) == (0, True), done.stdout + done.stderr
    assert sum("repeats are whole hits" in check["name"] for check in result["checks"]) == 3
    assert all(check["message"] for check in result["checks"])


def test_the_gate_fails_closed_with_a_wrong_token_and_without_a_deployment(demo):
    wrong = demo.mmrouter("verify", demo.url, "--control", demo.controls[0], "--token", "nonsense", "--json")
    assert wrong.returncode == 1
    assert not json.loads(wrong.stdout)["passed"]
    unreachable = demo.mmrouter("verify", "http://127.0.0.1:9", "--control", "http://127.0.0.1:9", "--token", "x")
    assert unreachable.returncode == 1


def test_a_second_deployment_beside_the_first_has_addresses_of_its_own_and_ctrl_c_leaves_nothing_of_it(settled):
    with running(ROOT / "examples" / "demo.yaml") as second:
        both = [{one.url, *(frontend["url"] for frontend in one.run["frontends"])} for one in (settled, second)]
        blocks = [{".".join(httpx.URL(url).host.split(".")[:3]) for url in urls} for urls in both]
        assert [len(block) for block in blocks] == [1, 1]
        assert blocks[0] != blocks[1]
        assert any(f"addresses: {httpx.URL(second.url).host} for Services" in line for line in second.log)
        for one in (settled, second):
            one.assert_gate_passes()
        children = psutil.Process(second.process.pid).children(recursive=True)
        folder = second.folder
        assert len(children) >= 8
        tmpfs = [p for p in Path("/dev/shm").glob("mmrouter-*") if str(second.process.pid) in p.name]
    assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
    assert not folder.exists()
    assert not [p for p in tmpfs if p.exists()]


def ask(demo, text="Describe the morning light over the harbour, please, in one short sentence.", **options):
    body = {"model": "demo", "messages": [{"role": "user", "content": text}], "max_tokens": 2}
    return httpx.post(f"{demo.run['frontends'][0]['url']}/v1/chat/completions", json=body, timeout=30, **options)


def test_explain_finds_a_decision_on_any_replica_and_shows_every_candidate(demo):
    request_id = ask(demo).headers["x-mmrouter-request-id"]
    for frontend in demo.run["frontends"]:
        done = demo.mmrouter("explain", frontend["url"], request_id, "--json")
        trace = json.loads(done.stdout)
        assert trace["request_id"] == request_id
        assert len(trace["candidates"]) == 3
        assert len(trace["holders_now"]) == len(trace["keys"]) == trace["blocks"]
    shown = demo.mmrouter("explain", demo.url, request_id)
    assert shown.returncode == 0
    assert "why: cost" in shown.stdout
    assert "blocks and who holds them now" in shown.stdout


def test_explain_takes_the_ids_that_a_client_sees(demo):
    answer = ask(demo, headers={"x-request-id": "of/the-client"})
    assert answer.headers["x-request-id"] == "of/the-client"
    routed = answer.headers["x-mmrouter-request-id"]
    for name in ([answer.json()["id"]], ["of/the-client"], ["last"], []):
        done = demo.mmrouter("explain", demo.url, *name, "--json")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["request_id"] == routed


def test_explain_compares_a_decision_with_what_its_engine_holds(demo):
    request_id = ask(demo, "Compare what was predicted with what the engine holds after this.").headers[
        "x-mmrouter-request-id"
    ]
    for frontend in demo.run["frontends"]:
        done = demo.mmrouter("explain", frontend["url"], request_id, "--parity", "--json")
        trace = json.loads(done.stdout)
        assert (trace["parity"]["result"], trace["parity"]["blocks"]) == ("True", trace["blocks"]), trace["parity"]
    shown = demo.mmrouter("explain", demo.url, request_id, "--parity")
    assert f"the engine holds all {trace['blocks']} predicted blocks" in shown.stdout


def test_explain_asks_the_owner_when_the_asked_replica_does_not_know(demo):
    request_id = ask(demo).headers["x-mmrouter-request-id"]
    with demo.control(1) as other:
        assert other.get(f"/control/decisions/{request_id}?ask=false").status_code == 404
        assert other.get(f"/control/decisions/{request_id}").json()["request_id"] == request_id


def test_a_dry_run_explains_without_sending(demo, tmp_path):
    # A text of its own, so that no engine holds a block of it before.
    text = f"{secrets.token_hex(8)} comes before anything else, and then a question follows. " * 3
    file = tmp_path / "request.json"
    file.write_text(json.dumps({"model": "demo", "messages": [{"role": "user", "content": text}]}))
    for _ in range(2):
        done = demo.mmrouter("explain", demo.url, "--dry-run", str(file), "--json")
        trace = json.loads(done.stdout)
        assert (done.returncode, trace["exactness"], trace["attempts"]) == (0, "exact", [])
        assert trace["blocks"] > 2
        assert [candidate["overlap"] for candidate in trace["candidates"]] == [0, 0, 0]


@pytest.mark.parametrize(
    "arguments",
    [("explain", "x", "--dry-run", "y"), ("explain", "x"), ("up", "missing.yaml"), ("verify", "http://x:1")],
)
def test_wrong_use_is_a_sentence_and_status_2(demo, arguments):
    done = demo.mmrouter(*arguments)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stderr.strip()


def test_a_bad_resource_names_the_field(demo, tmp_path):
    text = (ROOT / "examples" / "demo.yaml").read_text().replace("role: worker", "role: wroker")
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    done = demo.mmrouter("up", str(file))
    assert done.returncode == 2
    assert "spec.pools[0].role" in done.stderr


def test_headers_that_tell_what_others_asked_need_the_control_token(demo):
    headers = {name for name in ask(demo).headers if name.startswith("x-mmrouter")}
    assert headers == {"x-mmrouter-request-id"}


def test_the_control_port_refuses_a_wrong_token(demo):
    for path in ("/control/state", "/control/decisions", "/control/stream"):
        for headers in ({}, {"authorization": "Bearer nonsense"}):
            assert httpx.get(demo.controls[0] + path, headers=headers).status_code == 401


def test_the_control_stream_tells_of_state_at_once(demo):
    with demo.control() as client, client.stream("GET", "/control/stream") as stream:
        line = next(line for line in stream.iter_lines() if line.startswith("data: "))
    assert len(json.loads(line[6:])["workers"]) == 3


def test_health_and_metrics_stand_on_their_own_port(demo):
    texts = []
    for frontend in demo.run["frontends"]:
        ip = frontend["url"].split("//")[1].split(":")[0]
        assert httpx.get(f"http://{ip}:9090/healthz").status_code == 200
        assert httpx.get(f"http://{ip}:9090/readyz").json() == {"ready": True}
        page = partial(lambda ip: httpx.get(f"http://{ip}:9090/metrics").text, ip)
        wait_for(lambda page=page: 'mmrouter_workers{standing="verified"} 3.0' in page(), 30, "every worker is counted")
        texts.append(page())
    # The frontend that ran a canary counted it; none has failed.
    series = [line for text in texts for line in text.splitlines() if line.startswith("mmrouter_parity_total{")]
    counted = [line for line in series if not line.endswith(" 0.0")]
    assert any('result="True"' in line for line in counted)
    assert not any('result="False"' in line for line in counted)


def test_the_demo_ends_with_exact_hits_and_a_lower_round_robin_figure():
    done = subprocess.run(
        [sys.executable, "-m", "mmrouter_cli", "up", "examples/demo.yaml", "--demo", "--json"],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=ROOT,
    )
    result = json.loads(done.stdout.splitlines()[-1])
    assert (done.returncode, result["passed"]) == (0, True), done.stderr[-3000:]
    assert result["hit_ratio"] > result["round_robin"]["hit_ratio"]
    assert [row["failure"] for row in result["rows"]] == [""] * len(result["rows"])
    lines = done.stderr.splitlines()
    assert [line for line in lines if line.startswith("demo-worker-0: ready, ")], "the start is shown pod by pod"
    (log,) = (line.removeprefix("log: ") for line in lines if line.startswith("log: "))
    assert not [line for line in lines if " | " in line], "the pods' own output is not"
    assert not Path(log).exists(), "nothing failed"


def test_the_log_of_a_start_that_failed_stays_and_is_named(tmp_path):
    command = [sys.executable, "-m", "mmrouter_cli", "up", "examples/demo.yaml", "--wait", "0.5"]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=ROOT, env=environment)
    assert done.returncode == 1, done.stderr[-3000:]
    (log,) = tmp_path.glob("mmrouter-demo-*.log")
    assert f"log: {log}" in done.stderr.splitlines()
    assert "not ready after 0.5 s" in done.stderr
    assert " demo | addresses: " in log.read_text()
    assert log.stat().st_mode & 0o777 == 0o600


def test_a_killed_up_leaves_no_child_behind():
    with running(ROOT / "examples" / "demo.yaml") as other:
        children = psutil.Process(other.process.pid).children(recursive=True)
        os.kill(other.process.pid, signal.SIGKILL)
        other.process.wait(5)
        wait_for(
            lambda: not [c for c in children if c.is_running() and c.status() != psutil.STATUS_ZOMBIE],
            10,
            "children end with their parent",
        )
        wait_for(lambda: not other.folder.exists(), 10, "its run folder is removed by its guard")


FOUND = [(page, command) for page, command in commands() if page != CHART_PAGE and not needs_a_cluster(command)]


def test_the_pages_hold_commands():
    assert sum(page == "README.md" for page, _ in FOUND) >= 7


@pytest.mark.parametrize("command", [c for c in [*(c for _, c in FOUND), *tour()] if c.startswith("make ")])
def test_make_targets_exist(command):
    done = subprocess.run([*shlex.split(command, comments=True), "--dry-run"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("page", "command"), [c for c in FOUND if not c[1].startswith("make ")])
def test_commands_succeed_as_they_stand(page, command, demo):
    if command.startswith(("URL=", ".venv/bin/mmrouter up")):
        return  # the fixture runs this very command; its endpoint takes the place of URL
    if "REQUEST_ID" in command:
        answer = subprocess.run(
            ["bash", "-c", _here(_curl(), demo)], cwd=ROOT, capture_output=True, text=True, check=True
        )
        command = command.replace("REQUEST_ID", re.search(r"x-mmrouter-request-id: (\S+)", answer.stdout)[1])
    done = subprocess.run(["bash", "-c", _here(command, demo)], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "error" not in done.stdout


def _curl():
    return next(command for _, command in FOUND if command.startswith("curl"))


def _here(command, demo):
    return command.replace("$URL", demo.url).replace(".venv/bin/mmrouter", f"{sys.executable} -m mmrouter_cli")
