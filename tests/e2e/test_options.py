"""Parts of a deployment that are off by default, in real pods: traces at a collector, the hand-over plugin, and volumes
for images and embeddings in a namespace that enforces `restricted`.
"""

import copy
import json
from collections.abc import Iterator
from http import HTTPStatus
from typing import Any

import pytest
from chart.helm import NAMESPACE
from cluster.access import Access
from cluster.resources import condition, delete
from e2e.deploying import (
    EC_FLAG,
    RESTRICTED,
    Deployed,
    choices,
    deploy,
    example,
    flag_field,
    make_model,
    mounted,
    run_pod,
    wait_or_dump,
)
from e2e.endpoints import manifest, reached
from e2e.node_memory import NodeMemory, default_class, node_memory
from e2e.staged_deployments import encoded
from e2e.test_placement import device, equip, label, without_devices
from waiting import wait_for

from mmrouter_lib.pod_paths import EMBEDDINGS_DIR, PLUGIN_DIR, SHARED_DIR
from mmrouter_operator.model.kinds import RESOURCE
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
IMAGES, EMBEDDINGS = "node-memory", "demo-embeddings"
"""Claims: the one that the resource names for images, and the one that the operator makes for embeddings."""
SHARED = {"sharedMemory": {"scope": "node", "size": "64Mi"}}
POOLS = {
    "enc-cpu": {"role": "encoder", "accelerator": {"kind": "cpu"}},
    "enc-xpu": {"role": "encoder", "accelerator": {"kind": "intel-xe"}},
    "worker": {"role": "worker", "accelerator": {"kind": "cpu"}, **SHARED},
    "renderer": {"role": "renderer", "accelerator": {"kind": "cpu"}, **SHARED},
}
GONE_SECONDS = 60.0


@pytest.fixture(scope="module")
def memory(operated: Access) -> Iterator[NodeMemory]:
    with without_devices(operated) as node, node_memory(operated, node) as made:
        equip(operated, node, {label("xe"): "true"}, {device("xe"): "1"})
        made.provide(IMAGES, "ReadWriteOnce", IMAGES)
        made.claim(IMAGES, "ReadWriteOnce", IMAGES)
        made.provide(EMBEDDINGS, "ReadWriteMany", default_class(operated))
        yield made


@pytest.fixture(scope="module")
def plugged(operated: Access, memory: NodeMemory) -> Deployed:
    """A worker and a renderer that share a volume of the node's memory, and encoders of two kinds that do not."""
    body = example()
    router = {"name": "router", "env": ALWAYS}
    body["spec"]["frontend"] = {"replicas": 1, "podTemplate": {"spec": {"containers": [router]}}}
    body["spec"]["routing"] = {"transfer": "nixl", "sharedVolume": {"persistentVolumeClaim": {"claimName": IMAGES}}}
    body["spec"]["pools"] = [{"name": name, "replicas": 1, **pool} for name, pool in POOLS.items()]
    make_model(operated, memory.namespace)
    return deploy(operated, memory.namespace, body)


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


def test_each_engine_gets_what_the_renderer_processed_by_the_first_way_that_its_memory_allows(
    plugged: Deployed, memory: NodeMemory
) -> None:
    """Simulated engines have no NIXL. All that share memory have the claimed volume, and nothing else of the node."""
    sharing = [pod for role in ("frontend", "worker", "renderer") for pod in plugged.pods(role)]
    assert [mounted(pod, SHARED_DIR)["persistentVolumeClaim"]["claimName"] for pod in sharing] == [IMAGES] * 3
    assert not any("hostPath" in volume for pod in sharing for volume in pod["spec"]["volumes"])
    with reached(plugged) as place, place.chat(plugged.name) as chat:
        decision = chat.decided(chat.image("plugin"), "what?")
    roles = {pod["metadata"]["name"]: role for role in ("encoder", "worker") for pod in plugged.pods(role)}
    assert {roles[each["engine"]]: each["how"] for each in decision["travelled"]} == {
        "encoder": "inline",
        "worker": "shm",
    }
    assert all("nixl" in {way["how"] for way in each["instead_of"]} for each in decision["travelled"])
    assert any("/slot-" in file for file in memory.files(IMAGES))


def test_encoders_of_two_kinds_hand_embeddings_over_by_files_of_the_claim_that_the_operator_makes(
    plugged: Deployed, memory: NodeMemory
) -> None:
    pods = [pod for role in ("encoder", "worker") for pod in plugged.pods(role)]
    assert [flag_field(pod, EC_FLAG, "ec_connector") for pod in pods] == ["ECExampleConnector"] * 3
    folders = [flag_field(pod, EC_FLAG, "ec_connector_extra_config") for pod in pods]
    assert folders == [{"shared_storage_path": EMBEDDINGS_DIR}] * 3
    assert [mounted(pod, EMBEDDINGS_DIR)["persistentVolumeClaim"]["claimName"] for pod in pods] == [EMBEDDINGS] * 3
    (choice,) = [line for line in choices(plugged) if line.startswith("embeddings")]
    assert "embeddings between enc-cpu, enc-xpu, worker: ECExampleConnector" in choice
    assert "files on a ReadWriteMany volume, as the pools are cpu and intel-xe" in choice

    def spent() -> dict[str, float]:
        return {role: sum(encoded(plugged, role).values()) for role in ("encoder", "worker")}

    before, files = spent(), set(memory.files(EMBEDDINGS))
    with reached(plugged) as place, place.chat(plugged.name) as chat:
        decision = chat.decided(chat.image("embedded"), "what?")
    after = spent()
    tokens = decision["images"][0]["tokens"]
    assert {role: after[role] - before[role] for role in after} == {"encoder": tokens, "worker": 0}
    assert len(set(memory.files(EMBEDDINGS)) - files) == 1


def test_of_a_deleted_deployment_neither_an_image_nor_the_operators_claim_stays(
    plugged: Deployed, memory: NodeMemory
) -> None:
    assert memory.files(IMAGES)
    cluster, claim = plugged.cluster, f"{memory.claims}/{EMBEDDINGS}"
    delete(cluster, RESOURCE, plugged.namespace, plugged.name)

    def gone() -> bool:
        return not memory.files(IMAGES) and cluster.request("GET", claim).status_code == HTTPStatus.NOT_FOUND

    wait_or_dump(cluster, plugged.namespace, gone, GONE_SECONDS, "the volume is empty and the claim is gone")
