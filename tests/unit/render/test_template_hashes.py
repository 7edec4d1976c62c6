"""The hash of what a pod is made from, and the label of engines that exchange KV blocks."""

import dataclasses
from typing import Any

import pytest
from unit.render.objects import GOLDENS, SECRETS, SHORTEST, WHOLE, change, children, deployments, load, template_labels

from mmrouter_lib.api import MMRouterDeployment, to_json
from mmrouter_lib.engines.launchers import LAUNCHERS
from mmrouter_operator.model.config import OperatorConfig
from mmrouter_operator.model.credentials import SecretData
from mmrouter_operator.model.kinds import COMPATIBILITY, INPUTS_HASH, KV_LAYOUT
from mmrouter_operator.render import render
from mmrouter_operator.render.pod.kv_compatibility import mismatches

Templates = dict[str, dict[str, Any]]


def templates(
    dep: MMRouterDeployment, secrets: SecretData = SECRETS, config: OperatorConfig | None = None
) -> Templates:
    """Return pool, or `frontend` -> its pod template."""
    objects = render(dep, secrets=secrets, config=config or OperatorConfig())
    cut = len(dep.metadata.name) + 1
    return {obj["metadata"]["name"][cut:]: obj["spec"]["template"] for obj in deployments(objects)}


def hashes(found: Templates) -> dict[str, str]:
    return {name: template["metadata"]["annotations"][INPUTS_HASH] for name, template in found.items()}


def pools(dep: MMRouterDeployment, name: str, **fields: Any) -> list[dict[str, Any]]:
    spec_pools = to_json(dep)["spec"]["pools"]
    return [{**pool, **fields} if pool["name"] == name else pool for pool in spec_pools]


ENGINES = {"big", "mig", "dra", "host"}
ALL = ENGINES | {"frontend"}
CHANGES: list[tuple[str, dict[str, Any], set[str]]] = [
    ("replicas", {"pools": ("mig", {"replicas": 9})}, set()),
    ("autoscaling", {"pools": ("mig", {"autoscaling": {"maxReplicas": 9}})}, set()),
    ("surge", {"pools": ("mig", {"updates": {"maxSurge": 3}})}, set()),
    ("frontend replicas", {"frontend+": {"replicas": 9}}, set()),
    ("service", {"frontend+": {"service": {"port": 81}}}, set()),
    ("route of a gateway", {"frontend+": {"gateway": {"parentRefs": [{"name": "public"}]}}}, set()),
    ("paused", {"paused": True}, set()),
    ("networkPolicy", {"networkPolicy": {"enabled": False}}, set()),
    ("a default written out", {"verification": {"onFailure": "Degrade"}}, set()),
    ("monitors of pods", {"observability": {"podMonitor": "Enabled"}}, set()),
    ("endpoint of traces", {"observability": {"otlpEndpoint": "http://c:4318"}}, {"frontend"}),
    ("debug headers", {"observability": {"debugHeaders": True}}, {"frontend"}),
    ("policy", {"routing+": {"policy": "roundRobin"}}, {"frontend"}),
    ("verification", {"verification": {"onFailure": "Refuse"}}, {"frontend"}),
    ("limits of tenants", {"frontend+": {"tenants": {"maxWaitSeconds": 5}}}, {"frontend"}),
    ("bytes held", {"frontend+": {"maxHeldBytes": "2Gi"}}, {"frontend"}),
    ("router's resources", {"frontend+": {"resources": {"limits": {"memory": "1Gi"}}}}, {"frontend"}),
    ("TLS", {"frontend+": {"tls": {"secretName": "a"}, "service": {"port": 443}}}, {"frontend"}),
    ("router's podTemplate", {"frontend+": {"podTemplate": {"spec": {"hostname": "h"}}}}, {"frontend"}),
    ("sidecar", {"sidecar": {"bufferEvents": 100}}, ENGINES),
    ("engine args", {"engine+": {"args": ["--seed=1"]}}, ENGINES),
    ("parser of tool calls", {"engine+": {"args": ["--tool-call-parser=hermes"]}}, ALL),
    ("engine image", {"engine+": {"image": "other:1"}}, ENGINES),
    ("maxImages", {"routing+": {"media": {"fetch": "public", "maxImages": 9}}}, ALL),
    ("block size", {"engine+": {"blockSize": 64}}, ALL),
    ("chat template", {"engine+": {"chatTemplate": {"configMap": {"name": "u", "key": "k"}}}}, ALL),
    ("engines' TLS", {"engine+": {"tls": {"secretName": "a"}}}, ALL),
    ("lease of blocks", {"engine+": {"kvConnector": {"kv_connector": "NixlConnector", "x": 1}}}, ALL),
    ("processor", {"engine+": {"processor": {"maxPixels": 4096}}}, ALL),
    ("revision", {"model+": {"revision": "a"}}, ALL),
    ("one pool's args", {"pools": ("mig", {"args": ["--seed", "1"]})}, {"mig"}),
    ("one pool's reasoning", {"pools": ("mig", {"args": ["--reasoning-parser", "qwen3"]})}, {"mig", "frontend"}),
    ("one pool's drain", {"pools": ("mig", {"updates": {"drainSeconds": 5}})}, {"mig"}),
    ("one pool's shared memory", {"pools": ("mig", {"sharedMemory": {"size": "1Gi"}})}, {"mig"}),
    ("one pool's node selector", {"pools": ("mig", {"nodeSelector": {"a": "b"}})}, {"mig"}),
    ("one pool's tolerations", {"pools": ("mig", {"tolerations": [{"key": "a"}]})}, {"mig"}),
    ("one pool's resources", {"pools": ("mig", {"resources": {"limits": {"cpu": "1"}}})}, {"mig"}),
    ("one pool's podTemplate", {"pools": ("mig", {"podTemplate": {"spec": {"hostname": "h"}}})}, {"mig"}),
    ("one pool's resource", {"pools": ("mig", {"accelerator": {"kind": "nvidia"}})}, {"mig"}),
    ("one pool's devices", {"pools": ("mig", {"accelerator": {"kind": "nvidia", "count": 2}})}, {"mig"}),
    ("one pool's kind", {"pools": ("mig", {"accelerator": {"kind": "amd"}})}, {"mig", "frontend"}),
    ("one pool's block size", {"pools": ("mig", {"blockSize": 16})}, {"mig", "frontend"}),
]


@pytest.mark.parametrize(("fields", "expected"), [c[1:] for c in CHANGES], ids=[c[0] for c in CHANGES])
def test_only_what_concerns_a_pod_restarts_it_and_the_hash_says_so(fields: dict[str, Any], expected: set[str]) -> None:
    """A template that changed under an unchanged hash would never be rolled out; the reverse restarts for nothing."""
    spec = to_json(WHOLE)["spec"]
    sections: dict[str, Any] = {}
    for key, value in fields.items():
        if key == "pools":
            sections[key] = pools(WHOLE, value[0], **value[1])
        elif key.endswith("+"):
            sections[key[:-1]] = {**spec[key[:-1]], **value}
        else:
            sections[key] = value
    before, after = templates(WHOLE), templates(change(WHOLE, **sections))
    assert {name for name in before if before[name] != after[name]} == expected
    assert {name for name in before if hashes(before)[name] != hashes(after)[name]} == expected


def test_encoders_weights_restart_no_pod() -> None:
    dep = load("disaggregated")
    assert templates(change(dep, pools=pools(dep, "enc-xpu", weight=77))) == templates(dep)


def test_new_secrets_restart_everybody() -> None:
    for field in dataclasses.fields(SecretData):
        if field.name == "rotated":
            continue  # it is there to restart none
        value = getattr(SECRETS, field.name)
        other = dataclasses.replace(SECRETS, **{field.name: value[::-1] + value[:1]})
        before, after = hashes(templates(WHOLE)), hashes(templates(WHOLE, other))
        assert all(before[name] != after[name] for name in before), field.name


def test_the_operators_own_settings_are_no_input() -> None:
    """A new release has another image of its own; engines must not restart for it."""
    site = OperatorConfig(image="other:2", engine_images={"vllm/nvidia": "other:3"}, hub_endpoint="https://m.example")
    assert hashes(templates(SHORTEST, SECRETS, site)) == hashes(templates(SHORTEST))
    assert templates(SHORTEST, SECRETS, site) != templates(SHORTEST)


def test_the_first_encoder_tells_engines_how_to_take_embeddings() -> None:
    encoder = {"name": "enc", "role": "encoder", "accelerator": {"kind": "nvidia"}}
    added = change(SHORTEST, pools=[*to_json(SHORTEST)["spec"]["pools"], encoder])
    before, after = hashes(templates(SHORTEST)), hashes(templates(added))
    assert before["worker"] != after["worker"]
    second = change(added, pools=[*to_json(added)["spec"]["pools"], {**encoder, "name": "enc-2"}])
    assert hashes(templates(second))["worker"] == after["worker"]


def pool(name: str, role: str, kind: str = "nvidia", **more: Any) -> dict[str, Any]:
    return {"name": name, "role": role, "accelerator": {"kind": kind}, **more}


NODE = {"sharedMemory": {"scope": "node"}}
ENCODED = [pool("enc", "encoder"), pool("work", "worker")]
FILED = [pool("enc", "encoder", "cpu", **NODE), pool("work", "worker", **NODE)]


@pytest.mark.parametrize(
    ("before", "after", "restarted"),
    [
        (ENCODED, [*ENCODED, pool("more", "worker", "amd")], {"enc", "work", "frontend"}),
        (FILED, [FILED[0], {**FILED[1], "sharedMemory": {"scope": "pod"}}], {"enc", "work", "frontend"}),
        (ENCODED, [*ENCODED, pool("more", "worker")], {"frontend"}),
        (ENCODED, [pool("enc", "encoder", sharedMemory={"size": "1Gi"}), ENCODED[1]], {"enc", "frontend"}),
    ],
    ids=["another kind", "a pool shares no memory any more", "the same kind", "size of the encoders' memory"],
)
def test_what_changes_how_embeddings_travel_restarts_every_pool_with_a_part_in_it(
    before: list[dict[str, Any]], after: list[dict[str, Any]], restarted: set[str]
) -> None:
    """Engines with different connectors exchange nothing; frontends know how much an encoder keeps."""
    old, new = (templates(change(SHORTEST, pools=pools)) for pools in (before, after))
    assert {name for name in old if old[name] != new[name]} == restarted
    assert {name for name in old if hashes(old)[name] != hashes(new)[name]} == restarted


def compatibilities(dep: MMRouterDeployment) -> dict[str, str]:
    pools = {name: template for name, template in templates(dep).items() if name != "frontend"}
    return {name: template["metadata"]["labels"][COMPATIBILITY] for name, template in pools.items()}


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
def test_what_changes_blocks_on_one_side_changes_both_sides_and_their_hashes(pool: str, fields: dict[str, Any]) -> None:
    dep = load("disaggregated")
    other = change(dep, pools=pools(dep, pool, **fields))
    before, after = compatibilities(dep), compatibilities(other)
    assert after["prefill"] == after["decode"] != before["prefill"]
    old, new = hashes(templates(dep)), hashes(templates(other))
    assert {name for name in old if name != "frontend" and old[name] != new[name]} == {"prefill", "decode"}


def test_what_leaves_blocks_alone_leaves_the_set_together() -> None:
    dep = load("disaggregated")
    fields: dict[str, Any] = {"replicas": 7, "args": ["--max-num-seqs=4"], "nodeSelector": {"zone": "b"}}
    fields |= {"resources": {"limits": {"cpu": "1"}}, "updates": {"drainSeconds": 5}}
    for name, value in fields.items():
        other = change(dep, pools=pools(dep, "decode", **{name: value}))
        assert compatibilities(other) == compatibilities(dep), name


def test_model_connector_and_what_makes_a_prompt_are_part_of_it() -> None:
    dep = load("disaggregated")
    engine = {"type": "vllm", "blockSize": 64}
    for section in (
        {"model": {"id": "Qwen/Qwen2.5-VL-7B-Instruct", "revision": "other"}},
        {"engine": engine | {"kvConnector": {"kv_connector": "MooncakeConnector"}}},
        {"engine": engine | {"chatTemplate": {"configMap": {"name": "t", "key": "k"}}}},
        {"engine": engine | {"processor": {"maxPixels": 200704}}},
    ):
        assert compatibilities(change(dep, **section))["decode"] != compatibilities(dep)["decode"], section


def test_one_more_pool_of_the_same_kind_leaves_the_set_as_it_is() -> None:
    dep = load("disaggregated")
    given = to_json(dep)["spec"]["pools"]
    more = change(dep, pools=[*given, {**given[3], "name": "decode-2"}])
    found = compatibilities(more)
    assert found["decode-2"] == found["decode"] == compatibilities(dep)["decode"]


DISAGGREGATED = {"vllm": "disaggregated", "sglang": "sglang-disaggregated"}


def with_arguments(
    engine: str, prefill: list[str], decode: list[str], shared: list[str] | None = None
) -> MMRouterDeployment:
    """Return a deployment whose pools of both roles have these arguments; ``shared``: of all pools."""
    dep = load(DISAGGREGATED[engine])
    args = {"prefill": prefill, "decode": decode}
    pools = [{**pool, "args": args.get(pool["role"], [])} for pool in to_json(dep)["spec"]["pools"]]
    return change(dep, pools=pools, engine={"type": engine, "args": shared or [], "blockSize": 64})


def labels(dep: MMRouterDeployment) -> dict[str, str | None]:
    roles = ("prefill", "decode")
    found = (template_labels(obj) for obj in children(dep, "Deployment"))
    return {mine["mmrouter.io/role"]: mine.get(KV_LAYOUT) for mine in found if mine["mmrouter.io/role"] in roles}


@pytest.mark.parametrize("name", GOLDENS)
def test_pools_that_say_nothing_against_it_are_paired_and_bear_no_more_labels(name: str) -> None:
    assert mismatches(load(name)) == []
    assert not any(KV_LAYOUT in template_labels(obj) for obj in children(load(name), "Deployment"))


@pytest.mark.parametrize("engine", list(DISAGGREGATED))
@pytest.mark.parametrize(
    ("prefill", "decode", "what"),
    [
        (["--kv-cache-dtype", "fp8"], [], "--kv-cache-dtype is fp8 and not set"),
        ([], ["--kv_cache_dtype=fp8_e4m3"], "--kv-cache-dtype is not set and fp8_e4m3"),
        (["--dtype=float16"], ["--dtype=bfloat16"], "--dtype is float16 and bfloat16"),
        (["--dtype", "float32"], [], "--dtype is float32 and not set"),
    ],
)
def test_what_engines_do_not_translate_keeps_pools_apart_by_a_label_of_their_pods(
    engine: str, prefill: list[str], decode: list[str], what: str
) -> None:
    dep = with_arguments(engine, prefill, decode)
    (pair,) = mismatches(dep)
    assert pair.sentence() == f"pools prefill and decode cannot exchange KV blocks: {what}"
    found = labels(dep)
    assert None not in found.values()
    assert found["prefill"] != found["decode"]


@pytest.mark.parametrize("engine", list(DISAGGREGATED))
@pytest.mark.parametrize(
    ("prefill", "decode", "shared"),
    [
        (["--dtype=bfloat16"], [], []),  # which is what the other one may well choose by itself
        (["--dtype", "half"], ["--dtype=float16"], []),
        (["--kv-cache-dtype=auto"], [], []),
        (["--kv-cache-dtype=fp8"], ["--kv-cache-dtype=fp8"], []),
        ([], [], ["--kv-cache-dtype=fp8"]),
        (["--max-num-seqs=4"], [], []),
    ],
)
def test_what_may_well_be_equal_is_left_to_the_engines(
    engine: str, prefill: list[str], decode: list[str], shared: list[str]
) -> None:
    dep = with_arguments(engine, prefill, decode, shared)
    assert mismatches(dep) == []
    assert set(labels(dep).values()) == {None}


@pytest.mark.parametrize(
    ("engine", "decode", "differs"),
    [("vllm", 128, []), ("sglang", 128, [{"blockSize": ("64", "128")}]), ("sglang", 64, [])],
)
def test_block_sizes_are_translated_by_vllm_and_not_by_sglang(engine: str, decode: int, differs: list[Any]) -> None:
    dep = with_arguments(engine, [], [])
    other = change(dep, pools=pools(dep, "decode", blockSize=decode))
    assert [pair.differs for pair in mismatches(other)] == differs


def test_the_others_backend_is_taken_where_one_side_names_none() -> None:
    triton, flash = ["--attention-backend=TRITON_ATTN"], ["--attention-backend=FLASH_ATTN"]
    assert mismatches(with_arguments("vllm", triton, [])) == []
    (pair,) = mismatches(with_arguments("vllm", triton, flash))
    assert pair.differs == {"--attention-backend": ("TRITON_ATTN", "FLASH_ATTN")}


def test_unequal_pools_are_one_set_that_changes_together_and_their_hashes_tell_of_the_label() -> None:
    before, after = with_arguments("vllm", [], []), with_arguments("vllm", [], ["--kv-cache-dtype=fp8"])
    values = compatibilities(after)
    assert values["prefill"] == values["decode"]
    old, new = hashes(templates(before)), hashes(templates(after))
    assert {name for name in new if new[name] != old[name]} == {"prefill", "decode"}


@pytest.mark.parametrize("engine", list(DISAGGREGATED))
def test_what_keeps_pools_apart_is_among_what_makes_another_set(engine: str) -> None:
    """Else the label would change under pods whose set, and hash, stay as they are."""
    assert LAUNCHERS[engine].kv_exact_flags.keys() <= LAUNCHERS[engine].kv_layout_flags
