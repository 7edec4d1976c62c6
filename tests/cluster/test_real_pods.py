"""A deployment from its YAML to answered requests: the real operator, control plane, routers and sidecars; engines are
simulated. Only images and the kubelet are missing, whose part the local substrate plays."""

import time
from collections.abc import Iterator

import pytest
from cluster.controlplane import ControlPlane, control_plane, wait_for
from cluster.hollow import hollow
from cluster.load import is_ready, load, pods
from cluster.operators import operator
from cluster.resources import ROOT, Object, apply, condition, resource, status
from cluster.runner import LocalRunner

NAME = "demo"
REPLICAS = 2
START_SECONDS = 90
ROLLOUT_SECONDS = 150
"""Pods of a machine with two busy CPUs take 5 to 10 seconds to start, and 5 to announce that they go."""
STATUS_SECONDS = 30.0
"""At most one write of a status in so long, under load that changes nothing else."""


@pytest.fixture(scope="module")
def real(kube_bin, tmp_path_factory) -> Iterator[ControlPlane]:  # type: ignore[no-untyped-def]
    """A control plane of its own with a node whose pods run, and an operator."""
    with control_plane(tmp_path_factory.mktemp("real"), kube_bin, ROOT / "crds") as plane:
        runner = LocalRunner(plane, ROOT / "examples")
        with hollow(plane, runner) as kubelet, operator(plane):
            kubelet.node("local")
            yield plane


@pytest.fixture(scope="module")
def namespace(real: ControlPlane) -> Iterator[str]:
    """The namespace of the deployment that these tests share; it is ready and proved."""
    with real.namespace() as name:
        apply(real, name, deployment())
        wait_for(lambda: is_done(real, name, 1), START_SECONDS, "Ready is True")
        yield name


def deployment(frontend: str = "1", engine: str = "1") -> Object:
    """The same deployment with another mark in the frontend's and the engines' pods."""
    made = resource(NAME, frontends=2, replicas=REPLICAS)
    made["spec"]["frontend"]["podTemplate"] = {"metadata": {"annotations": {"example.com/mark": frontend}}}
    made["spec"]["pools"][0]["podTemplate"] = {"metadata": {"annotations": {"example.com/mark": engine}}}
    return made


def is_done(plane: ControlPlane, namespace: str, generation: int) -> bool:
    ready = condition(plane, "Ready", namespace, NAME)
    return ready.get("status") == "True" and ready.get("observedGeneration") == generation


def marks(plane: ControlPlane, namespace: str, role: str) -> list[str]:
    """The marks of the pods that are ready."""
    found = [pod for pod in pods(plane, namespace, role=role) if is_ready(pod)]
    return [pod["metadata"]["annotations"]["example.com/mark"] for pod in found]


def test_a_deployment_becomes_ready_and_its_routing_is_proved(real: ControlPlane, namespace: str) -> None:
    told = status(real, namespace, NAME)
    conditions = {found["type"]: found["status"] for found in told["conditions"]}
    assert conditions["ExactRoutingVerified"] == "True", told
    assert conditions["SpecValid"] == conditions["FrontendReady"] == conditions["WorkersReady"] == "True", told
    with load(real, namespace, NAME) as seen:
        wait_for(lambda: seen.answered >= 20, 30, "requests are answered")
    assert seen.failures == []
    assert seen.exact == seen.answered


@pytest.mark.parametrize("role", ["worker", "frontend"])
def test_a_rollout_under_load_loses_no_request(real: ControlPlane, namespace: str, role: str) -> None:
    body = deployment(engine="2") if role == "worker" else deployment(engine="2", frontend="2")
    wanted = REPLICAS if role == "worker" else 2
    least = wanted
    with load(real, namespace, NAME) as seen:
        generation = apply(real, namespace, body)["metadata"]["generation"]
        deadline = time.monotonic() + ROLLOUT_SECONDS
        while time.monotonic() < deadline:
            now = marks(real, namespace, role)
            least = min(least, len(now))
            if now == ["2"] * wanted and is_done(real, namespace, generation):
                break
            assert not is_done(real, namespace, generation) or "1" not in now, "success was reported from old pods"
            time.sleep(0.1)
        else:
            pytest.fail(f"not rolled out: {status(real, namespace, NAME)}")
        answered = seen.answered
        wait_for(lambda: seen.answered > answered + 5, 20, "the new pods answer")
    assert seen.failures == []
    assert least >= wanted - 1
    assert condition(real, "ExactRoutingVerified", namespace, NAME)["status"] == "True"
