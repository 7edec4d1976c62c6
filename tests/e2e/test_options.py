"""Parts of a deployment that are off by default, in real pods: traces at a collector, and the hand-over plugin."""

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest
from chart.helm import NAMESPACE
from cluster.access import Access
from cluster.resources import condition
from e2e.deploying import RESTRICTED, Deployed, deploy, deployment, example, make_model, run_pod
from e2e.endpoints import manifest, reached
from waiting import wait_for

from mmrouter_lib.pod_paths import PLUGIN_DIR
from mmrouter_operator.render.pod.engine import PLUGIN_CONTAINER

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
    found = cluster.read(operator)["spec"]["template"]["spec"]
    pod = copy.deepcopy(manifest(found["containers"][0]["image"]))
    pod["metadata"]["name"] = COLLECTOR
    container = pod["spec"]["containers"][0]
    container["command"] = ["python3", "-c", PROGRAM]
    container["readinessProbe"]["tcpSocket"]["port"] = PORT
    return run_pod(cluster, namespace, pod)


@pytest.fixture(scope="module")
def traced(operated: Access) -> Iterator[Deployed]:
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
        output = traced.cluster.kubectl("-n", traced.namespace, "logs", COLLECTOR).stdout
        found = {row["name"]: row for row in map(json.loads, output.splitlines()) if row["trace"] == TRACE}
        return found if "POST /v1/chat/completions" in found else None

    rows: dict[str, dict[str, Any]] = wait_for(spans, 20, "the collector has the request's spans", every=0.2)
    server = rows.pop("POST /v1/chat/completions")
    assert server["parent"] == PARENT
    assert set(rows) == {"receive", "intake", "prompt", "schedule", "engine"}
    assert {row["parent"] for row in rows.values()} == {server["id"]}
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
    assert SECRET not in "".join(row["all"] for row in (server, *rows.values()))


ALWAYS = [{"name": "MMROUTER_HANDOVER", "value": "always"}]
"""Also where bytes were the cheaper way, as they are for small images."""


@pytest.fixture(scope="module")
def plugged(operated: Access) -> Iterator[Deployed]:
    body = example()
    router = {"name": "router", "env": ALWAYS}
    body["spec"]["frontend"] = {"replicas": 1, "podTemplate": {"spec": {"containers": [router]}}}
    body["spec"]["routing"] = {"transfer": "nixl"}
    pool = {"replicas": 1, "accelerator": {"kind": "cpu"}}
    body["spec"]["pools"] = [{"name": role, "role": role, **pool} for role in ("worker", "renderer")]
    with deployment(operated, body) as made:
        yield made


def test_an_init_container_brings_the_plugin_and_the_engines_own_command_runs_with_it(plugged: Deployed) -> None:
    for role in ("worker", "renderer"):
        (pod,) = plugged.pods(role)
        images = {one["name"]: one["image"] for one in (*pod["spec"]["initContainers"], *pod["spec"]["containers"])}
        assert images[PLUGIN_CONTAINER] != images["engine"]
        name = pod["metadata"]["name"]
        result = plugged.execute(
            name, "engine", "sh", "-c", "tr '\\0' '\\n' </proc/1/environ; tr '\\0' ' ' </proc/1/cmdline"
        )
        assert result.returncode == 0, result.stderr
        assert f"PYTHONPATH={PLUGIN_DIR}" in result.stdout
        assert "VLLM_PLUGINS=mmrouter\n" in result.stdout
        assert f"vllm {'launch render' if role == 'renderer' else 'serve'} " in result.stdout.splitlines()[-1]
        wrote = plugged.execute(name, "engine", "sh", "-c", f": >{PLUGIN_DIR}/x")
        assert "Read-only file system" in wrote.stderr, "the engine cannot change it"
    assert condition(plugged.cluster, "PodSecurityRestricted", plugged.namespace, plugged.name)["status"] == "True"


def test_what_the_renderer_processed_reaches_the_engine_by_the_last_way_that_is_left(plugged: Deployed) -> None:
    """Simulated engines have no NIXL, and pods of scope pod share no memory."""
    with reached(plugged) as place, place.chat(plugged.name) as chat:
        decision = chat.decided(chat.image("plugin"), "what?")
    (one,) = decision["travelled"]
    assert one["how"] == "inline", decision["travelled"]
    assert {each["how"] for each in one["instead_of"]} >= {"nixl"}
