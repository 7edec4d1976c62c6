"""Replicas that an autoscaler decides, in a cluster that serves the metrics an autoscaler needs."""

from collections.abc import Iterator
from typing import Any

import pytest
from cluster.controlplane import ControlPlane
from cluster.deployments import MERGE, SECONDS, Deployed, named
from cluster.hollow_kubelet import Hollow
from cluster.operators import operator
from cluster.serving import pod_metrics
from waiting import wait_for


@pytest.fixture
def metrics(crd: ControlPlane) -> Iterator[ControlPlane]:
    """A cluster that serves the API group of pod metrics; it has no backend and gets no requests."""
    with pod_metrics(crd):
        yield crd


def test_the_autoscaler_owns_the_replicas_and_an_edit_of_its_own_stays(
    metrics: ControlPlane, kubelet: Hollow, namespace: str
) -> None:
    deployed = Deployed(metrics, namespace)
    with operator(metrics):
        _scale(deployed)


def _scale(deployed: Deployed) -> None:
    resource = named("scaled")
    resource["spec"]["pools"][0] |= {"autoscaling": {"minReplicas": 1, "maxReplicas": 4}}
    deployed.apply(resource)
    deployed.settled("scaled")
    autoscaler = wait_for(lambda: deployed.get("horizontalpodautoscalers", "scaled-worker"), SECONDS, "an autoscaler")
    assert autoscaler["spec"]["scaleTargetRef"]["name"] == "scaled-worker"
    path = deployed.path("deployments", "scaled-worker")
    scale = {"spec": {"replicas": 3}}
    deployed.plane.request("PATCH", f"{path}/scale", scale, MERGE, fieldManager="autoscaler").raise_for_status()
    # A change of the spec makes the operator apply that very Deployment again.
    resource["spec"]["pools"][0]["updates"] = {"maxSurge": 2}
    deployed.apply(resource)

    def applied() -> dict[str, Any] | None:
        worker = deployed.get("deployments", "scaled-worker")
        assert worker is not None
        return worker if worker["spec"]["strategy"]["rollingUpdate"]["maxSurge"] == 2 else None

    worker = wait_for(applied, SECONDS, "the new surge is applied")
    assert worker["spec"]["replicas"] == 3
