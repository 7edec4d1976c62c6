"""Traces in real pods: a frontend's spans at a collector in a pod, by what operator and images make of the field."""

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest
from chart.helm import NAMESPACE
from cluster.access import Access
from e2e.deploying import RESTRICTED, Deployed, deploy, example, make_model
from e2e.endpoints import reached
from e2e.web import manifest
from waiting import wait_for

COLLECTOR, PORT = "collector", 4318
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SECRET = "secret of a prompt"
PROGRAM = """
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        got = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["content-length"])))
        for resource in got.resource_spans:
            about = {row.key: row.value.string_value for row in resource.resource.attributes}
            for scope in resource.scope_spans:
                for span in scope.spans:
                    told = {"name": span.name, "trace": span.trace_id.hex(), "parent": span.parent_span_id.hex()}
                    print(json.dumps({**told, "id": span.span_id.hex(), "about": about, "all": str(span)}), flush=True)
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_):
        pass

ThreadingHTTPServer(("", 4318), Handler).serve_forever()
"""


def collector(cluster: Access, namespace: str) -> str:
    """Run a collector in a pod from the operator's own image, which has OTLP's messages; return its address."""
    operator = f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments/mmrouter-operator"
    found = cluster.request("GET", operator).raise_for_status().json()["spec"]["template"]["spec"]
    pod = copy.deepcopy(manifest(found["containers"][0]["image"]))
    pod["metadata"]["name"] = COLLECTOR
    container = pod["spec"]["containers"][0]
    container["command"] = ["python3", "-c", PROGRAM]
    container["readinessProbe"]["tcpSocket"]["port"] = PORT
    pods = f"/api/v1/namespaces/{namespace}/pods"
    account = f"/api/v1/namespaces/{namespace}/serviceaccounts/default"
    wait_for(lambda: cluster.request("GET", account).is_success, 10, "the namespace has its account")
    cluster.request("POST", pods, pod).raise_for_status()

    def ready() -> str:
        status = cluster.request("GET", f"{pods}/{COLLECTOR}").raise_for_status().json()["status"]
        states = {each["type"]: each["status"] for each in status.get("conditions") or []}
        return str(status["podIP"]) if states.get("Ready") == "True" else ""

    return str(wait_for(ready, 60, "the collector is ready", every=0.1))


@pytest.fixture(scope="module")
def traced(operated: Access) -> Iterator[Deployed]:
    """One frontend and one engine; the frontend sends its spans to a pod beside it."""
    body = example()
    with operated.namespace(**RESTRICTED) as namespace:
        make_model(operated, namespace)
        body["spec"]["observability"] = {"otlpEndpoint": f"http://{collector(operated, namespace)}:{PORT}"}
        body["spec"]["frontend"]["replicas"] = body["spec"]["pools"][0]["replicas"] = 1
        yield deploy(operated, namespace, body)


def test_a_request_is_a_trace_at_the_collector_with_the_pod_that_served_it(traced: Deployed) -> None:
    with reached(traced) as where:
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        messages: list[Any] = [{"role": "user", "content": f"{SECRET}. Say something about the sea. " * 4}]
        answer = where.client().chat.completions.create(
            model=traced.name, messages=messages, max_tokens=4, extra_headers=headers
        )
    assert answer.choices[0].message.content

    def spans() -> dict[str, dict[str, Any]] | None:
        said = traced.cluster.kubectl("-n", traced.namespace, "logs", COLLECTOR).stdout
        found = {row["name"]: row for row in map(json.loads, said.splitlines()) if row["trace"] == TRACE}
        return found if "POST /v1/chat/completions" in found else None

    told: dict[str, dict[str, Any]] = wait_for(spans, 20, "the collector has the request's spans", every=0.2)
    server = told.pop("POST /v1/chat/completions")
    assert server["parent"] == PARENT
    assert set(told) == {"receive", "intake", "prompt", "schedule", "engine"}
    assert {row["parent"] for row in told.values()} == {server["id"]}
    (pod,) = traced.pods("frontend")
    about = {
        "k8s.namespace.name": traced.namespace,
        "k8s.deployment.name": f"{traced.name}-frontend",
        "k8s.pod.name": pod["metadata"]["name"],
        "k8s.pod.uid": pod["metadata"]["uid"],
        "k8s.node.name": pod["spec"]["nodeName"],
        "service.name": f"{traced.name}-frontend",
    }
    assert about.items() <= server["about"].items()
    assert SECRET not in "".join(row["all"] for row in (server, *told.values()))
