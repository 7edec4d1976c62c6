"""Children whose APIs a cluster may lack: made where they are served, told where they are demanded and not served."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster.controlplane import APPLY, ControlPlane
from cluster.deployments import LABEL, SECONDS, Deployed, named
from cluster.operators import operator
from waiting import wait_for

from mmrouter_operator.status.conditions import AUTOSCALING, MONITORING

TEXT = {"type": "string"}
NUMBER = {"type": "integer", "format": "int32"}
LABELS = {"type": "object", "additionalProperties": TEXT}
PROMETHEUS = "http://prometheus.monitoring.svc:9090"


def fields(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


def many(item: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": item}


EXPRESSION = fields(key=TEXT, operator=TEXT, values=many(TEXT))
POLICIES = many(fields(type=TEXT, value=NUMBER, periodSeconds=NUMBER))
SCALE_DOWN = fields(stabilizationWindowSeconds=NUMBER, selectPolicy=TEXT, policies=POLICIES)
ENDPOINT = fields(
    port=TEXT,
    path=TEXT,
    interval=TEXT,
    relabelings=many(fields(sourceLabels=many(TEXT), targetLabel=TEXT, replacement=TEXT)),
)
SCHEMAS = {
    ("monitoring.coreos.com", "v1", "PodMonitor"): fields(
        selector=fields(matchLabels=LABELS, matchExpressions=many(EXPRESSION)),
        namespaceSelector=fields(any={"type": "boolean"}, matchNames=many(TEXT)),
        podMetricsEndpoints=many(ENDPOINT),
    ),
    ("keda.sh", "v1alpha1", "ScaledObject"): fields(
        scaleTargetRef=fields(apiVersion=TEXT, kind=TEXT, name=TEXT),
        pollingInterval=NUMBER,
        minReplicaCount=NUMBER,
        maxReplicaCount=NUMBER,
        fallback=fields(failureThreshold=NUMBER, replicas=NUMBER, behavior=TEXT),
        advanced=fields(horizontalPodAutoscalerConfig=fields(behavior=fields(scaleDown=SCALE_DOWN))),
        triggers=many(fields(type=TEXT, metricType=TEXT, metadata=LABELS)),
    ),
}
"""The fields that are used, with the types that Prometheus operator 0.85 and KEDA 2.21 give them. Server-side apply
refuses every field that is not declared."""


def definitions() -> Iterator[dict[str, Any]]:
    for (group, version, kind), spec in SCHEMAS.items():
        plural = f"{kind.lower()}s"
        yield {
            "apiVersion": "apiextensions.k8s.io/v1",
            "kind": "CustomResourceDefinition",
            "metadata": {"name": f"{plural}.{group}"},
            "spec": {
                "group": group,
                "scope": "Namespaced",
                "names": {"kind": kind, "plural": plural, "singular": kind.lower(), "listKind": f"{kind}List"},
                "versions": [
                    {"name": version, "served": True, "storage": True, "schema": {"openAPIV3Schema": fields(spec=spec)}}
                ],
            },
        }


@pytest.fixture
def optional_apis(crd: ControlPlane) -> Iterator[ControlPlane]:
    """The control plane, which serves PodMonitors and ScaledObjects for one test."""
    paths = []
    for body in definitions():
        path = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{body['metadata']['name']}"
        crd.request("PATCH", path, body, APPLY, fieldManager="test").raise_for_status()
        paths.append(path)
    for group, version, kind in SCHEMAS:
        served = f"/apis/{group}/{version}/{kind.lower()}s"
        wait_for(lambda served=served: crd.request("GET", served).is_success, SECONDS, f"{kind} is served")
    yield crd
    for path in paths:
        crd.request("DELETE", path).raise_for_status()
    for path in paths:
        wait_for(lambda path=path: crd.request("GET", path).status_code == 404, SECONDS, f"{path} is gone")


def scaled(name: str) -> dict[str, Any]:
    resource = named(name)
    resource["spec"]["pools"][0]["autoscaling"] = {"minReplicas": 2, "maxReplicas": 6}
    resource["spec"]["observability"] = {"podMonitor": "Enabled"}
    return resource


def spec_of(plane: ControlPlane, api: str, namespace: str, plural: str, name: str) -> dict[str, Any]:
    path = f"/apis/{api}/namespaces/{namespace}/{plural}"
    items = wait_for(
        lambda: plane.request("GET", path, labelSelector=f"{LABEL}={name}").raise_for_status().json()["items"],
        SECONDS,
        f"{plural} of {name}",
    )
    found = {item["metadata"]["name"]: item["spec"] for item in items}
    assert all(item["metadata"]["ownerReferences"][0]["controller"] for item in items)
    return found


def test_children_that_cannot_exist_are_reported(crd: ControlPlane, namespace: str) -> None:
    with operator(crd):
        deployed = Deployed(crd, namespace)
        deployed.apply(scaled("lacking"))
        monitoring = deployed.await_condition("lacking", MONITORING, "False", "PodMonitorUnavailable")
        assert "monitoring.coreos.com/v1" in monitoring["message"]
        scaling = deployed.await_condition("lacking", AUTOSCALING, "False", "AutoscalingUnavailable")
        assert "worker" in scaling["message"]
        assert ("deployments", "lacking-worker") in deployed.settled("lacking")


def test_pod_monitors_and_scaled_objects_are_made_where_they_are_served(
    optional_apis: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump({"prometheusAddress": PROMETHEUS}))
    plane = optional_apis
    with operator(plane, options=[f"--config={config}"]):
        deployed = Deployed(plane, namespace)
        deployed.apply(scaled("vl"))
        deployed.await_condition("vl", MONITORING, "True")
        deployed.await_condition("vl", AUTOSCALING, "True")
        monitors = spec_of(plane, "monitoring.coreos.com/v1", namespace, "podmonitors", "vl")
        assert set(monitors) == {"vl-frontend", "vl-engine"}
        (scaler,) = spec_of(plane, "keda.sh/v1alpha1", namespace, "scaledobjects", "vl").values()
        assert scaler["scaleTargetRef"]["name"] == "vl-worker"
        assert scaler["triggers"][0]["metadata"]["serverAddress"] == PROMETHEUS
        without = named("vl")
        without["spec"]["observability"] = {"podMonitor": "Disabled"}
        deployed.apply(without)
        gone = f"/apis/monitoring.coreos.com/v1/namespaces/{namespace}/podmonitors"
        wait_for(lambda: not plane.request("GET", gone).json()["items"], SECONDS, "PodMonitors are pruned")
