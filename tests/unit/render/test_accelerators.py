"""The accelerator table: every row as it stands, and what a pod makes of it. Nothing here needs a device."""

import dataclasses
import os
from array import array
from pathlib import Path
from typing import Any

import pytest
import yaml
from unit.render.objects import Object, change, container, pod_of, variables, with_pool

from mmrouter_lib.api import MMRouterDeployment, SpecError, block_size_of, to_json
from mmrouter_lib.block_keys import Span, block_keys
from mmrouter_lib.engines.launchers import LAUNCHERS
from mmrouter_operator.model.accelerators import ACCELERATORS
from mmrouter_operator.model.config import OperatorConfig
from mmrouter_operator.model.credentials import SecretData
from mmrouter_operator.render import render

FILE = Path(__file__).parent / "golden" / "accelerators.yaml"
IMAGE = "registry.example/engine:1"
KINDS = list(ACCELERATORS)
DEVICES = [kind for kind in KINDS if kind != "cpu"]


def required_labels(pod: Object) -> list[Object]:
    found = pod.get("affinity", {}).get("nodeAffinity", {}).get("requiredDuringSchedulingIgnoredDuringExecution", {})
    return [term["matchExpressions"][0] for term in found.get("nodeSelectorTerms", [])]


def as_rendered(dep: MMRouterDeployment, secrets: SecretData, kind: str, engine: str) -> Object:
    """Return what of a pod depends on its accelerator."""
    dep = change(
        dep,
        engine={"type": engine, "image": IMAGE},
        pools=[{"name": "worker", "role": "worker", "accelerator": {"kind": kind}}],
    )
    pod = pod_of(dep, secrets, "worker")
    one = container(pod, "engine")
    args = one["args"]
    own = [args[args.index(flag) + 1] for flag in ("--device", "--block-size", "--page-size") if flag in args]
    return {
        "nodes": [f"{e['key']}={e.get('values', ['*'])[0]}" for e in required_labels(pod)],
        "tolerations": pod["tolerations"],
        "limits": one["resources"].get("limits", {}),
        "flags": own,
        "env": {
            name: value
            for name, value in variables(one).items()
            if name in ("NVIDIA_VISIBLE_DEVICES", "SGLANG_USE_CPU_ENGINE")
        },
        "startup": one["startupProbe"]["periodSeconds"] * one["startupProbe"]["failureThreshold"],
    }


def test_the_table_and_what_pods_make_of_it_equal_the_golden_file(
    shortest: MMRouterDeployment, secrets: SecretData
) -> None:
    """A change here moves engines to other nodes or restarts them: MMROUTER_UPDATE_GOLDEN=1, and look at the diff."""
    found: dict[str, Any] = {
        kind: {
            "row": yaml.safe_load(yaml.safe_dump(_plain(dataclasses.asdict(ACCELERATORS[kind])))),
            **{engine: as_rendered(shortest, secrets, kind, engine) for engine in ("vllm", "sglang")},
        }
        for kind in KINDS
    }
    if os.environ.get("MMROUTER_UPDATE_GOLDEN") == "1":
        FILE.write_text(yaml.safe_dump(found, sort_keys=False, width=120))
    assert found == yaml.safe_load(FILE.read_text())


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, tuple | list) else value


@pytest.mark.parametrize("kind", ["intel-i915", "intel-xe"])
def test_case_68_an_xpu_pool_counts_in_blocks_of_64_and_arguments_append_to_ours(
    shortest: MMRouterDeployment, secrets: SecretData, kind: str
) -> None:
    """Another router's XPU scripts overwrite what was said before, and its tests count in blocks of 16 there too."""
    worker = {"name": "worker", "role": "worker", "accelerator": {"kind": kind}, "image": IMAGE}
    plain = change(shortest, pools=[worker])
    said = change(
        shortest,
        engine={"type": "vllm", "args": ["--enforce-eager", "--max-model-len=10240"]},
        pools=[{**worker, "args": ["--max-num-seqs", "4"]}, {**worker, "name": "other", "args": ["--seed=1"]}],
    )
    ours = container(pod_of(plain, secrets, "worker"), "engine")["args"]
    assert ours[ours.index("--block-size") + 1] == "64"
    for name, own in (("worker", ["--max-num-seqs", "4"]), ("other", ["--seed=1"])):
        args = container(pod_of(said, secrets, name), "engine")["args"]
        assert args == [*ours, "--enforce-eager", "--max-model-len=10240", *own]

    # Qwen2.5-VL, 999 tokens of an image of 1024x768 behind a text of 26, as case 17 has it.
    ids, span = array("I", range(1025)), Span(26, 999, bytes(32))
    sizes = {kind: block_size_of(plain, plain.spec.pools[0]), "nvidia": 16}
    keys = {of: block_keys(ids, size, [span], 7) for of, size in sizes.items()}
    assert {of: len(found) for of, found in keys.items()} == {kind: 1025 // 64, "nvidia": 1025 // 16}
    assert not set(keys[kind]) & set(keys["nvidia"])


@pytest.mark.parametrize("kind", DEVICES)
def test_a_node_with_any_one_of_the_known_labels_will_do(
    shortest: MMRouterDeployment, secrets: SecretData, kind: str
) -> None:
    """Terms are alternatives; expressions within a term would all have to hold."""
    pod = pod_of(with_pool(shortest, accelerator={"kind": kind}, image=IMAGE), secrets, "worker")
    terms = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert len(terms) == len(ACCELERATORS[kind].node_labels) >= 3  # type: ignore[index]
    assert all(len(term["matchExpressions"]) == 1 for term in terms)


@pytest.mark.parametrize("count", [1, 3, 8, 64])
@pytest.mark.parametrize("kind", DEVICES)
def test_any_number_of_devices_becomes_the_limit(
    shortest: MMRouterDeployment, secrets: SecretData, kind: str, count: int
) -> None:
    pool = {"accelerator": {"kind": kind, "count": count}, "parallelism": {"tensor": count}, "image": IMAGE}
    one = container(pod_of(with_pool(shortest, **pool), secrets, "worker"), "engine")
    assert one["resources"]["limits"] == {ACCELERATORS[kind].resource: str(count)}  # type: ignore[index]


def test_a_mig_slice_replaces_the_resource_and_keeps_labels_and_toleration(
    shortest: MMRouterDeployment, secrets: SecretData
) -> None:
    slice_ = {"kind": "nvidia", "count": 2, "resourceName": "nvidia.com/mig-3g.40gb"}
    pod = pod_of(with_pool(shortest, accelerator=slice_), secrets, "worker")
    assert container(pod, "engine")["resources"]["limits"] == {"nvidia.com/mig-3g.40gb": "2"}
    assert pod["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    assert required_labels(pod)


def test_claims_replace_resource_and_labels(whole: MMRouterDeployment, secrets: SecretData) -> None:
    pod = pod_of(whole, secrets, "dra")
    assert pod["resourceClaims"] == [{"name": "gpu", "resourceClaimTemplateName": "one-gpu"}]
    assert container(pod, "engine")["resources"] == {"claims": [{"name": "gpu"}]}
    assert required_labels(pod) == []
    assert pod["tolerations"][0]["key"] == "gpu.intel.com/xe"


@pytest.mark.parametrize("kind", KINDS)
def test_no_pod_narrows_the_devices_that_its_plugin_has_chosen(
    shortest: MMRouterDeployment, secrets: SecretData, kind: str
) -> None:
    """Plugins number a pod's devices from 0, or hand out names: a mask of ours would name the wrong ones."""
    pod = pod_of(with_pool(shortest, accelerator={"kind": kind}, image=IMAGE), secrets, "worker")
    masks = {row.affinity_mask for row in ACCELERATORS.values()}
    assert not masks & set(variables(container(pod, "engine")))


def test_an_engine_without_a_device_sees_none_of_the_nodes(whole: MMRouterDeployment, secrets: SecretData) -> None:
    seen = {
        pool.name: variables(container(pod_of(whole, secrets, pool.name), "engine")).get("NVIDIA_VISIBLE_DEVICES")
        for pool in whole.spec.pools
    }
    assert seen == {"big": None, "mig": None, "dra": None, "host": "void"}


def test_pool_and_user_add_to_selector_and_tolerations(whole: MMRouterDeployment, secrets: SecretData) -> None:
    pod = pod_of(whole, secrets, "big")
    assert pod["nodeSelector"] == {"zone": "a"}
    assert [item["key"] for item in pod["tolerations"]] == ["amd.com/gpu", "spot"]


@pytest.mark.parametrize(
    ("engine", "kind", "image"),
    [
        ("vllm", "nvidia", "vllm/vllm-openai:v0.32.0"),
        ("vllm", "amd", "vllm/vllm-openai-rocm:v0.32.0"),
        ("vllm", "intel-i915", "vllm/vllm-openai-xpu:v0.32.0"),
        ("vllm", "intel-xe", "vllm/vllm-openai-xpu:v0.32.0"),
        ("vllm", "cpu", "vllm/vllm-openai-cpu:v0.32.0"),
        ("sglang", "nvidia", "lmsysorg/sglang:v0.5.23"),
    ],
)
def test_an_engine_has_a_default_image(
    shortest: MMRouterDeployment, secrets: SecretData, engine: str, kind: str, image: str
) -> None:
    dep = with_pool(change(shortest, engine={"type": engine}), accelerator={"kind": kind})
    assert container(pod_of(dep, secrets, "worker"), "engine")["image"] == image


@pytest.mark.parametrize(("engine", "kind"), [("vllm", "gaudi"), *(("sglang", k) for k in KINDS if k != "nvidia")])
def test_without_a_published_image_one_must_be_named(
    shortest: MMRouterDeployment, secrets: SecretData, engine: str, kind: str
) -> None:
    dep = with_pool(change(shortest, engine={"type": engine}), accelerator={"kind": kind})
    with pytest.raises(
        SpecError, match=rf"^spec\.pools\[0\]\.image: there is no default engine image for {kind}: name"
    ):
        render(dep, secrets=secrets)
    site = OperatorConfig(engine_images={f"{engine}/{kind}": "site.example/engine:1"})
    objects = render(dep, secrets=secrets, config=site)
    assert "site.example/engine:1" in str(objects)


def test_the_nearest_word_on_an_image_counts(shortest: MMRouterDeployment, secrets: SecretData) -> None:
    site = OperatorConfig(image="site.example/mmrouter:1", engine_images={"vllm/nvidia": "site.example/vllm:1"})

    def images(dep: MMRouterDeployment) -> set[str]:
        objects = render(dep, secrets=secrets, config=site)
        pods = [obj["spec"]["template"]["spec"] for obj in objects if obj["kind"] == "Deployment"]
        return {c["image"] for pod in pods for c in [*pod.get("initContainers", []), *pod["containers"]]}

    assert images(shortest) == {"site.example/mmrouter:1", "site.example/vllm:1"}
    engine = change(shortest, engine={"type": "vllm", "image": "mine:1"})
    assert images(engine) == {"site.example/mmrouter:1", "mine:1"}
    assert images(with_pool(engine, image="mine:2")) == {"site.example/mmrouter:1", "mine:2"}


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("kind", KINDS)
def test_each_role_is_launched_or_refused_with_the_field_that_helps(
    shortest: MMRouterDeployment, secrets: SecretData, engine: str, kind: str
) -> None:
    accelerator = {"accelerator": {"kind": kind}}
    roles = ("encoder", "prefill", "decode")
    base = change(
        shortest,
        engine={"type": engine, "image": IMAGE},
        pools=[{"name": role, "role": role, **accelerator} for role in roles],
    )
    refused = set()
    for pool in base.spec.pools:
        try:
            assert LAUNCHERS[engine].launch(base, pool).args
        except ValueError as error:
            refused.add((pool.role, getattr(error, "path", "")))
    no_embeddings = {("encoder", "engine.ecConnector"), ("prefill", "engine.ecConnector")}
    no_blocks = {("prefill", "engine.kvConnector"), ("decode", "engine.kvConnector")}
    expected = {
        ("vllm", "gaudi"): {("encoder", "engine.ecConnector"), *no_blocks},
        ("vllm", "cpu"): no_embeddings,
        **{("sglang", other): no_blocks for other in ("intel-i915", "intel-xe", "gaudi", "cpu")},
    }
    assert refused == expected.get((engine, kind), set())
    if refused:
        with pytest.raises(SpecError, match=r"^spec\.engine\.[ek][cv]Connector: pool "):
            render(base, secrets=secrets)
    said = {
        "vllm": {"kvConnector": {"kv_connector": "Mine"}, "ecConnector": {"ec_connector": "Mine"}},
        "sglang": {"kvConnector": {"transferBackend": "mooncake"}},
    }[engine]
    helped = change(base, engine={**to_json(base)["spec"]["engine"], **said})
    assert len([o for o in render(helped, secrets=secrets) if o["kind"] == "Deployment"]) == 4
