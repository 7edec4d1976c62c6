"""A deployment from its YAML to answered requests: the real operator, control plane, routers and sidecars.

Engines are simulated, and the local substrate plays the kubelet and the images.
"""

import time

import pytest
from cluster.controlplane import ControlPlane
from cluster.failure_report import describe
from cluster.load import is_ready, load, pods
from cluster.resources import MARK, apply, condition, is_done, marked, status
from waiting import wait_for

REPLICAS = 2
ROLLOUT_SECONDS = 150
"""Pods of a machine with two busy CPUs take 5 to 10 seconds to start, and 5 to announce that they go."""


def marks(plane: ControlPlane, namespace: str, role: str) -> list[str]:
    """Return the marks of the pods that are ready."""
    found = [pod for pod in pods(plane, namespace, deployment="demo", role=role) if is_ready(pod)]
    return [pod["metadata"]["annotations"][MARK] for pod in found]


def test_a_deployment_becomes_ready_and_its_routing_is_proved(real: ControlPlane, proved: str) -> None:
    told = status(real, proved)
    conditions = {found["type"]: found["status"] for found in told["conditions"]}
    assert conditions["ExactRoutingVerified"] == "True", told
    assert conditions["SpecValid"] == conditions["FrontendReady"] == conditions["WorkersReady"] == "True", told
    with load(real, proved, "demo") as seen:
        wait_for(lambda: seen.answered >= 20, 30, "requests are answered")
    assert seen.failures == []
    assert seen.exact == seen.answered


@pytest.mark.parametrize("role", ["worker", "frontend"])
def test_a_rollout_under_load_loses_no_request(real: ControlPlane, proved: str, role: str) -> None:
    body = marked(engine="2") if role == "worker" else marked(engine="2", frontend="2")
    least = REPLICAS
    with load(real, proved, "demo") as seen:
        generation = apply(real, proved, body)["metadata"]["generation"]
        deadline = time.monotonic() + ROLLOUT_SECONDS
        while time.monotonic() < deadline:
            done, now = is_done(real, proved, "demo", generation), marks(real, proved, role)
            least = min(least, len(now))
            assert not done or "1" not in now, "success was reported from old pods"
            if done and now == ["2"] * REPLICAS:
                break
            time.sleep(0.1)
        else:
            pytest.fail(f"not rolled out within {ROLLOUT_SECONDS} s\n{describe(real, proved)}", pytrace=False)
        answered = seen.answered
        wait_for(lambda: seen.answered > answered + 5, 20, "the new pods answer")
    assert seen.failures == []
    assert least >= REPLICAS - 1
    assert condition(real, "ExactRoutingVerified", proved)["status"] == "True"
