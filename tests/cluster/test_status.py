"""`mmrouter status` on the real API server: what the resource says, all of a namespace, and changes as they come."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import IO

import pytest
from cluster.commands import mmrouter, views
from cluster.controlplane import ControlPlane, end
from cluster.hollow_kubelet import Hollow
from cluster.operators import operator
from cluster.resources import apply, condition, resource
from waiting import wait_for

SECONDS = 30


@pytest.fixture(scope="module")
def plane(crd: ControlPlane, kubelet: Hollow) -> Iterator[ControlPlane]:
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


def test_watching_prints_a_line_for_every_change_and_none_without(plane: ControlPlane, namespace: str) -> None:
    apply(plane, namespace, resource())
    judged(plane, namespace)
    argv = [sys.executable, "-m", "mmrouter_cli", "status", "demo", "-n", namespace, "--watch", "--json"]
    process = subprocess.Popen(
        [*argv, f"--kubeconfig={plane.kubeconfig}"], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert process.stdout is not None
        first = process.stdout.readline()
        apply(plane, namespace, resource(replicas=3))
        lines = [first]
        while json.loads(lines[-1])[0]["pools"][0]["desired"] != 3:
            lines.append(process.stdout.readline())
        assert len(set(lines)) == len(lines)
    finally:
        end(process)


def test_watching_outlives_the_api_server(plane: ControlPlane, namespace: str) -> None:
    apply(plane, namespace, resource())
    judged(plane, namespace)
    argv = [sys.executable, "-m", "mmrouter_cli", "status", "demo", "-n", namespace, "--watch", "--json"]
    process = subprocess.Popen(
        [*argv, f"--kubeconfig={plane.kubeconfig}"], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())[0]["notes"] == []
        plane.stop("apiserver")
        try:
            _until(process.stdout, lambda notes: any("does not answer" in note for note in notes))
        finally:
            plane.start("apiserver")
        _until(process.stdout, lambda notes: notes == [])
    finally:
        end(process)


def _until(lines: IO[str], fits: Callable[[list[str]], bool]) -> None:
    """Read until the notes of a line fit; the watch prints one for every change."""
    while not fits(json.loads(lines.readline())[0]["notes"]):
        pass
