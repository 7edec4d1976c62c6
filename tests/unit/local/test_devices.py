"""Devices of engine pods: who gets which, who shares, and what each engine is started with."""

from itertools import pairwise
from typing import Any

import pytest
from unit.local.test_run_plan import rendered

from mmrouter_cli.local.devices import SPLIT_SHARE, assign, device_requests, find_devices, memory_share
from mmrouter_cli.local.folders import LocalError
from mmrouter_cli.local.run_plan import make_plan
from mmrouter_lib.api import parse_deployment

FOUND = {"nvidia": ["0", "1", "GPU-7"], "intel-xe": ["0"], "cpu": []}


def pool(name: str, kind: str, replicas: int = 1, **more: Any) -> dict[str, Any]:
    return {"name": name, "role": "worker", "replicas": replicas, "accelerator": {"kind": kind}, **more}


def started(*pools: dict[str, Any], engine: str = "vllm") -> list[tuple[str, str]]:
    """Return the device variable of every engine pod and its share of the device's memory, empty where none is set."""
    spec = {"engine": {"type": engine, "image": "registry.example/engine:1"}, "pools": list(pools)}
    objects = rendered(**spec)
    head = {"apiVersion": "mmrouter.io/v1alpha1", "kind": "MMRouterDeployment", "metadata": {"name": "demo"}}
    deployment = parse_deployment({**head, "spec": {"model": {"id": "a/b"}, **spec}})
    found = []
    for pod in assign(make_plan(objects).pods, device_requests(deployment, lambda kind: FOUND[kind])):
        for container in (each for each in pod.containers if each.name == "engine"):
            env = {item["name"]: item.get("value") for item in container.env}
            share = next((word for flag, word in pairwise(container.command) if flag in FLAGS), "")
            found.append((" ".join(f"{name}={env[name]}" for name in VARIABLES if name in env), share))
    return found


FLAGS = ("--gpu-memory-utilization", "--mem-fraction-static")
VARIABLES = ("CUDA_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")


def test_engines_get_devices_of_their_own_kind_in_turn_and_share_once_there_are_more_engines() -> None:
    assert started(pool("a", "nvidia", 3), pool("b", "intel-xe", 2), pool("c", "cpu")) == [
        ("CUDA_VISIBLE_DEVICES=0", ""),
        ("CUDA_VISIBLE_DEVICES=1", ""),
        ("CUDA_VISIBLE_DEVICES=GPU-7", ""),
        ("ZE_AFFINITY_MASK=0", "0.45"),
        ("ZE_AFFINITY_MASK=0", "0.45"),
        ("", ""),
    ]


def test_an_engine_of_two_devices_gets_two_and_splits_memory_with_whom_it_meets() -> None:
    two = {"accelerator": {"kind": "nvidia", "count": 2}, "parallelism": {"tensor": 2}}
    assert started(pool("a", "nvidia", 2, **two)) == [
        ("CUDA_VISIBLE_DEVICES=0,1", "0.45"),
        ("CUDA_VISIBLE_DEVICES=0,GPU-7", "0.45"),
    ]
    four = {"accelerator": {"kind": "nvidia", "count": 4}}
    with pytest.raises(LocalError, match=r"pool a: each engine needs 4 devices of kind nvidia, .* has 0, 1, GPU-7"):
        started(pool("a", "nvidia", **four))


def test_what_the_user_sets_stays() -> None:
    own = {"podTemplate": {"spec": {"containers": [{"name": "engine", "env": [_CUDA]}]}}}
    assert started(pool("a", "nvidia", **own)) == [("CUDA_VISIBLE_DEVICES=9", "")]
    flagged = {"args": ["--gpu_memory_utilization=0.2"]}
    assert started(pool("a", "intel-xe", 2, **flagged)) == [("ZE_AFFINITY_MASK=0", "")] * 2


_CUDA = {"name": "CUDA_VISIBLE_DEVICES", "value": "9"}


@pytest.mark.parametrize("sharers", [1, 2, 3, 5])
def test_shares_of_free_memory_are_equal_parts_of_all_memory(sharers: int) -> None:
    free = 1.0
    for before in range(sharers):
        taken = free * memory_share(sharers, before, of_free=True)
        assert taken == pytest.approx(SPLIT_SHARE / sharers, abs=2e-3)
        assert memory_share(sharers, before, of_free=False) == pytest.approx(SPLIT_SHARE / sharers, abs=1e-3)
        free -= taken
    if sharers == 2:
        shares = started(pool("a", "nvidia", 1), pool("b", "intel-xe", 2), engine="sglang")
        assert [share for _, share in shares] == ["", "0.45", "0.818"]


def test_the_environment_names_the_devices_to_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZE_AFFINITY_MASK", "0.1, 1.0")
    assert find_devices("intel-xe") == ["0.1", "1.0"]
    assert find_devices("cpu") == []
    monkeypatch.setenv("ZE_AFFINITY_MASK", "")
    monkeypatch.setattr("pathlib.Path.glob", lambda *_: ["a device file"])
    assert find_devices("intel-xe") == []
