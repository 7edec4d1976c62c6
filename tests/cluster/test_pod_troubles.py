"""What keeps pods from running becomes a condition with its reason, and goes when the cause goes."""

from collections.abc import Iterator

import pytest
from cluster.controlplane import ControlPlane
from cluster.hollow_kubelet import Hollow
from cluster.operators import operator
from cluster.resources import Object, apply, condition, resource
from waiting import wait_for

SECONDS = 20
ENGINES = {"mmrouter.io/role": "worker"}


@pytest.fixture(scope="module")
def plane(crd: ControlPlane, kubelet: Hollow) -> Iterator[ControlPlane]:
    with operator(crd):
        yield crd


def blocked(plane: ControlPlane, namespace: str) -> tuple[str, str]:
    """Return the reason and the message of what keeps the rollout from going on."""
    progressing: Object = condition(plane, "Progressing", namespace)
    return progressing.get("reason", ""), progressing.get("message", "")


@pytest.mark.parametrize(
    ("waiting", "reason"),
    [
        ("ImagePullBackOff", "ImagePullFailed"),
        ("CreateContainerConfigError", "ContainerConfigError"),
        ("CrashLoopBackOff", "CrashLoopBackOff"),
    ],
)
def test_a_container_that_does_not_run_is_reported_until_it_does(
    plane: ControlPlane, kubelet: Hollow, namespace: str, waiting: str, reason: str
) -> None:
    rule = kubelet.hold(namespace, ENGINES, waiting, "the runtime's own words", "engine")
    apply(plane, namespace, resource())
    wait_for(lambda: blocked(plane, namespace)[0] == reason, SECONDS, f"Progressing says {reason}")
    assert "the runtime's own words" in blocked(plane, namespace)[1]
    assert condition(plane, "Ready", namespace)["status"] == "False"
    kubelet.release(rule)
    wait_for(lambda: blocked(plane, namespace)[0] != reason, SECONDS, "the reason is gone")


def test_a_missing_accelerator_is_reported_in_the_schedulers_words(plane: ControlPlane, namespace: str) -> None:
    pool = {"name": "worker", "role": "worker", "replicas": 1, "accelerator": {"kind": "amd"}}
    apply(plane, namespace, resource(pools=[pool]))
    wait_for(lambda: blocked(plane, namespace)[0] == "Unschedulable", SECONDS, "Progressing says Unschedulable")
    assert "0/" in blocked(plane, namespace)[1]
