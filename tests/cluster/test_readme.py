"""The commands of the pages that need a cluster, in their order; the operator runs beside them."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster.controlplane import ControlPlane
from cluster.hollow_kubelet import Hollow
from cluster.operators import Replica, operator
from doc_commands import CHART_PAGE, ROOT, commands, needs_a_cluster
from waiting import wait_for

FOUND = [(page, command) for page, command in commands() if page != CHART_PAGE and needs_a_cluster(command)]
STARTS_THE_OPERATOR = ".venv/bin/mmrouter operator"


@pytest.fixture(scope="module")
def running(crd: ControlPlane, kubelet: Hollow) -> Iterator[Replica]:
    """An operator, and nodes that take the examples' pods."""
    with operator(crd) as replica:
        yield replica


def test_the_readme_applies_the_shortest_example() -> None:
    assert ("README.md", "kubectl apply -f examples/mmrouter.yaml") in FOUND


@pytest.mark.parametrize(("page", "command"), FOUND)
def test_commands_succeed_as_they_stand(page: str, command: str, running: Replica, kube_bin: Path) -> None:
    if command.startswith(STARTS_THE_OPERATOR):
        options = command.split()[2:]
        assert subprocess.run(
            [sys.executable, "-m", "mmrouter_cli", "operator", *options, "--help"], capture_output=True, check=True
        )
        return  # the fixture runs it
    if "qwen-vl" in command:
        wait_for(lambda: _has_status(running.plane), 20, "the example has a status")
    done = _shell(command, running.plane, kube_bin)
    assert done.returncode == 0, done.stdout + done.stderr


def _has_status(plane: ControlPlane) -> bool:
    done = plane.kubectl("get", "mmrd", "qwen-vl", "-o", "jsonpath={.status.phase}")
    return done.returncode != 0 or bool(done.stdout)


def _shell(command: str, plane: ControlPlane, kube_bin: Path) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"KUBECONFIG": str(plane.kubeconfig), "PATH": f"{kube_bin}:{os.environ['PATH']}"}
    command = command.replace(".venv/bin/mmrouter", f"{sys.executable} -m mmrouter_cli")
    return subprocess.run(["bash", "-c", command], cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
