"""`mmrouter doctor` and `mmrouter status` from a machine beside the cluster, as somebody with kubectl has one."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from e2e.deploying import Deployed


@pytest.fixture
def outside(deployed: Deployed, monkeypatch: pytest.MonkeyPatch) -> Deployed:
    """The deployment, for a process that knows kubectl and stands in no pod."""
    monkeypatch.setenv("PATH", f"{deployed.cluster.bin}:{os.environ['PATH']}")
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    return deployed


def told(deployed: Deployed, command: str) -> tuple[int, Any]:
    where = (f"--namespace={deployed.namespace}", f"--kubeconfig={deployed.cluster.kubeconfig}", "--json")
    argv = [sys.executable, "-m", "mmrouter_cli", command, deployed.name, *where]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def test_doctor_finds_no_problem_on_a_node_with_a_kubelet(outside: Deployed) -> None:
    status, said = told(outside, "doctor")
    findings = [item for subject in said["subjects"] for item in subject["findings"]]
    assert [item for item in findings if item["level"] == "problem"] == []
    assert status == 0
    fine = {item["check"]: item["seen"] for item in findings if item["level"] == "ok"}
    for check in ("definition", "operator", "nodes", "Pod Security", "pods"):
        assert check in fine, [item for item in findings if item["level"] != "ok"]
    # What the kubelet says of the pods' own /dev/shm.
    assert "of /dev/shm is in use" in fine["shared memory"]


def test_no_forwarded_port_stays_open(outside: Deployed) -> None:
    told(outside, "doctor")
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert f"port-forward --namespace={outside.namespace}" not in listed


def test_status_shows_every_engine_proved(outside: Deployed) -> None:
    status, (view,) = told(outside, "status")
    assert (status, view["phase"]) == (0, "Ready")
    assert {worker["exact"] for worker in view["workers"]} == {"True"}
    where = {pod["metadata"]["name"]: pod["spec"]["nodeName"] for pod in outside.pods("worker")}
    assert {worker["name"]: worker["where"] for worker in view["workers"]} == where
