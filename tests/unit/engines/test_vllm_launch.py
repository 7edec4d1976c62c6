"""The command line of a vLLM engine: the wiring, the fields of the resource, and what a user may not set."""

import json
from typing import Any

import pytest

from mmrouter.api import SpecError, parse_deployment
from mmrouter.engines.vllm import OWNED_FLAGS, launch


def deployment(**spec: Any) -> Any:
    pool = {"name": "worker", "role": "worker", "accelerator": {"kind": "nvidia"}} | spec.pop("pool", {})
    return parse_deployment(
        {
            "apiVersion": "mmrouter.io/v1alpha1",
            "kind": "MMRouterDeployment",
            "metadata": {"name": "vl"},
            "spec": {"model": {"id": "org/model"}, "engine": {"type": "vllm"}, "pools": [pool]} | spec,
        }
    )


def arguments(**spec: Any) -> list[str]:
    dep = deployment(**spec)
    return launch(dep, dep.spec.pools[0]).args


def value(args: list[str], flag: str) -> str:
    assert args.count(flag) == 1
    return args[args.index(flag) + 1]


def test_the_shortest_resource_launches_with_the_whole_wiring() -> None:
    dep = deployment()
    line = launch(dep, dep.spec.pools[0])
    assert (line.command, line.health_path) == (["vllm", "serve"], "/health")
    assert line.args[0] == "org/model"
    assert value(line.args, "--served-model-name") == "vl"
    assert value(line.args, "--host") == "$(POD_IP)"
    assert value(line.args, "--block-size") == "16"
    assert value(line.args, "--prefix-caching-hash-algo") == "sha256_cbor"
    assert json.loads(value(line.args, "--kv-events-config")) == {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": "tcp://$(POD_LOOPBACK):5557",
        "replay_endpoint": "tcp://$(POD_LOOPBACK):5657",
        "buffer_steps": 10_000,
        "hwm": 10_000,
    }
    assert {"--enable-prefix-caching", "--enable-prompt-tokens-details"} <= set(line.args)
    assert not {"--chat-template", "--mm-processor-kwargs", "--data-parallel-size", "--trust-remote-code"} & set(
        line.args
    )


def test_every_field_that_changes_prompts_or_blocks_becomes_its_flag() -> None:
    args = arguments(
        model={"id": "org/model", "revision": "abc", "trustRemoteCode": True},
        engine={
            "type": "vllm",
            "chatTemplate": {"configMap": {"name": "t", "key": "k"}},
            "processor": {"maxPixels": 1003520},
            "args": ["--max-model-len", "8192"],
        },
        routing={"media": {"maxImages": 5}},
        pool={
            "accelerator": {"kind": "nvidia", "count": 4},
            "blockSize": 32,
            "parallelism": {"tensor": 2, "data": 2},
            "updates": {"drainSeconds": 7},
            "args": ["--enforce-eager"],
        },
    )
    assert value(args, "--revision") == "abc"
    assert value(args, "--block-size") == "32"
    assert json.loads(value(args, "--mm-processor-kwargs")) == {"max_pixels": 1003520}
    assert json.loads(value(args, "--limit-mm-per-prompt")) == {"image": 5}
    assert value(args, "--chat-template").startswith("/")
    assert (value(args, "--tensor-parallel-size"), value(args, "--data-parallel-size")) == ("2", "2")
    assert value(args, "--shutdown-timeout") == "7"
    assert args[-3:] == ["--max-model-len", "8192", "--enforce-eager"]


def test_a_mounted_model_is_served_from_its_folder_and_without_a_revision() -> None:
    args = arguments(model={"id": "org/model", "volume": {"persistentVolumeClaim": {"claimName": "w"}}})
    assert args[0].startswith("/")
    assert "--revision" not in args


def test_roles_that_need_a_transfer_are_not_launched_without_one() -> None:
    dep = deployment()
    encoder = dep.spec.pools[0].model_copy(update={"role": "encoder"})
    with pytest.raises(ValueError, match="encoder"):
        launch(dep, encoder)


def test_every_flag_that_launch_sets_is_refused_from_users() -> None:
    args = arguments(
        model={"id": "m", "trustRemoteCode": True},
        engine={
            "type": "vllm",
            "chatTemplate": {"configMap": {"name": "t", "key": "k"}},
            "processor": {"minPixels": 9},
        },
        pool={"accelerator": {"kind": "nvidia", "count": 4}, "parallelism": {"tensor": 2, "data": 2}},
    )
    flags = {arg for arg in args if arg.startswith("--")}
    assert flags <= set(OWNED_FLAGS)
    for flag in flags:
        with pytest.raises(SpecError, match=r"engine\.args"):
            deployment(engine={"type": "vllm", "args": [flag]})


def test_a_renderer_gets_every_flag_that_changes_a_prompt_and_none_about_a_cache() -> None:
    engine = {
        "type": "vllm",
        "processor": {"maxPixels": 1003520},
        "chatTemplate": {"configMap": {"name": "t", "key": "k"}},
    }
    model = {"id": "org/model", "revision": "abc", "trustRemoteCode": True}
    pools = [
        {"name": "worker", "role": "worker", "accelerator": {"kind": "nvidia"}},
        {"name": "render", "role": "renderer", "accelerator": {"kind": "cpu"}},
    ]
    dep = deployment(model=model, engine=engine, pools=pools)
    worker, renderer = (launch(dep, pool) for pool in dep.spec.pools)
    assert (renderer.command, renderer.health_path) == (["vllm", "launch", "render"], "/health")
    cache = {"--block-size", "--prefix-caching-hash-algo", "--kv-events-config", "--shutdown-timeout"}
    switches = {"--enable-prefix-caching", "--enable-prompt-tokens-details"}
    left_out = [n for n, arg in enumerate(worker.args) if arg in cache | switches]
    skipped = set(left_out) | {n + 1 for n in left_out if worker.args[n] in cache}
    assert renderer.args == [arg for n, arg in enumerate(worker.args) if n not in skipped]
