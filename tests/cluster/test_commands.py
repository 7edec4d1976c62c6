"""`mmrouter status` on the real API server, and the commands of the pages that need a cluster, in their order."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest
from cluster.controlplane import ControlPlane, end
from cluster.hollow_kubelet import Hollow
from cluster.operators import mmrouter, operator, views
from cluster.resources import apply, condition, resource
from doc_commands import CHART_PAGE, ROOT, commands, needs_a_cluster
from waiting import wait_for

SECONDS = 30


@pytest.fixture(scope="module")
def plane(crd: ControlPlane, kubelet: Hollow) -> Iterator[ControlPlane]:
    """One with an operator, and nodes that take the examples' pods."""
    with operator(crd):
        yield crd


def judged(plane: ControlPlane, namespace: str, name: str = "demo") -> None:
    wait_for(lambda: condition(plane, "Ready", namespace, name), SECONDS, f"{name} is judged")


def test_a_deployment_is_shown_as_its_status_says(plane: ControlPlane, namespace: str) -> None:
    apply(plane, namespace, resource(replicas=2))
    judged(plane, namespace)
    wait_for(lambda: len(views(plane, "demo", "-n", namespace)[0]["workers"]) == 2, SECONDS, "two pods", every=0.5)
    (view,) = views(plane, "demo", "-n", namespace)
    assert view["name"] == f"{namespace}/demo"
    assert view["endpoint"] == f"http://demo.{namespace}.svc"
    assert [(pool["name"], pool["role"], pool["desired"]) for pool in view["pools"]] == [("worker", "worker", 2)]
    assert {item["type"] for item in view["conditions"]} >= {"Ready", "SpecValid", "ExactRoutingVerified"}
    assert all(worker["exact"].startswith("Unknown") for worker in view["workers"]), "hollow pods are never proved"


def test_without_a_name_all_of_the_namespace_are_shown(plane: ControlPlane, namespace: str) -> None:
    for name in ("one", "two"):
        apply(plane, namespace, resource(name))
        judged(plane, namespace, name)
    assert [view["name"] for view in views(plane, "-n", namespace)] == [f"{namespace}/one", f"{namespace}/two"]


def test_an_empty_namespace_says_so(plane: ControlPlane, namespace: str) -> None:
    done = mmrouter(plane, "status", "-n", namespace)
    assert (done.returncode, done.stdout.strip()) == (0, "there is no MMRouterDeployment in this namespace")


@contextmanager
def watched(plane: ControlPlane, namespace: str) -> Iterator[IO[str]]:
    """Deploy ``demo`` and give the lines of a watch of it."""
    apply(plane, namespace, resource())
    judged(plane, namespace)
    argv = [sys.executable, "-m", "mmrouter_cli", "status", "demo", "-n", namespace, "--watch", "--json"]
    process = subprocess.Popen(
        [*argv, f"--kubeconfig={plane.kubeconfig}"], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert process.stdout is not None
        yield process.stdout
    finally:
        end(process)


def test_watching_prints_a_line_for_every_change_and_none_without(plane: ControlPlane, namespace: str) -> None:
    with watched(plane, namespace) as shown:
        lines = [shown.readline()]
        apply(plane, namespace, resource(replicas=3))
        while json.loads(lines[-1])[0]["pools"][0]["desired"] != 3:
            lines.append(shown.readline())
        assert len(set(lines)) == len(lines)


def test_watching_outlives_the_api_server(plane: ControlPlane, namespace: str) -> None:
    with watched(plane, namespace) as lines:
        assert json.loads(lines.readline())[0]["notes"] == []
        plane.stop("apiserver")
        try:
            _until(lines, lambda notes: any("does not answer" in note for note in notes))
        finally:
            plane.start("apiserver")
        _until(lines, lambda notes: notes == [])


def _until(lines: IO[str], fits: Callable[[list[str]], bool]) -> None:
    """Read until the notes of a line fit; the watch prints one for every change."""
    while not fits(json.loads(lines.readline())[0]["notes"]):
        pass


FOUND = [(page, command) for page, command in commands() if page != CHART_PAGE and needs_a_cluster(command)]
STARTS_THE_OPERATOR = ".venv/bin/mmrouter operator"


def test_the_readme_applies_the_shortest_example() -> None:
    assert ("README.md", "kubectl apply -f examples/mmrouter.yaml") in FOUND


@pytest.mark.parametrize(("page", "command"), FOUND)
def test_commands_succeed_as_they_stand(
    page: str, command: str, plane: ControlPlane, kube_bin: Path, tmp_path: Path
) -> None:
    def has_status() -> bool:
        done = plane.kubectl("get", "mmrd", "qwen-vl", "-o", "jsonpath={.status.phase}")
        return done.returncode != 0 or bool(done.stdout)

    if command.startswith(STARTS_THE_OPERATOR):
        options = command.split()[2:]
        assert subprocess.run(
            [sys.executable, "-m", "mmrouter_cli", "operator", *options, "--help"], capture_output=True, check=True
        )
        return  # the fixture runs it
    if "qwen-vl" in command:
        wait_for(has_status, 20, "the example has a status")
    env = os.environ | {
        "KUBECONFIG": str(plane.kubeconfig),
        "PATH": f"{kube_bin}:{os.environ['PATH']}",
        "XDG_RUNTIME_DIR": str(tmp_path),  # `status` without a name prefers local deployments, such as other tests'
    }
    typed = command.replace(".venv/bin/mmrouter", f"{sys.executable} -m mmrouter_cli")
    done = subprocess.run(["bash", "-c", typed], cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
