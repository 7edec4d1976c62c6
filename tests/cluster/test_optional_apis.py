"""What a cluster serves besides or in a newer form: APIs of children that it may lack, definitions with more fields."""

import copy
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from artefacts import go_programs
from cluster.controlplane import ControlPlane
from cluster.deployments import LABEL, MERGE, SECONDS, Deployed, named, pod_metrics, served
from cluster.deployments import definition as definition_of
from cluster.hollow_kubelet import Hollow
from cluster.operators import operator
from waiting import wait_for

from mmrouter_lib.api.crd import NAME, definition
from mmrouter_operator.status.conditions import AUTOSCALING, GATEWAY, MONITORING

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
OF_GATEWAYS = ("inferencepools", "httproutes")


@pytest.fixture
def optional_apis(crd: ControlPlane) -> Iterator[ControlPlane]:
    with served(crd, *(definition_of(kind, group, version, spec) for (group, version, kind), spec in SCHEMAS.items())):
        yield crd


def gateway_definitions() -> list[dict[str, Any]]:
    """Return the definitions of Gateway API and its inference extension, of their Go modules."""
    files = [file for name in OF_GATEWAYS for file in go_programs("definitions").glob(f"*_{name}.yaml")]
    return [yaml.safe_load(file.read_text()) for file in files]


@pytest.fixture
def gateway_apis(crd: ControlPlane) -> Iterator[ControlPlane]:
    with served(crd, *gateway_definitions()):
        yield crd


def scaled(name: str) -> dict[str, Any]:
    resource = named(name)
    resource["spec"]["pools"][0]["autoscaling"] = {"minReplicas": 2, "maxReplicas": 6}
    resource["spec"]["observability"] = {"podMonitor": "Enabled"}
    return resource


def specs_of(deployed: Deployed, plural: str, name: str) -> dict[str, Any]:
    read = partial(deployed.plane.read, deployed.path(plural), labelSelector=f"{LABEL}={name}")
    items = wait_for(lambda: read()["items"], SECONDS, f"{plural} of {name}")
    assert all(item["metadata"]["ownerReferences"][0]["controller"] for item in items)
    return {item["metadata"]["name"]: item["spec"] for item in items}


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
        monitors = specs_of(deployed, "podmonitors", "vl")
        assert set(monitors) == {"vl-frontend", "vl-engine"}
        (scaler,) = specs_of(deployed, "scaledobjects", "vl").values()
        assert scaler["scaleTargetRef"]["name"] == "vl-worker"
        assert scaler["triggers"][0]["metadata"]["serverAddress"] == PROMETHEUS
        without = named("vl")
        without["spec"]["observability"] = {"podMonitor": "Disabled"}
        deployed.apply(without)
        wait_for(lambda: not plane.read(deployed.path("podmonitors"))["items"], SECONDS, "PodMonitors are pruned")


def test_the_pool_of_a_gateway_is_made_where_it_is_served_and_goes_with_the_mode(
    gateway_apis: ControlPlane, namespace: str
) -> None:
    with operator(gateway_apis):
        deployed, picked = Deployed(gateway_apis, namespace), named("vl")
        picked["spec"]["frontend"] = {**picked["spec"].get("frontend", {}), "mode": "endpointPicker"}
        deployed.apply(picked)
        (pool,) = specs_of(deployed, "inferencepools", "vl").values()
        assert pool["selector"]["matchLabels"] == {LABEL: "vl", "mmrouter.io/role": "worker"}
        assert (pool["endpointPickerRef"]["name"], pool["endpointPickerRef"]["port"]["number"]) == ("vl", 9002)
        ports = {port["name"] for port in deployed.child("services", "vl")["spec"]["ports"]}
        assert ports == {"http", "picker"}
        deployed.apply(named("vl"))
        pools = partial(gateway_apis.read, deployed.path("inferencepools"))
        wait_for(lambda: not pools()["items"], SECONDS, "the InferencePool is pruned")


def test_the_route_of_a_gateway_follows_its_field_and_what_the_gateway_reports_is_a_condition(
    gateway_apis: ControlPlane, namespace: str
) -> None:
    with operator(gateway_apis):
        deployed, routed = Deployed(gateway_apis, namespace), named("vl")
        gateway = {"parentRefs": [{"name": "public", "namespace": "infra"}], "modelHeader": "x-gateway-model-name"}
        routed["spec"]["frontend"] = {**routed["spec"].get("frontend", {}), "gateway": gateway}
        deployed.apply(routed)
        (route,) = specs_of(deployed, "httproutes", "vl").values()
        (parent,), (rule,) = route["parentRefs"], route["rules"]
        assert (parent["kind"], parent["namespace"], parent["name"]) == ("Gateway", "infra", "public")
        (backend,) = rule["backendRefs"]
        assert (backend["kind"], backend["name"], backend["port"]) == ("Service", "vl", 80)
        assert rule["matches"][0]["headers"][0]["value"] == "vl"
        deployed.await_condition("vl", GATEWAY, "Unknown", "NotReported")
        for status, reason in (("False", "NotAccepted"), ("True", "Accepted")):
            accepted = {"type": "Accepted", "status": status, "reason": "Word", "message": "in a sentence"}
            accepted["lastTransitionTime"] = "2026-11-28T00:00:00Z"
            controller = {"parentRef": gateway["parentRefs"][0], "controllerName": "example.com/gateway"}
            parents = [{**controller, "conditions": [accepted]}]
            place = f"{deployed.path('httproutes', 'vl')}/status"
            gateway_apis.request("PATCH", place, {"status": {"parents": parents}}, MERGE).raise_for_status()
            deployed.await_condition("vl", GATEWAY, status, reason)
        deployed.apply(named("vl"))
        routes = partial(gateway_apis.read, deployed.path("httproutes"))
        wait_for(lambda: not routes()["items"], SECONDS, "the HTTPRoute is pruned")


def test_the_autoscaler_owns_the_replicas_and_an_edit_of_its_own_stays(
    crd: ControlPlane, kubelet: Hollow, namespace: str
) -> None:
    deployed = Deployed(crd, namespace)
    resource = named("scaled")
    resource["spec"]["pools"][0] |= {"autoscaling": {"minReplicas": 1, "maxReplicas": 4}}
    place = ("deployments", "scaled-worker")
    with pod_metrics(crd), operator(crd):
        deployed.apply(resource)
        deployed.settled("scaled")
        scaler = wait_for(lambda: deployed.get("horizontalpodautoscalers", place[1]), SECONDS, "an autoscaler")
        assert scaler["spec"]["scaleTargetRef"]["name"] == place[1]
        scale, path = {"spec": {"replicas": 3}}, f"{deployed.path(*place)}/scale"
        crd.request("PATCH", path, scale, MERGE, fieldManager="autoscaler").raise_for_status()
        # A change of the spec makes the operator apply that very Deployment again.
        resource["spec"]["pools"][0]["updates"] = {"maxSurge": 2}
        deployed.apply(resource)

        def surge() -> Any:
            return deployed.child(*place)["spec"]["strategy"]["rollingUpdate"]["maxSurge"]

        wait_for(lambda: surge() == 2, SECONDS, "the new surge is applied")
        assert deployed.child(*place)["spec"]["replicas"] == 3


PATH = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{NAME}"
FIELD = 'ignored_fields{name="old",namespace='


@contextmanager
def newer(plane: ControlPlane) -> Iterator[None]:
    """Serve a definition with more fields that have defaults, in a section, in a pool and in one of their own."""
    spec: Any = copy.deepcopy(definition()["spec"])
    properties = spec["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
    properties["routing"]["properties"]["novelty"] = {"type": "integer", "default": 7}
    properties["routing"]["default"]["novelty"] = 7
    properties["pools"]["items"]["properties"]["novelty"] = {"type": "string", "default": "x"}
    section = {"one": {"type": "integer", "default": 1}, "two": {"type": "string"}}
    properties["section"] = {"type": "object", "properties": section, "default": {"one": 1}}
    try:
        plane.request("PATCH", PATH, {"spec": spec}, content_type=MERGE).raise_for_status()
        yield
    finally:
        plane.request("PATCH", PATH, {"spec": definition()["spec"]}, content_type=MERGE).raise_for_status()


def test_defaults_of_a_newer_definition_are_no_fault_of_the_user_and_what_a_user_says_is(
    crd: ControlPlane, kubelet: Hollow, namespace: str
) -> None:
    deployed = Deployed(crd, namespace)
    with operator(crd) as replica:
        deployed.made("old")
        before = deployed.condition("old", "SpecValid")
        with newer(crd):
            wait_for(
                lambda: "novelty" in deployed.resource("old")["spec"]["routing"], SECONDS, "the server fills it in"
            )
            touches = itertools.count()

            def seen() -> bool:
                # A watch shows an object in its new form when the object changes, and not before.
                note = {"metadata": {"annotations": {"touched": str(next(touches))}}}
                deployed.patch("mmrouterdeployments", "old", note)
                return FIELD in replica.metrics()

            wait_for(seen, SECONDS, "the operator has seen it")
            assert deployed.condition("old", "SpecValid") == before, "not even for a moment: its time is as it was"
            deployed.made("new")
            resource = named("said")
            resource["spec"]["section"] = {"two": "word"}
            deployed.apply(resource)
            refused = deployed.await_condition("said", "SpecValid", "False")
            assert "spec.section: no such field" in refused["message"], yaml.safe_dump(refused)
            for name in ("said", "new"):
                deployed.delete("mmrouterdeployments", name)
        assert deployed.condition("old", "SpecValid") == before
