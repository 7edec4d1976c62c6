"""The hash of what a pod is made from, and the label of engines that exchange KV blocks."""

import dataclasses
from typing import Any

import pytest
from unit.render.objects import change, deployments, template_labels
from unit.render.test_children import GOLDENS, load

from mmrouter_lib.api import MMRouterDeployment, to_json
from mmrouter_operator.model.config import OperatorConfig
from mmrouter_operator.model.credentials import SecretData
from mmrouter_operator.model.labels import COMPATIBILITY, INPUTS_HASH
from mmrouter_operator.render import render

Templates = dict[str, dict[str, Any]]


def templates(dep: MMRouterDeployment, secrets: SecretData, config: OperatorConfig | None = None) -> Templates:
    """Return pool, or `frontend` -> its pod template."""
    objects = render(dep, secrets=secrets, config=config or OperatorConfig())
    cut = len(dep.metadata.name) + 1
    return {obj["metadata"]["name"][cut:]: obj["spec"]["template"] for obj in deployments(objects)}


def hashes(found: Templates) -> dict[str, str]:
    return {name: template["metadata"]["annotations"][INPUTS_HASH] for name, template in found.items()}


def pools(dep: MMRouterDeployment, name: str, **fields: Any) -> list[dict[str, Any]]:
    said = to_json(dep)["spec"]["pools"]
    return [{**pool, **fields} if pool["name"] == name else pool for pool in said]


def engine(dep: MMRouterDeployment, **fields: Any) -> dict[str, Any]:
    said: dict[str, Any] = to_json(dep)["spec"]["engine"]
    return {**said, **fields}


ENGINES = {"big", "mig", "dra", "host"}
ALL = ENGINES | {"frontend"}
CHANGES: list[tuple[str, dict[str, Any], set[str]]] = [
    ("replicas", {"pools": ("mig", {"replicas": 9})}, set()),
    ("autoscaling", {"pools": ("mig", {"autoscaling": {"maxReplicas": 9}})}, set()),
    ("surge", {"pools": ("mig", {"updates": {"maxSurge": 3}})}, set()),
    ("frontend replicas", {"frontend+": {"replicas": 9}}, set()),
    ("service", {"frontend+": {"service": {"port": 81}}}, set()),
    ("paused", {"paused": True}, set()),
    ("networkPolicy", {"networkPolicy": {"enabled": False}}, set()),
    ("a default written out", {"verification": {"onFailure": "Degrade"}}, set()),
    ("policy", {"routing+": {"policy": "roundRobin"}}, {"frontend"}),
    ("verification", {"verification": {"onFailure": "Refuse"}}, {"frontend"}),
    ("router's resources", {"frontend+": {"resources": {"limits": {"memory": "1Gi"}}}}, {"frontend"}),
    ("router's podTemplate", {"frontend+": {"podTemplate": {"spec": {"hostname": "h"}}}}, {"frontend"}),
    ("sidecar", {"sidecar": {"bufferEvents": 100}}, ENGINES),
    ("engine args", {"engine+": {"args": ["--seed=1"]}}, ENGINES),
    ("engine image", {"engine+": {"image": "other:1"}}, ENGINES),
    ("maxImages", {"routing+": {"media": {"fetch": "public", "maxImages": 9}}}, ALL),
    ("block size", {"engine+": {"blockSize": 64}}, ALL),
    ("chat template", {"engine+": {"chatTemplate": {"configMap": {"name": "u", "key": "k"}}}}, ALL),
    ("processor", {"engine+": {"processor": {"maxPixels": 4096}}}, ALL),
    ("revision", {"model+": {"revision": "a"}}, ALL),
    ("one pool's args", {"pools": ("mig", {"args": ["--seed", "1"]})}, {"mig"}),
    ("one pool's drain", {"pools": ("mig", {"updates": {"drainSeconds": 5}})}, {"mig"}),
    ("one pool's shared memory", {"pools": ("mig", {"sharedMemory": {"size": "1Gi"}})}, {"mig"}),
    ("one pool's node selector", {"pools": ("mig", {"nodeSelector": {"a": "b"}})}, {"mig"}),
    ("one pool's tolerations", {"pools": ("mig", {"tolerations": [{"key": "a"}]})}, {"mig"}),
    ("one pool's resources", {"pools": ("mig", {"resources": {"limits": {"cpu": "1"}}})}, {"mig"}),
    ("one pool's podTemplate", {"pools": ("mig", {"podTemplate": {"spec": {"hostname": "h"}}})}, {"mig"}),
    ("one pool's device", {"pools": ("mig", {"accelerator": {"kind": "nvidia"}})}, {"mig", "frontend"}),
    ("one pool's block size", {"pools": ("mig", {"blockSize": 16})}, {"mig", "frontend"}),
]


@pytest.mark.parametrize(("fields", "expected"), [c[1:] for c in CHANGES], ids=[c[0] for c in CHANGES])
def test_only_what_concerns_a_pod_restarts_it_and_the_hash_says_so(
    whole: MMRouterDeployment, secrets: SecretData, fields: dict[str, Any], expected: set[str]
) -> None:
    """A template that changed under an unchanged hash would never be rolled out; the reverse restarts for nothing."""
    spec = to_json(whole)["spec"]
    said = {}
    for key, value in fields.items():
        if key == "pools":
            said[key] = pools(whole, value[0], **value[1])
        elif key.endswith("+"):
            said[key[:-1]] = {**spec[key[:-1]], **value}
        else:
            said[key] = value
    before, after = templates(whole, secrets), templates(change(whole, **said), secrets)
    assert {name for name in before if before[name] != after[name]} == expected
    assert {name for name in before if hashes(before)[name] != hashes(after)[name]} == expected


def test_encoders_weights_restart_no_pod(secrets: SecretData) -> None:
    dep = load("disaggregated")
    assert templates(change(dep, pools=pools(dep, "enc-xpu", weight=77)), secrets) == templates(dep, secrets)


def test_new_secrets_restart_everybody(whole: MMRouterDeployment, secrets: SecretData) -> None:
    for field in dataclasses.fields(SecretData):
        value = getattr(secrets, field.name)
        other = dataclasses.replace(secrets, **{field.name: value[::-1] + value[:1]})
        before, after = hashes(templates(whole, secrets)), hashes(templates(whole, other))
        assert all(before[name] != after[name] for name in before), field.name


def test_the_operators_own_settings_are_no_input(secrets: SecretData, shortest: MMRouterDeployment) -> None:
    """A new release has another image of its own; engines must not restart for it."""
    site = OperatorConfig(image="other:2", engine_images={"vllm/nvidia": "other:3"}, hub_endpoint="https://m.example")
    assert hashes(templates(shortest, secrets, site)) == hashes(templates(shortest, secrets))
    assert templates(shortest, secrets, site) != templates(shortest, secrets)


def test_the_first_encoder_tells_engines_how_to_take_embeddings(
    shortest: MMRouterDeployment, secrets: SecretData
) -> None:
    encoder = {"name": "enc", "role": "encoder", "accelerator": {"kind": "nvidia"}}
    added = change(shortest, pools=[*to_json(shortest)["spec"]["pools"], encoder])
    before, after = hashes(templates(shortest, secrets)), hashes(templates(added, secrets))
    assert before["worker"] != after["worker"]
    second = change(added, pools=[*to_json(added)["spec"]["pools"], {**encoder, "name": "enc-2"}])
    assert hashes(templates(second, secrets))["worker"] == after["worker"]


def compatibilities(dep: MMRouterDeployment, secrets: SecretData) -> dict[str, str]:
    return {
        name: template["metadata"]["labels"][COMPATIBILITY]
        for name, template in templates(dep, secrets).items()
        if name != "frontend"
    }


@pytest.mark.parametrize("name", GOLDENS)
def test_every_engine_pod_says_with_whom_it_can_exchange_blocks(name: str, secrets: SecretData) -> None:
    for obj in deployments(render(load(name), secrets=secrets)):
        value = template_labels(obj).get(COMPATIBILITY, "")
        assert (len(value) == 16) is (not obj["metadata"]["name"].endswith("-frontend"))
        assert COMPATIBILITY not in obj["spec"]["selector"]["matchLabels"]


def test_prefill_and_decode_share_one_value_whatever_they_run_on(secrets: SecretData) -> None:
    found = compatibilities(load("disaggregated"), secrets)
    assert found["prefill"] == found["decode"]
    assert len(set(found.values())) == len(found) - 1


@pytest.mark.parametrize("pool", ["prefill", "decode"])
@pytest.mark.parametrize(
    "fields",
    [
        {"blockSize": 128},
        {"image": "other:1"},
        {"args": ["--kv-cache-dtype", "fp8"]},
        {"args": ["--kv_cache_dtype=fp8"]},
        {"args": ["--dtype=float16"]},
        {"args": ["-q", "awq"]},
        {"accelerator": {"kind": "nvidia", "count": 4}, "parallelism": {"tensor": 4}},
    ],
)
def test_what_changes_blocks_on_one_side_changes_both_sides_and_their_hashes(
    secrets: SecretData, pool: str, fields: dict[str, Any]
) -> None:
    dep = load("disaggregated")
    other = change(dep, pools=pools(dep, pool, **fields))
    before, after = compatibilities(dep, secrets), compatibilities(other, secrets)
    assert after["prefill"] == after["decode"] != before["prefill"]
    old, new = hashes(templates(dep, secrets)), hashes(templates(other, secrets))
    assert {name for name in old if name != "frontend" and old[name] != new[name]} == {"prefill", "decode"}


@pytest.mark.parametrize(
    "fields",
    [
        {"replicas": 7},
        {"args": ["--max-num-seqs=4"]},
        {"nodeSelector": {"zone": "b"}},
        {"resources": {"limits": {"cpu": "1"}}},
        {"updates": {"drainSeconds": 5}},
    ],
)
def test_what_leaves_blocks_alone_leaves_the_set_together(secrets: SecretData, fields: dict[str, Any]) -> None:
    dep = load("disaggregated")
    other = change(dep, pools=pools(dep, "decode", **fields))
    assert compatibilities(other, secrets) == compatibilities(dep, secrets)


@pytest.mark.parametrize(
    "section",
    [
        {"model": {"id": "Qwen/Qwen2.5-VL-7B-Instruct", "revision": "other"}},
        {"engine": {"type": "vllm", "blockSize": 64, "kvConnector": {"kv_connector": "MooncakeConnector"}}},
        {"engine": {"type": "vllm", "blockSize": 64, "chatTemplate": {"configMap": {"name": "t", "key": "k"}}}},
        {"engine": {"type": "vllm", "blockSize": 64, "processor": {"maxPixels": 200704}}},
    ],
)
def test_model_connector_and_what_makes_a_prompt_are_part_of_it(secrets: SecretData, section: dict[str, Any]) -> None:
    dep = load("disaggregated")
    assert compatibilities(change(dep, **section), secrets)["decode"] != compatibilities(dep, secrets)["decode"]


def test_one_more_pool_of_the_same_kind_leaves_the_set_as_it_is(secrets: SecretData) -> None:
    dep = load("disaggregated")
    said = to_json(dep)["spec"]["pools"]
    more = change(dep, pools=[*said, {**said[3], "name": "decode-2"}])
    found = compatibilities(more, secrets)
    assert found["decode-2"] == found["decode"] == compatibilities(dep, secrets)["decode"]
