"""Bad input: every rule is a sentence that names the field to correct, as the user spells it."""

import re
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mmrouter_lib.api import SpecError, parse_deployment, to_json

CPU = {"kind": "cpu"}
NODE = {"scope": "node"}


def pool(name: str = "worker", role: str = "worker", **fields: Any) -> dict[str, Any]:
    return {"name": name, "role": role, "accelerator": {"kind": "nvidia"}, **fields}


def accelerator(**fields: Any) -> dict[str, Any]:
    return {"pools": [pool(accelerator=fields)]}


def media(**fields: Any) -> dict[str, Any]:
    return {"routing": {"media": fields}}


CLAIM = {"name": "gpu", "resourceClaimTemplateName": "one-gpu"}

BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"unknown": 1}, "spec.unknown", "no such field"),
    ({"network_policy": {}}, "spec.network_policy", "no such field"),
    ({"paused": "yes"}, "spec.paused", "boolean"),
    ({"model": {}}, "spec.model.id", "is required"),
    ({"model": {"id": "a b"}}, "spec.model.id", "does not match"),
    ({"model": {"id": "a", "volume": {}}}, "spec.model.volume", "exactly one volume source"),
    ({"model": {"id": "a", "volume": {"hostPath": {}, "nfs": {}}}}, "spec.model.volume", "exactly one volume source"),
    ({"model": {"id": "a", "volume": {"name": {}}}}, "spec.model.volume", "exactly one volume source"),
    ({"engine": {"type": "tgi"}}, "spec.engine.type", "must be 'vllm' or 'sglang', not 'tgi'"),
    ({"engine": {"type": "vllm", "blockSize": 0}}, "spec.engine.blockSize", "greater than or equal to 1"),
    (
        {"engine": {"type": "vllm", "processor": {"minPixels": 9, "maxPixels": 4}}},
        "spec.engine.processor.minPixels",
        "exceed",
    ),
    ({"frontend": {"replicas": 0}}, "spec.frontend.replicas", "greater than or equal to 1"),
    ({"frontend": {"replicas": "2"}}, "spec.frontend.replicas", "valid integer"),
    (
        {"frontend": {"resources": {"limits": {"cpu": "lots"}}}},
        "spec.frontend.resources.limits.cpu",
        "is not a quantity",
    ),
    ({"frontend": {"apiKeys": {}}}, "spec.frontend.apiKeys.secret", "is required"),
    ({"routing": {"overlapWeight": 1.5}}, "spec.routing.overlapWeight", 'decimals are written as strings: "1.5"'),
    ({"routing": {"overlapWeight": "-1"}}, "spec.routing.overlapWeight", "does not match"),
    ({"routing": {"transfer": "shm"}}, "spec.pools[0].sharedMemory.scope", "needs scope: node on every pool"),
    (
        {"routing": {"transfer": "shm"}, "pools": [pool(sharedMemory=NODE), pool("r", "renderer", accelerator=CPU)]},
        "spec.pools[1].sharedMemory.scope",
        "needs scope: node on every pool",
    ),
    (
        {"routing": {"transfer": "shm"}, "pools": [pool("p", "prefill", sharedMemory=NODE), pool("d", "decode")]},
        "spec.pools[1].sharedMemory.scope",
        "needs scope: node on every pool",
    ),
    ({"routing": {"transfer": "nixl"}}, "spec.routing.transfer", "add a renderer pool"),
    (
        {"routing": {"transfer": "shm"}, "engine": {"type": "sglang"}, "pools": [pool(sharedMemory=NODE)]},
        "spec.routing.transfer",
        "are for engine type vllm",
    ),
    (media(fetch="allowList"), "spec.routing.media.allowedHosts", "at least one entry"),
    (media(allowedHosts=["a.example"]), "spec.routing.media.allowedHosts", "no effect with fetch: dataOnly"),
    (media(allowedCIDRs=["10.0.0.0/8"]), "spec.routing.media.allowedCIDRs", "no effect with fetch: dataOnly"),
    (
        media(fetch="public", allowedHosts=["http://a"]),
        "spec.routing.media.allowedHosts[0]",
        "without scheme, port or path",
    ),
    (media(fetch="public", allowedHosts=["a.example:80"]), "spec.routing.media.allowedHosts[0]", "is not a host"),
    (media(fetch="public", allowedHosts=["*"]), "spec.routing.media.allowedHosts[0]", "is not a host"),
    (media(fetch="public", allowedCIDRs=["10.0.0.1/8"]), "spec.routing.media.allowedCIDRs[0]", "not a CIDR block"),
    (media(fetch="public", allowedCIDRs=["169.254.169.254/32"]), "spec.routing.media.allowedCIDRs[0]", "never fetched"),
    (media(fetch="public", allowedCIDRs=["fe80::/64"]), "spec.routing.media.allowedCIDRs[0]", "never fetched"),
    (media(maxBytes="20Q"), "spec.routing.media.maxBytes", "is not a quantity"),
    (media(maxBytes="0"), "spec.routing.media.maxBytes", "at least 1 byte"),
    ({"pools": []}, "spec.pools", "at least 1 item"),
    ({"pools": [pool(str(n)) for n in range(17)]}, "spec.pools", "at most 16 items"),
    ({"pools": [pool("Worker")]}, "spec.pools[0].name", "does not match"),
    ({"pools": [pool("w" * 21)]}, "spec.pools[0].name", "at most 20 characters"),
    ({"pools": [pool("frontend")]}, "spec.pools[0].name", "routers' own pods"),
    ({"pools": [pool(), pool()]}, "spec.pools[1].name", "pools[0] already has the name 'worker'"),
    ({"pools": [pool(role="aggregated")]}, "spec.pools[0].role", "must be"),
    ({"pools": [pool(), pool("p", "prefill")]}, "spec.pools[1].role", "needs a decode pool"),
    ({"pools": [pool("d", "decode")]}, "spec.pools[0].role", "needs a prefill pool"),
    ({"pools": [pool("p", "prefill"), pool("d", "decode"), pool()]}, "spec.pools[2].role", "two ways to be served"),
    ({"pools": [pool("e", "encoder")]}, "spec.pools", "no pool generates text"),
    ({"pools": [pool(), pool("e", "encoder", weight=0)]}, "spec.pools[1].weight", "above 0"),
    ({"pools": [pool(weight=20)]}, "spec.pools[0].weight", "weight is for encoder pools"),
    ({"engine": {"type": "sglang"}, "pools": [pool(), pool("r", "renderer")]}, "spec.pools[1].role", "vllm only"),
    (
        {"pools": [pool(parallelism={"tensor": 4})]},
        "spec.pools[0].accelerator.count",
        "tensor 4 x data 1 needs 4 devices",
    ),
    ({"pools": [pool(nodeSelector={"a/b/c": "x"})]}, "spec.pools[0].nodeSelector", "not a label name"),
    ({"pools": [pool(tolerations=[{"operator": "Equal"}])]}, "spec.pools[0].tolerations[0].key", "needs a key"),
    ({"pools": [pool(sharedMemory={"size": "big"})]}, "spec.pools[0].sharedMemory.size", "is not a quantity"),
    ({"pools": [pool(updates={"maxSurge": 0})]}, "spec.pools[0].updates.maxSurge", "cannot both be 0"),
    (
        {"pools": [pool(autoscaling={"minReplicas": 3, "maxReplicas": 2})]},
        "spec.pools[0].autoscaling.minReplicas",
        "must not exceed",
    ),
    ({"pools": [pool(replicas=0, autoscaling={"maxReplicas": 2})]}, "spec.pools[0].replicas", "starts with 1 replica"),
    (
        {"pools": [pool(), pool("r", "renderer", autoscaling={"maxReplicas": 2})]},
        "spec.pools[1].autoscaling",
        "renderer pools have no metric to scale by",
    ),
    ({"pools": [{"name": "w", "role": "worker"}]}, "spec.pools[0].accelerator", "is required"),
    (accelerator(kind="tpu"), "spec.pools[0].accelerator.kind", "must be"),
    (accelerator(kind="cpu", count=1), "spec.pools[0].accelerator.count", "a cpu pool has no devices"),
    (
        accelerator(kind="cpu", resourceName="a.b/c"),
        "spec.pools[0].accelerator.resourceName",
        "a cpu pool has no devices",
    ),
    (accelerator(kind="cpu", claims=[CLAIM]), "spec.pools[0].accelerator.claims", "a cpu pool has no devices"),
    (accelerator(kind="nvidia", count=0), "spec.pools[0].accelerator.count", "at least one device"),
    (accelerator(kind="nvidia", resourceName="gpu"), "spec.pools[0].accelerator.resourceName", "does not match"),
    (
        accelerator(kind="nvidia", claims=[CLAIM], resourceName="a.b/c"),
        "spec.pools[0].accelerator.resourceName",
        "not both",
    ),
    (accelerator(kind="nvidia", claims=[CLAIM], count=2), "spec.pools[0].accelerator.count", "not both"),
    (accelerator(kind="nvidia", claims=[CLAIM, CLAIM]), "spec.pools[0].accelerator.claims", "must differ"),
    (
        accelerator(kind="nvidia", claims=[{"name": "gpu"}]),
        "spec.pools[0].accelerator.claims[0].resourceClaimName",
        "exactly one of",
    ),
    ({"verification": {"sampleRatio": "1.5"}}, "spec.verification.sampleRatio", "between 0 and 1"),
    ({"sidecar": {"bufferEvents": 1}}, "spec.sidecar.bufferEvents", "greater than or equal to 100"),
    ({"observability": {"otlpEndpoint": "localhost:4317"}}, "spec.observability.otlpEndpoint", "does not match"),
]


@pytest.mark.parametrize(("spec", "path", "sentence"), BAD, ids=[f"{path}-{n}" for n, (_, path, _) in enumerate(BAD)])
def test_a_bad_spec_is_refused_with_its_field_and_a_sentence(
    document: Any, spec: dict[str, Any], path: str, sentence: str
) -> None:
    with pytest.raises(SpecError) as caught:
        parse_deployment(document(**spec))
    assert [p for p, _ in caught.value.errors][:1] == [path]
    assert sentence in str(caught.value)
    assert str(caught.value).startswith(f"{path}: ")


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
def test_the_object_itself_is_checked(document: Any, change: dict[str, Any], path: str) -> None:
    with pytest.raises(SpecError, match=f"^{re.escape(path)}: "):
        parse_deployment({**document(), **change})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=4,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_value_of_a_field_is_accepted_or_refused_with_a_sentence(document: Any, data: st.DataObject) -> None:
    doc = document(
        engine={"type": "vllm", "args": ["--seed", "1"], "processor": {"minPixels": 1}},
        pools=[
            pool(
                # A copy: what stands in it is replaced below.
                accelerator={"kind": "nvidia", "claims": [dict(CLAIM)]},
                tolerations=[{"key": "a"}],
                nodeSelector={"a": "b"},
            )
        ],
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


def test_all_errors_are_reported_at_once(document: Any) -> None:
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
        {"routing": {"transfer": "nixl"}, "pools": [pool(), pool("r", "renderer", accelerator=CPU)]},
        media(fetch="public", allowedCIDRs=["0.0.0.0/0"]),
    ],
)
def test_valid_specs_pass_all_rules(document: Any, spec: dict[str, Any]) -> None:
    parse_deployment(document(**spec))
