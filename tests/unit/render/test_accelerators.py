"""The accelerator table: every row as it stands, and what a pod makes of it. Nothing here needs a device."""

import dataclasses
import json
import os
from array import array
from pathlib import Path
from typing import Any

import pytest
import yaml
from unit.render.objects import (
    SHORTEST,
    Object,
    change,
    children,
    container,
    containers,
    pod_of,
    rendered,
    variables,
    with_pool,
)

from mmrouter_lib.api import MMRouterDeployment, SpecError, block_size_of, to_json
from mmrouter_lib.block_keys import Span, block_keys
from mmrouter_lib.engines.launchers import LAUNCHERS
from mmrouter_operator.model.accelerators import ACCELERATORS
from mmrouter_operator.model.config import OperatorConfig

FILE = Path(__file__).parent / "golden" / "accelerators.yaml"
IMAGE = "registry.example/engine:1"
KINDS = list(ACCELERATORS)
DEVICES = [kind for kind in KINDS if kind != "cpu"]


def required_labels(pod: Object) -> list[Object]:
    found = pod.get("affinity", {}).get("nodeAffinity", {}).get("requiredDuringSchedulingIgnoredDuringExecution", {})
    # Terms are alternatives; several expressions within one would all have to hold.
    return [only for term in found.get("nodeSelectorTerms", []) for (only,) in [term["matchExpressions"]]]


def as_rendered(dep: MMRouterDeployment, kind: str, engine: str) -> Object:
    """Return what of a pod depends on its accelerator."""
    dep = change(
        dep,
        engine={"type": engine, "image": IMAGE},
        pools=[{"name": "worker", "role": "worker", "accelerator": {"kind": kind}}],
    )
    pod = pod_of(dep, "worker")
    one = container(pod, "engine")
    args = one["args"]
    env = variables(one)
    own = [args[args.index(flag) + 1] for flag in ("--device", "--block-size", "--page-size") if flag in args]
    return {
        "nodes": [f"{e['key']}={e.get('values', ['*'])[0]}" for e in required_labels(pod)],
        "tolerations": pod["tolerations"],
        "limits": one["resources"].get("limits", {}),
        "flags": own,
        "env": {name: env[name] for name in ("NVIDIA_VISIBLE_DEVICES", "SGLANG_USE_CPU_ENGINE") if name in env},
        "startup": one["startupProbe"]["periodSeconds"] * one["startupProbe"]["failureThreshold"],
    }


def test_the_table_and_what_pods_make_of_it_equal_the_golden_file() -> None:
    """A change here moves engines to other nodes or restarts them: MMROUTER_UPDATE_GOLDEN=1, and look at the diff."""
    found: dict[str, Any] = {
        kind: {
            "row": json.loads(json.dumps(dataclasses.asdict(ACCELERATORS[kind]))),
            **{engine: as_rendered(SHORTEST, kind, engine) for engine in ("vllm", "sglang")},
        }
        for kind in KINDS
    }
    if os.environ.get("MMROUTER_UPDATE_GOLDEN") == "1":
        FILE.write_text(yaml.safe_dump(found, sort_keys=False, width=120))
    assert found == yaml.safe_load(FILE.read_text())


@pytest.mark.parametrize("kind", ["intel-i915", "intel-xe"])
def test_case_68_an_xpu_pool_counts_in_blocks_of_64_and_arguments_append_to_ours(kind: str) -> None:
    """Another router's XPU scripts overwrite earlier arguments, and its tests count in blocks of 16 there too."""
    worker = {"name": "worker", "role": "worker", "accelerator": {"kind": kind}, "image": IMAGE}
    plain = change(SHORTEST, pools=[worker])
    with_args = change(
        SHORTEST,
        engine={"type": "vllm", "args": ["--enforce-eager", "--max-model-len=10240"]},
        pools=[{**worker, "args": ["--max-num-seqs", "4"]}, {**worker, "name": "other", "args": ["--seed=1"]}],
    )
    ours = container(pod_of(plain, "worker"), "engine")["args"]
    assert ours[ours.index("--block-size") + 1] == "64"
    for name, own in (("worker", ["--max-num-seqs", "4"]), ("other", ["--seed=1"])):
        args = container(pod_of(with_args, name), "engine")["args"]
        assert args == [*ours, "--enforce-eager", "--max-model-len=10240", *own]

    # Qwen2.5-VL, 999 tokens of an image of 1024x768 behind a text of 26, as case 17 has it.
    ids, span = array("I", range(1025)), Span(26, 999, bytes(32))
    sizes = {kind: block_size_of(plain, plain.spec.pools[0]), "nvidia": 16}
    keys = {of: block_keys(ids, size, [span], 7) for of, size in sizes.items()}
    assert {of: len(found) for of, found in keys.items()} == {kind: 1025 // 64, "nvidia": 1025 // 16}
    assert not set(keys[kind]) & set(keys["nvidia"])


@pytest.mark.parametrize("count", [1, 3, 8, 64])
@pytest.mark.parametrize("kind", DEVICES)
def test_any_number_of_devices_becomes_the_limit(kind: str, count: int) -> None:
    pool = {"accelerator": {"kind": kind, "count": count}, "parallelism": {"tensor": count}, "image": IMAGE}
    one = container(pod_of(with_pool(SHORTEST, **pool), "worker"), "engine")
    assert one["resources"]["limits"] == {ACCELERATORS[kind].resource: str(count)}  # type: ignore[index]


@pytest.mark.parametrize("kind", KINDS)
def test_no_pod_narrows_the_devices_that_its_plugin_has_chosen(kind: str) -> None:
    """Plugins number a pod's devices from 0, or hand out names: a mask of ours would name the wrong ones."""
    pod = pod_of(with_pool(SHORTEST, accelerator={"kind": kind}, image=IMAGE), "worker")
    masks = {f"{name}_VISIBLE_DEVICES" for name in ("CUDA", "HIP", "HABANA")} | {"ZE_AFFINITY_MASK"}
    assert not masks & set(variables(container(pod, "engine")))


@pytest.mark.parametrize(("engine", "kind"), [("vllm", "gaudi"), *(("sglang", k) for k in KINDS if k != "nvidia")])
def test_without_a_published_image_one_must_be_named(engine: str, kind: str) -> None:
    dep = with_pool(change(SHORTEST, engine={"type": engine}), accelerator={"kind": kind})
    with pytest.raises(SpecError, match=rf"^spec\.pools\[0\]\.image: there is no default engine image for {kind}"):
        rendered(dep)
    site = OperatorConfig(engine_images={f"{engine}/{kind}": "site.example/engine:1"})
    assert "site.example/engine:1" in str(rendered(dep, config=site))


def test_the_nearest_word_on_an_image_counts() -> None:
    site = OperatorConfig(image="site.example/mmrouter:1", engine_images={"vllm/nvidia": "site.example/vllm:1"})

    def images(dep: MMRouterDeployment) -> set[str]:
        return {one["image"] for obj in children(dep, "Deployment", config=site) for one in containers(obj)}

    assert images(SHORTEST) == {"site.example/mmrouter:1", "site.example/vllm:1"}
    engine = change(SHORTEST, engine={"type": "vllm", "image": "mine:1"})
    assert images(engine) == {"site.example/mmrouter:1", "mine:1"}
    assert images(with_pool(engine, image="mine:2")) == {"site.example/mmrouter:1", "mine:2"}


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("kind", KINDS)
def test_each_role_is_launched_or_refused_with_the_field_that_helps(engine: str, kind: str) -> None:
    accelerator = {"accelerator": {"kind": kind}}
    roles = ("encoder", "prefill", "decode")
    base = change(
        SHORTEST,
        engine={"type": engine, "image": IMAGE},
        pools=[{"name": role, "role": role, **accelerator} for role in roles],
    )
    refused = set()
    for pool in base.spec.pools:
        try:
            assert LAUNCHERS[engine].launch(base, pool).args
        except ValueError as error:
            refused.add((pool.role, getattr(error, "path", "")))
    no_blocks = {("prefill", "engine.kvConnector"), ("decode", "engine.kvConnector")}
    expected = {
        ("vllm", "gaudi"): no_blocks,
        **{("sglang", other): no_blocks for other in ("intel-i915", "intel-xe", "gaudi", "cpu")},
    }
    assert refused == expected.get((engine, kind), set())
    if refused:
        with pytest.raises(SpecError, match=r"^spec\.engine\.kvConnector: pool "):
            rendered(base)
    connectors = {
        "vllm": {"kvConnector": {"kv_connector": "Mine"}},
        "sglang": {"kvConnector": {"transferBackend": "mooncake"}},
    }[engine]
    helped = change(base, engine={**to_json(base)["spec"]["engine"], **connectors})
    assert len(children(helped, "Deployment")) == 4
