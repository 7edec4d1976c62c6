"""API groups that a cluster may serve, or not."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from cluster.controlplane import ControlPlane
from waiting import wait_for

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


@contextmanager
def pod_metrics(plane: ControlPlane) -> Iterator[None]:
    """Serve the API group of pod metrics until the block ends; it has no backend and gets no requests."""
    plane.request("POST", CRDS, METRICS).raise_for_status()
    try:
        wait_for(lambda: plane.request("GET", "/apis/custom.metrics.k8s.io/v1beta2").is_success, 20, "it is served")
        yield
    finally:
        plane.request("DELETE", f"{CRDS}/{METRICS['metadata']['name']}")
