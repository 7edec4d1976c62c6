"""Replicas that an autoscaler decides, in a cluster that serves the metrics an autoscaler needs."""

from collections.abc import Iterator
from typing import Any

import pytest
from cluster.controlplane import ControlPlane, wait_for
from cluster.deployed import MERGE, SECONDS, Deployed, named
from cluster.hollow import Hollow
from cluster.operators import operator

METRICS: dict[str, Any] = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {
        "name": "stand-ins.custom.metrics.k8s.io",
        # The API server keeps this group for Kubernetes' own projects.
        "annotations": {"api-approved.kubernetes.io": "unapproved, a test"},
    },
    "spec": {
        "group": "custom.metrics.k8s.io",
        "names": {"plural": "stand-ins", "singular": "stand-in", "kind": "StandIn", "listKind": "StandInList"},
        "scope": "Namespaced",
        "versions": [
            {"name": "v1beta2", "served": True, "storage": True, "schema": {"openAPIV3Schema": {"type": "object"}}}
        ],
    },
}
CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"


@pytest.fixture
def metrics(crd: ControlPlane) -> Iterator[ControlPlane]:
    """A cluster that serves the API group of pod metrics; nobody is behind it, and nobody asks."""
    crd.request("POST", CRDS, METRICS).raise_for_status()
    try:
        wait_for(lambda: crd.request("GET", "/apis/custom.metrics.k8s.io/v1beta2").is_success, SECONDS, "it is served")
        yield crd
    finally:
        crd.request("DELETE", f"{CRDS}/{METRICS['metadata']['name']}")


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
