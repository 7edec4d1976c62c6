"""The resource of examples/full.yaml: what is accepted, what it defaults to, how it travels."""

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from mmrouter_lib.api import MMRouterDeployment, SpecError, block_size_of, load_deployment, parse_deployment, to_json

WHOLE: dict[str, Any] = {
    "apiVersion": "mmrouter.io/v1alpha1",
    "kind": "MMRouterDeployment",
    "metadata": {"name": "qwen-vl", "namespace": "inference", "uid": "1", "managedFields": [{}]},
    "spec": {
        "model": {
            "id": "Qwen/Qwen2.5-VL-7B-Instruct",
            "revision": "main",
            "servedName": "qwen",
            "volume": {"persistentVolumeClaim": {"claimName": "weights"}},
            "tokenSecret": {"name": "hf", "key": "token"},
            "trustRemoteCode": False,
        },
        "engine": {
            "type": "vllm",
            "image": "registry.example/vllm:0.32.0",
            "blockSize": 32,
            "chatTemplate": {"configMap": {"name": "t", "key": "template"}},
            "processor": {"minPixels": 3136, "maxPixels": 1003520},
            "kvConnector": {},
            "ecConnector": {},
            "args": [],
        },
        "frontend": {
            "replicas": 2,
            "resources": {},
            "maxHeldBytes": "1Gi",
            "service": {"type": "ClusterIP", "port": 80},
            "apiKeys": {"secret": {"name": "keys"}},
            "podTemplate": {},
        },
        "routing": {
            "policy": "kv",
            "overlapWeight": "1.0",
            "minPrefillTokens": 512,
            "encoderScheduling": "auto",
            "maxQueuedRequests": 4096,
            "transfer": "none",
            "media": {
                "fetch": "allowList",
                "allowedHosts": ["images.example", "*.cdn.example", "10.0.0.1", "::1"],
                "allowedCIDRs": ["10.0.0.0/8", "fd00::/8"],
                "maxBytes": "20Mi",
                "maxRequestBytes": "64Mi",
                "maxPixels": 64000000,
                "maxImages": 32,
            },
        },
        "pools": [
            {
                "name": "enc-xpu",
                "role": "encoder",
                "replicas": 2,
                "weight": 20,
                "parallelism": {"tensor": 1, "data": 1},
                "accelerator": {"kind": "intel-xe", "count": 1},
                "nodeSelector": {"zone": "a"},
                "tolerations": [{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}],
                "args": [],
                "image": "",
                "sharedMemory": {"size": "8Gi", "scope": "pod"},
                "resources": {"requests": {"cpu": 4, "memory": "16Gi"}},
                "autoscaling": {"minReplicas": 1, "maxReplicas": 8, "metric": "kvUsage", "target": "0.7"},
                "updates": {"maxSurge": 1, "maxUnavailable": 0, "drainSeconds": 60},
                "podTemplate": {},
            },
            {"name": "worker", "role": "worker", "accelerator": {"kind": "nvidia"}},
        ],
        "verification": {"onFailure": "Degrade", "sampleRatio": "0.01", "timeoutSeconds": 300},
        "sidecar": {"resources": {}, "bufferEvents": 10000},
        "observability": {"podMonitor": "Auto", "otlpEndpoint": "", "debugHeaders": False},
        "networkPolicy": {"enabled": True},
        "paused": False,
    },
    "status": {
        "observedGeneration": 3,
        "phase": "Ready",
        "endpoint": "http://qwen-vl.inference.svc",
        "pools": [
            {"name": "enc-xpu", "role": "encoder", "desired": 2, "ready": 2, "routable": 2, "verified": 2, "updated": 2}
        ],
        "routing": {"exactRatio": "0.998", "hitRatio": "0.83"},
        "conditions": [],
    },
}


def test_every_field_of_the_full_example_is_accepted() -> None:
    dep = parse_deployment(WHOLE)
    assert dep.metadata.namespace == "inference"
    assert dep.spec.routing.media.allowed_cidrs == ["10.0.0.0/8", "fd00::/8"]
    assert dep.spec.pools[0].resources.requests == {"cpu": "4", "memory": "16Gi"}
    assert dep.status is not None
    assert dep.status.pools[0].verified == 2


def test_the_shortest_resource_gets_the_defaults(document: Any) -> None:
    spec = parse_deployment(document()).spec
    assert spec.model.served_name == "qwen-vl"
    assert spec.model.revision == "main"
    assert (spec.frontend.replicas, spec.frontend.service.port) == (2, 80)
    assert (spec.routing.policy, spec.routing.overlap_weight, spec.routing.media.fetch) == ("kv", "1.0", "dataOnly")
    media = spec.routing.media
    assert (media.max_bytes, media.max_request_bytes, media.max_pixels, media.max_images) == (
        "20Mi",
        "64Mi",
        64_000_000,
        32,
    )
    pool = spec.pools[0]
    assert (pool.accelerator.devices, pool.shared_memory.size, pool.updates.max_surge) == (1, "8Gi", 1)
    assert (spec.sidecar.buffer_events, spec.verification.timeout_seconds) == (10_000, 300)
    assert not spec.observability.debug_headers


def test_a_resource_survives_a_round_trip_through_the_config_file(tmp_path: Path) -> None:
    dep = parse_deployment(WHOLE)
    path = tmp_path / "deployment.json"
    path.write_text(json.dumps(to_json(dep)))
    assert load_deployment(path).spec == dep.spec
    assert load_deployment(path).metadata.name == dep.metadata.name


def test_the_config_file_has_only_the_users_fields(document: Any) -> None:
    """A default written out would stop a pod of the release before from reading the file."""
    doc = document()
    assert to_json(parse_deployment(doc))["spec"] == doc["spec"]


def test_a_file_that_is_no_json_is_named(tmp_path: Path) -> None:
    path = tmp_path / "deployment.json"
    path.write_text("{")
    with pytest.raises(SpecError, match=r"^deployment\.json: not JSON"):
        load_deployment(path)


def test_values_cannot_be_changed(document: Any) -> None:
    dep = parse_deployment(document())
    with pytest.raises(ValidationError):
        dep.spec.paused = True


@pytest.mark.parametrize(
    ("kind", "size"), [("nvidia", 16), ("amd", 16), ("intel-i915", 64), ("intel-xe", 64), ("gaudi", 128), ("cpu", 128)]
)
def test_block_size_is_the_pools_then_the_engines_then_the_accelerators(document: Any, kind: str, size: int) -> None:
    pool = {"name": "worker", "role": "worker", "accelerator": {"kind": kind}}
    dep = parse_deployment(document(pools=[pool]))
    assert block_size_of(dep, dep.spec.pools[0]) == size
    dep = parse_deployment(document(engine={"type": "vllm", "blockSize": 32}, pools=[pool]))
    assert block_size_of(dep, dep.spec.pools[0]) == 32
    dep = parse_deployment(document(engine={"type": "vllm", "blockSize": 32}, pools=[{**pool, "blockSize": 48}]))
    assert block_size_of(dep, dep.spec.pools[0]) == 48


def test_a_pool_is_found_by_name(document: Any) -> None:
    dep = parse_deployment(document())
    assert dep.pool("worker").replicas == 2
    with pytest.raises(KeyError):
        dep.pool("other")


def _walk(schema: dict[str, Any], path: str = "") -> list[tuple[str, dict[str, Any]]]:
    found = [(path, schema)]
    for name, child in schema.get("properties", {}).items():
        found += _walk(child, f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            found += _walk(schema[key], f"{path}[]")
    for child in schema.get("anyOf", []):
        found += _walk(child, path)
    return found


def _definitions() -> list[tuple[str, dict[str, Any]]]:
    definitions = MMRouterDeployment.model_json_schema()["$defs"]
    del definitions["Metadata"]  # Kubernetes' own
    return [node for name, schema in definitions.items() for node in _walk(schema, name)]


def test_every_field_is_bounded() -> None:
    """Without bounds the API server cannot estimate the cost of the CRD's rules and refuses it."""
    unbounded = []
    for path, schema in _definitions():
        kind = schema.get("type")
        if schema.get("x-kubernetes-preserve-unknown-fields") or "enum" in schema or "const" in schema:
            continue
        if kind == "string" and "maxLength" not in schema:
            unbounded.append(path)
        if kind == "array" and "maxItems" not in schema:
            unbounded.append(path)
        if kind == "integer" and "minimum" not in schema:
            unbounded.append(path)
        if kind == "object" and "properties" not in schema and "maxProperties" not in schema:
            unbounded.append(path)
    assert unbounded == []


def test_every_field_is_described_for_kubectl_explain() -> None:
    silent = [
        f"{path}.{name}"
        for path, schema in _definitions()
        for name, child in schema.get("properties", {}).items()
        if "description" not in child and "$ref" not in child
    ]
    assert silent == []


def test_immutable_fields_are_described_as_immutable() -> None:
    definitions = MMRouterDeployment.model_json_schema()["$defs"]
    for name, field in (("Model", "id"), ("EngineSpec", "type"), ("Pool", "role")):
        assert "Immutable" in definitions[name]["properties"][field]["description"]
