"""The resource of examples/full.yaml: what is accepted, what it defaults to; bad input names the field to correct."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from unit.conftest import examples
from unit.engines.conftest import document

from mmrouter_lib.api import SpecError, block_size_of, load_deployment, parse_deployment, quantity_bytes, to_json

WHOLE: dict[str, Any] = yaml.safe_load((Path(__file__).parents[3] / "examples" / "full.yaml").read_text())
COUNTS = dict.fromkeys(("desired", "ready", "routable", "verified", "updated"), 2)
STATUS = {"observedGeneration": 3, "phase": "Ready", "endpoint": "http://qwen-vl.inference.svc", "conditions": []}
STATUS |= {"routing": {"exactRatio": "0.998", "hitRatio": "0.83"}}
STATUS |= {"pools": [{"name": "enc-xpu", "role": "encoder", **COUNTS}]}


def test_every_field_of_the_full_example_is_accepted() -> None:
    metadata = {"name": "qwen-vl", "namespace": "inference", "uid": "1", "managedFields": [{}]}
    dep = parse_deployment({**WHOLE, "metadata": metadata, "status": STATUS})
    assert dep.metadata.namespace == "inference"
    assert dep.spec.routing.media.allowed_cidrs == ["10.20.0.0/16"]
    assert dep.spec.pools[0].accelerator.kind == "intel-xe"
    assert dep.status is not None
    assert dep.status.pools[0].verified == 2


def test_hosts_and_ranges_may_be_of_either_family_and_quantities_numbers() -> None:
    media = {"fetch": "allowList", "allowedHosts": ["a.example", "10.0.0.1", "::1"], "allowedCIDRs": ["fd00::/8"]}
    pool = document()["spec"]["pools"][0] | {"resources": {"requests": {"cpu": 4, "memory": "16Gi"}}}
    spec = parse_deployment(document(routing={"media": media}, pools=[pool])).spec
    assert spec.routing.media.allowed_hosts == media["allowedHosts"]
    assert spec.routing.media.allowed_cidrs == media["allowedCIDRs"]
    assert spec.pools[0].resources.requests == {"cpu": "4", "memory": "16Gi"}


def test_the_shortest_resource_gets_the_computed_defaults() -> None:
    spec = parse_deployment(document()).spec
    assert spec.model.served_name == "vl"
    assert spec.pools[0].accelerator.devices == 1


def test_a_resource_survives_a_round_trip_through_the_config_file(tmp_path: Path) -> None:
    dep = parse_deployment(WHOLE)
    path = tmp_path / "deployment.json"
    path.write_text(json.dumps(to_json(dep)))
    assert load_deployment(path).spec == dep.spec
    assert load_deployment(path).metadata.name == dep.metadata.name


def test_the_config_file_has_only_the_users_fields() -> None:
    """A default written out would stop a pod of the release before from reading the file."""
    doc = document()
    assert to_json(parse_deployment(doc))["spec"] == doc["spec"]


def test_a_file_that_is_no_json_is_named(tmp_path: Path) -> None:
    path = tmp_path / "deployment.json"
    path.write_text("{")
    with pytest.raises(SpecError, match=r"^deployment\.json: not JSON"):
        load_deployment(path)


def test_values_cannot_be_changed() -> None:
    dep = parse_deployment(document())
    with pytest.raises(ValidationError):
        dep.spec.paused = True


@pytest.mark.parametrize(
    ("kind", "size"), [("nvidia", 16), ("amd", 16), ("intel-i915", 64), ("intel-xe", 64), ("gaudi", 128), ("cpu", 128)]
)
def test_block_size_is_the_pools_then_the_engines_then_the_accelerators(kind: str, size: int) -> None:
    for engine, pool, wanted in (
        ({}, {}, size),
        ({"blockSize": 32}, {}, 32),
        ({"blockSize": 32}, {"blockSize": 48}, 48),
    ):
        dep = parse_deployment(document({"accelerator": {"kind": kind}, **pool}, engine={"type": "vllm", **engine}))
        assert block_size_of(dep, dep.spec.pools[0]) == wanted


QUANTITIES = {"0": 0, "1": 1, "20Mi": 20 << 20, "8Gi": 8 << 30, "1.5Ki": 1536, "2k": 2000, "3M": 3_000_000}
QUANTITIES |= {"1e3": 1000, "1.5E3": 1500, "2E": 2 * 10**18, "1Ei": 2**60, "500m": 1, "1500m": 2}


def test_a_quantity_is_read_as_kubernetes_reads_it() -> None:
    assert {text: quantity_bytes(text) for text in QUANTITIES} == QUANTITIES


@pytest.mark.parametrize(
    "text", ["", "Mi", "-1", "+1", "1 Mi", "1mi", "1KI", "1.", ".5", "1e", "1e99", "9999999999Ei", "1_0", "٣"]
)
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="quantity"):
        quantity_bytes(text)


CPU = {"kind": "cpu"}
NODE = {"scope": "node"}


def pool(name: str = "worker", role: str = "worker", **fields: Any) -> dict[str, Any]:
    return {"name": name, "role": role, "accelerator": {"kind": "nvidia"}, **fields}


def accelerator(**fields: Any) -> dict[str, Any]:
    return {"pools": [pool(accelerator=fields)]}


def media(**fields: Any) -> dict[str, Any]:
    return {"routing": {"media": fields}}


def tenants(**fields: Any) -> dict[str, Any]:
    return {"frontend": {"apiKeys": {"secret": {"name": "keys"}}, "tenants": fields}}


def pools(*items: dict[str, Any], **spec: Any) -> dict[str, Any]:
    return {"pools": [*items], **spec}


PIXELS = {"type": "vllm", "processor": {"minPixels": 9, "maxPixels": 4}}
SHM = {"transfer": "shm"}
SGLANG = {"type": "sglang"}
RED = {"name": "red", "concurrency": 2}
SCOPE = "needs scope: node on every pool"
DECODE = pool("d", "decode")
PICKER = {"frontend": {"mode": "endpointPicker"}}
RENDERER = pool("r", "renderer", accelerator=CPU)
ENCODER = pool("e", "encoder")
VOLUME = {"nfs": {"server": "s", "path": "/"}}
TLS = {"secretName": "engines"}
PARENT: dict[str, Any] = {"parentRefs": [{"name": "public"}]}
TWO = {"maxReplicas": 2}
CLAIMS = "pools[0].accelerator.claims"
CLAIM = {"name": "gpu", "resourceClaimTemplateName": "one-gpu"}

BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"unknown": 1}, "unknown", "no such field"),
    ({"network_policy": {}}, "network_policy", "no such field"),
    ({"paused": "yes"}, "paused", "boolean"),
    ({"model": {}}, "model.id", "is required"),
    ({"model": {"id": "a b"}}, "model.id", "does not match"),
    ({"model": {"id": "a", "volume": {}}}, "model.volume", "exactly one volume source"),
    ({"model": {"id": "a", "volume": {"hostPath": {}, "nfs": {}}}}, "model.volume", "exactly one volume source"),
    ({"model": {"id": "a", "volume": {"name": {}}}}, "model.volume", "exactly one volume source"),
    ({"engine": {"type": "tgi"}}, "engine.type", "must be 'vllm' or 'sglang', not 'tgi'"),
    ({"engine": {"type": "vllm", "blockSize": 0}}, "engine.blockSize", "greater than or equal to 1"),
    ({"engine": PIXELS}, "engine.processor.minPixels", "exceed"),
    ({"frontend": {"replicas": 0}}, "frontend.replicas", "greater than or equal to 1"),
    ({"frontend": {"replicas": "2"}}, "frontend.replicas", "valid integer"),
    ({"frontend": {"resources": {"limits": {"cpu": "lots"}}}}, "frontend.resources.limits.cpu", "is not a quantity"),
    ({"frontend": {"tls": {"secretName": "a"}}}, "frontend.service.port", "port 80 is the port of plain HTTP"),
    ({"frontend": {"apiKeys": {}}}, "frontend.apiKeys.secret", "is required"),
    ({"frontend": {"tenants": {}}}, "frontend.tenants", "needs apiKeys"),
    (tenants(default={"concurrency": 1}), "frontend.tenants.default", "must be at least as large"),
    (tenants(default={"requestsPerMinute": 0}), "frontend.tenants.default.requestsPerMinute", "or equal to 1"),
    (tenants(default={"priority": "urgent"}), "frontend.tenants.default.priority", "must be"),
    (tenants(named=[RED, {"name": "b", "requestsPerMinute": 1}]), "frontend.tenants.named[1]", "at least as large"),
    (tenants(named=[RED, RED]), "frontend.tenants.named[1].name", "'red' is already listed"),
    (tenants(named=[{"name": "a b"}]), "frontend.tenants.named[0].name", "does not match"),
    (tenants(maxWaitSeconds=-1), "frontend.tenants.maxWaitSeconds", "or equal to 0"),
    ({"routing": {"overlapWeight": 1.5}}, "routing.overlapWeight", 'decimals are written as strings: "1.5"'),
    ({"routing": {"overlapWeight": "-1"}}, "routing.overlapWeight", "does not match"),
    ({"routing": SHM}, "pools[0].sharedMemory.scope", SCOPE),
    (pools(pool(sharedMemory=NODE), RENDERER, routing=SHM), "pools[1].sharedMemory.scope", SCOPE),
    (pools(pool("p", "prefill", sharedMemory=NODE), DECODE, routing=SHM), "pools[1].sharedMemory.scope", SCOPE),
    ({"routing": {"transfer": "nixl"}}, "routing.transfer", "add a renderer pool"),
    ({"routing": {"sharedVolume": VOLUME}}, "routing.sharedVolume", "no pool has it"),
    ({"engine": {"type": "vllm", "embeddingVolume": VOLUME}}, "engine.embeddingVolume", "no pool has role: encoder"),
    (
        pools(pool(), ENCODER, engine=SGLANG | {"embeddingVolume": VOLUME}),
        "engine.embeddingVolume",
        "for engine type vllm",
    ),
    (pools(pool(), ENCODER, engine=SGLANG | {"tls": TLS}), "engine.tls", "SGLang's encoders serve no TLS"),
    (pools(pool(sharedMemory=NODE), routing=SHM, engine=SGLANG), "routing.transfer", "are for engine type vllm"),
    (media(fetch="allowList"), "routing.media.allowedHosts", "at least one entry"),
    (media(allowedHosts=["a.example"]), "routing.media.allowedHosts", "no effect with fetch: dataOnly"),
    (media(allowedCIDRs=["10.0.0.0/8"]), "routing.media.allowedCIDRs", "no effect with fetch: dataOnly"),
    (media(fetch="public", allowedHosts=["http://a"]), "routing.media.allowedHosts[0]", "without scheme, port or path"),
    (media(fetch="public", allowedHosts=["a.example:80"]), "routing.media.allowedHosts[0]", "is not a host"),
    (media(fetch="public", allowedHosts=["*"]), "routing.media.allowedHosts[0]", "is not a host"),
    (media(fetch="public", allowedCIDRs=["10.0.0.1/8"]), "routing.media.allowedCIDRs[0]", "not a CIDR block"),
    (media(fetch="public", allowedCIDRs=["169.254.169.254/32"]), "routing.media.allowedCIDRs[0]", "never fetched"),
    (media(fetch="public", allowedCIDRs=["fe80::/64"]), "routing.media.allowedCIDRs[0]", "never fetched"),
    (media(maxBytes="20Q"), "routing.media.maxBytes", "is not a quantity"),
    (media(maxBytes="0"), "routing.media.maxBytes", "at least 1 byte"),
    (PICKER | {"pools": [pool(), ENCODER]}, "pools[1].role", "chooses one engine per request"),
    (PICKER | pools(pool("p", "prefill"), pool("d", "decode")), "pools[0].role", "chooses one engine per request"),
    (PICKER | {"engine": SGLANG | {"tls": TLS}}, "engine.tls", "does not know their CA"),
    (PICKER | {"routing": {"transfer": "shm"}, **pools(pool(sharedMemory=NODE))}, "routing.transfer", "auto or none"),
    ({"frontend": {"mode": "endpointPicker", "service": {"port": 9002}}}, "frontend.service.port", "picker's"),
    ({"frontend": {"mode": "gateway"}}, "frontend.mode", "must be"),
    (
        {"frontend": {"mode": "frontendPicker", "tls": TLS, "service": {"port": 443}}},
        "frontend.tls",
        "gateways reach the routers by plain HTTP",
    ),
    ({"frontend": {"pickerTls": "none"}}, "frontend.pickerTls", "mode: frontend has none"),
    ({"frontend": {"gateway": {}}}, "frontend.gateway.parentRefs", "is required"),
    ({"frontend": {"gateway": {"parentRefs": []}}}, "frontend.gateway.parentRefs", "at least 1 item"),
    ({"frontend": {"gateway": PARENT | {"hostnames": ["a b"]}}}, "frontend.gateway.hostnames[0]", "does not match"),
    ({"frontend": {"gateway": PARENT | {"modelHeader": "a:b"}}}, "frontend.gateway.modelHeader", "does not match"),
    ({"frontend": {"gateway": PARENT | {"requestTimeout": "1"}}}, "frontend.gateway.requestTimeout", "does not match"),
    ({"frontend": {"gateway": PARENT, "tls": TLS, "service": {"port": 443}}}, "frontend.gateway", "to plain HTTP"),
    ({"pools": []}, "pools", "at least 1 item"),
    ({"pools": [pool(str(n)) for n in range(17)]}, "pools", "at most 16 items"),
    ({"pools": [pool("Worker")]}, "pools[0].name", "does not match"),
    ({"pools": [pool("w" * 21)]}, "pools[0].name", "at most 20 characters"),
    ({"pools": [pool("frontend")]}, "pools[0].name", "routers' own pods"),
    ({"pools": [pool(), pool()]}, "pools[1].name", "pools[0] already has the name 'worker'"),
    ({"pools": [pool(role="aggregated")]}, "pools[0].role", "must be"),
    ({"pools": [pool(), pool("p", "prefill")]}, "pools[1].role", "needs a decode pool"),
    ({"pools": [pool("d", "decode")]}, "pools[0].role", "needs a prefill pool"),
    ({"pools": [pool("p", "prefill"), pool("d", "decode"), pool()]}, "pools[2].role", "two ways to be served"),
    ({"pools": [pool("e", "encoder")]}, "pools", "no pool generates text"),
    ({"pools": [pool(), pool("e", "encoder", weight=0)]}, "pools[1].weight", "above 0"),
    ({"pools": [pool(weight=20)]}, "pools[0].weight", "weight is for encoder pools"),
    ({"engine": {"type": "sglang"}, "pools": [pool(), pool("r", "renderer")]}, "pools[1].role", "vllm only"),
    ({"pools": [pool(parallelism={"tensor": 4})]}, "pools[0].accelerator.count", "tensor 4 x data 1 needs 4 devices"),
    ({"pools": [pool(nodeSelector={"a/b/c": "x"})]}, "pools[0].nodeSelector", "not a label name"),
    ({"pools": [pool(tolerations=[{"operator": "Equal"}])]}, "pools[0].tolerations[0].key", "needs a key"),
    ({"pools": [pool(sharedMemory={"size": "big"})]}, "pools[0].sharedMemory.size", "is not a quantity"),
    ({"pools": [pool(updates={"maxSurge": 0})]}, "pools[0].updates.maxSurge", "cannot both be 0"),
    (pools(pool(autoscaling=TWO | {"minReplicas": 3})), "pools[0].autoscaling.minReplicas", "must not exceed"),
    ({"pools": [pool(replicas=0, autoscaling={"maxReplicas": 2})]}, "pools[0].replicas", "starts with 1 replica"),
    (pools(pool(), RENDERER | {"autoscaling": TWO}), "pools[1].autoscaling", "have no metric to scale by"),
    ({"pools": [{"name": "w", "role": "worker"}]}, "pools[0].accelerator", "is required"),
    (accelerator(kind="tpu"), "pools[0].accelerator.kind", "must be"),
    (accelerator(kind="cpu", count=1), "pools[0].accelerator.count", "a cpu pool has no devices"),
    (accelerator(kind="cpu", resourceName="a.b/c"), "pools[0].accelerator.resourceName", "a cpu pool has no devices"),
    (accelerator(kind="cpu", claims=[CLAIM]), "pools[0].accelerator.claims", "a cpu pool has no devices"),
    (accelerator(kind="nvidia", count=0), "pools[0].accelerator.count", "at least one device"),
    (accelerator(kind="nvidia", resourceName="gpu"), "pools[0].accelerator.resourceName", "does not match"),
    (accelerator(kind="nvidia", claims=[CLAIM], resourceName="a.b/c"), "pools[0].accelerator.resourceName", "not both"),
    (accelerator(kind="nvidia", claims=[CLAIM], count=2), "pools[0].accelerator.count", "not both"),
    (accelerator(kind="nvidia", claims=[CLAIM, CLAIM]), "pools[0].accelerator.claims", "must differ"),
    (accelerator(kind="nvidia", claims=[{"name": "g"}]), f"{CLAIMS}[0].resourceClaimName", "exactly one of"),
    ({"verification": {"sampleRatio": "1.5"}}, "verification.sampleRatio", "between 0 and 1"),
    ({"sidecar": {"bufferEvents": 1}}, "sidecar.bufferEvents", "greater than or equal to 100"),
    ({"observability": {"otlpEndpoint": "localhost:4317"}}, "observability.otlpEndpoint", "does not match"),
]


@pytest.mark.parametrize(("spec", "path", "sentence"), BAD, ids=[f"{path}-{n}" for n, (_, path, _) in enumerate(BAD)])
def test_a_bad_spec_is_refused_with_its_field_and_a_sentence(spec: dict[str, Any], path: str, sentence: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_deployment(document(**spec))
    assert [p for p, _ in caught.value.errors][:1] == [f"spec.{path}"]
    assert sentence in str(caught.value)
    assert str(caught.value).startswith(f"spec.{path}: ")


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"kind": "Deployment"}, "kind"),
        ({"apiVersion": "v1"}, "apiVersion"),
        ({"metadata": {"name": "Qwen"}}, "metadata.name"),
        ({"metadata": {"name": "q" * 41}}, "metadata.name"),
        ({"metadata": {}}, "metadata.name"),
        ({"extra": 1}, "extra"),
    ],
)
def test_the_object_itself_is_checked(change: dict[str, Any], path: str) -> None:
    with pytest.raises(SpecError, match=f"^{re.escape(path)}: "):
        parse_deployment({**document(), **change})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=4,
)


@settings(max_examples=examples(150), deadline=None)
@given(st.data())
def test_any_value_of_a_field_is_accepted_or_refused_with_a_sentence(data: st.DataObject) -> None:
    accelerator = {"kind": "nvidia", "claims": [dict(CLAIM)]}  # a copy: what stands in it is replaced below
    doc = document(
        engine={"type": "vllm", "args": ["--seed", "1"], "processor": {"minPixels": 1}},
        pools=[pool(accelerator=accelerator, tolerations=[{"key": "a"}], nodeSelector={"a": "b"})],
        routing={"media": {"fetch": "allowList", "allowedHosts": ["a.example"], "allowedCIDRs": ["10.0.0.0/8"]}},
        frontend={"resources": {"limits": {"cpu": 1}}, "apiKeys": {"secret": {"name": "k"}}},
    )
    node: Any = doc
    while True:
        key = data.draw(st.sampled_from(sorted(node) if isinstance(node, dict) else range(len(node))))
        if not isinstance(node[key], dict | list) or not node[key] or data.draw(st.booleans()):
            break
        node = node[key]
    node[key] = data.draw(JSON)
    try:
        dep = parse_deployment(doc)
    except SpecError as error:
        sentences = [sentence for _, sentence in error.errors]
    else:
        sentences = []
        assert parse_deployment(to_json(dep)).spec == dep.spec
    assert all(sentences)


@pytest.mark.parametrize("thing", [None, [], "text", 3])
def test_a_document_that_is_no_object_is_refused(thing: Any) -> None:
    with pytest.raises(SpecError, match="is an object"):
        parse_deployment(thing)


def test_all_errors_are_reported_at_once() -> None:
    with pytest.raises(SpecError) as caught:
        parse_deployment(document(paused=1, frontend={"replicas": -1}))
    assert {path for path, _ in caught.value.errors} == {"spec.paused", "spec.frontend.replicas"}


@pytest.mark.parametrize(
    "spec",
    [
        {"pools": [pool("p", "prefill"), pool("d", "decode")]},
        {"pools": [pool(), pool("e", "encoder", weight=0), pool("f", "encoder")]},
        {"pools": [pool(), pool("r", "renderer", accelerator=CPU)]},
        {"pools": [pool(parallelism={"tensor": 2}, accelerator={"kind": "nvidia", "claims": [CLAIM]})]},
        {"pools": [pool(parallelism={"data": 2}, accelerator={"kind": "nvidia", "count": 2})]},
        {"pools": [pool(accelerator={"kind": "nvidia", "resourceName": "nvidia.com/mig-3g.40gb"})]},
        {"routing": {"transfer": "shm"}, "pools": [pool(sharedMemory=NODE)]},
        {"routing": {"sharedVolume": VOLUME}, "pools": [pool(sharedMemory=NODE), ENCODER]},
        {"engine": {"type": "vllm", "embeddingVolume": VOLUME, "tls": TLS}, "pools": [pool(), ENCODER]},
        {"engine": SGLANG | {"tls": TLS}},
        PICKER | {"pools": [pool(sharedMemory=NODE), RENDERER]},
        {"routing": {"transfer": "nixl"}, "pools": [pool(), pool("r", "renderer", accelerator=CPU)]},
        media(fetch="public", allowedCIDRs=["0.0.0.0/0"]),
        tenants(default={"requestsPerMinute": 2}, named=[RED, {"name": "free", "priority": "high"}], maxWaitSeconds=0),
    ],
)
def test_valid_specs_pass_all_rules(spec: dict[str, Any]) -> None:
    parse_deployment(document(**spec))
