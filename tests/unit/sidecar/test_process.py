"""The process of a sidecar: it starts, resumes after a kill, ends in order, and refuses a wrong configuration."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest


def run(environment: dict[str, str]) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "mmrouter_sidecar"]
    return subprocess.Popen(command, env={**os.environ, **environment}, stderr=subprocess.PIPE, text=True)


def until(process: "subprocess.Popen[str]", words: str) -> str:
    """Read the log until a line holds ``words``."""
    assert process.stderr is not None
    return next(line for line in process.stderr if words in line)


def test_a_killed_process_resumes_and_a_terminated_one_ends_in_order(environment: dict[str, str]) -> None:
    first = run(environment)
    worker = until(first, "ready").split("worker ")[1]
    first.kill()
    first.communicate()
    second = run(environment)
    assert until(second, "ready").split("worker ")[1] == worker, "name and epoch are those of the journal"
    second.send_signal(signal.SIGTERM)
    _, rest = second.communicate(timeout=600)
    assert second.returncode == 0
    assert "stopped at seq 0" in rest


@pytest.mark.parametrize("wrong", ["variable", "resource", "CA"])
def test_a_wrong_configuration_exits_with_status_2_and_a_message(environment: dict[str, str], wrong: str) -> None:
    file = Path(environment["MMROUTER_CONFIG"]) / "deployment.json"
    if wrong == "resource":
        file.write_text('{"spec": {}}')
    if wrong == "CA":
        resource = json.loads(file.read_text())
        resource["spec"]["engine"]["tls"] = {"secretName": "engines"}
        file.write_text(json.dumps(resource))
    process = run(environment | ({"POD_UID": ""} if wrong == "variable" else {}))
    _, log = process.communicate(timeout=600)
    assert process.returncode == 2
    reasons = {"variable": "POD_UID is not set", "resource": "", "CA": f"{file.parent}/engine-ca: No such file"}
    assert f"configuration: {reasons[wrong]}" in log.splitlines()[-1]


def test_the_serving_process_imports_no_models_and_no_terminal_library() -> None:
    code = "import sys, mmrouter_sidecar.app; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "aiohttp" in loaded
    for unwanted in ("pydantic", "mmrouter_lib.api", "rich", "typer", "kubernetes", "tokenizers", "PIL"):
        assert unwanted not in loaded
