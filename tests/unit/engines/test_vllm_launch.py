"""The command line of a vLLM engine: the wiring, the fields of the resource, and flags that users must not set."""

import json
from typing import Any

import pytest

from mmrouter_lib.api import SpecError, parse_deployment
from mmrouter_lib.api.engine_types.vllm import OWNED_FLAGS
from mmrouter_lib.engines.base.launch import LaunchError, chosen_flags
from mmrouter_lib.engines.vllm.connectors import embedding_cache_bytes
from mmrouter_lib.engines.vllm.launch import KV_LAYOUT_FLAGS, launch


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


def test_the_shortest_resource_gets_the_complete_command_line() -> None:
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
    assert flags <= {owned.name for owned in OWNED_FLAGS}
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


def role(name: str, kind: str = "nvidia", **fields: Any) -> dict[str, Any]:
    return {"name": name, "role": name, "accelerator": {"kind": kind}} | fields


def launched(pools: list[dict[str, Any]], name: str, **engine: Any) -> Any:
    dep = deployment(engine={"type": "vllm"} | engine, pools=pools)
    return launch(dep, dep.pool(name))


def as_json(args: list[str], flag: str) -> Any:
    return json.loads(value(args, flag)) if flag in args else None


EPD = [role("encoder"), role("prefill"), role("decode")]
RECOMPUTE = {"kv_load_failure_policy": "recompute"}
NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cuda"} | RECOMPUTE
KV, EC = "--kv-transfer-config", "--ec-transfer-config"


def test_prefill_and_decode_exchange_blocks_over_nixl_on_the_pods_address() -> None:
    for name in ("prefill", "decode"):
        made = launched(EPD, name)
        assert as_json(made.args, KV) == NIXL
        assert made.env["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "$(POD_IP)"
        assert made.env["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "5600"
        assert made.ports == {"side-channel": 5600}
        assert {"--kv-events-config", "--enable-prefix-caching"} <= set(made.args)


@pytest.mark.parametrize(
    ("kind", "buffer"), [("amd", "cuda"), ("intel-xe", "xpu"), ("intel-i915", "xpu"), ("cpu", "cpu")]
)
def test_blocks_are_transferred_from_the_accelerators_memory(kind: str, buffer: str) -> None:
    made = launched([role("prefill", kind), role("decode", kind)], "decode")
    assert as_json(made.args, KV)["kv_buffer_device"] == buffer
    assert made.env.get("UCX_TLS") == ("tcp,self,sm" if kind == "cpu" else None)


def test_an_encoder_gets_producer_flags_and_no_cache_flags() -> None:
    made = launched(EPD, "encoder")
    config = as_json(made.args, EC)
    assert (config["ec_connector"], config["ec_role"]) == ("ECCPUConnector", "ec_producer")
    # Half of the pod's shared memory, in bytes: the region lies in /dev/shm.
    assert config["ec_connector_extra_config"] == {"ec_cpu_bytes": 4 * 2**30, "ec_enable_nixl": True}
    assert (made.env["VLLM_EC_SIDE_CHANNEL_HOST"], made.env["VLLM_EC_SIDE_CHANNEL_PORT"]) == ("$(POD_IP)", "5600")
    assert made.env["VLLM_USE_V2_MODEL_RUNNER"] == "1"
    # It gets nothing else, and would encode the longest video at its start.
    assert as_json(made.args, "--limit-mm-per-prompt") == {"image": 32, "video": 0, "audio": 0}
    cache = {"--block-size", "--enable-prefix-caching", "--kv-events-config", "--enable-prompt-tokens-details"}
    assert not cache & set(made.args)
    assert as_json(made.args, KV) is None


@pytest.mark.parametrize(
    ("connector", "size"),
    [(None, 4 * 2**30), ({"ec_connector": "ECExampleConnector"}, None), ({"ec_connector_extra_config": {}}, None)],
)
def test_the_embedding_cache_size_follows_from_the_connector(
    connector: dict[str, Any] | None, size: int | None
) -> None:
    dep = deployment(pools=EPD, engine={"type": "vllm", "ecConnector": connector or {}})
    (encoder,) = (pool for pool in dep.spec.pools if pool.role == "encoder")
    assert embedding_cache_bytes(dep, encoder) == size


def test_engines_that_prefill_consume_embeddings_where_there_are_encoders() -> None:
    assert as_json(launched(EPD, "prefill").args, EC)["ec_role"] == "ec_consumer"
    assert as_json(launched(EPD, "decode").args, EC) is None
    beside = [role("encoder"), role("worker")]
    assert as_json(launched(beside, "worker").args, EC)["ec_role"] == "ec_consumer"
    assert as_json(launched([role("worker")], "worker").args, EC) is None


def test_a_users_connectors_replace_the_defaults_and_only_what_is_left_out_is_filled_in() -> None:
    connectors = {
        "kvConnector": {"kv_connector": "MooncakeConnector", "kv_role": "kv_producer"},
        "ecConnector": {
            "ec_connector": "ECExampleConnector",
            "ec_connector_extra_config": {"shared_storage_path": "/x"},
        },
    }
    encoder, prefill = (launched(EPD, name, **connectors) for name in ("encoder", "prefill"))
    assert as_json(prefill.args, KV) == RECOMPUTE | connectors["kvConnector"]
    assert as_json(prefill.args, EC) == {"ec_role": "ec_consumer", **connectors["ecConnector"]}
    assert as_json(encoder.args, EC) == {"ec_role": "ec_producer", **connectors["ecConnector"]}
    assert "VLLM_USE_V2_MODEL_RUNNER" not in encoder.env


def test_a_user_may_choose_that_requests_fail_on_missing_blocks() -> None:
    fails = {"kv_connector": "MooncakeConnector", "kv_load_failure_policy": "fail"}
    assert as_json(launched(EPD, "decode", kvConnector=fails).args, KV)["kv_load_failure_policy"] == "fail"


@pytest.mark.parametrize(
    ("pools", "name", "engine", "path"),
    [
        ([role("prefill", "gaudi"), role("decode", "gaudi")], "prefill", {}, "engine.kvConnector"),
        ([role("encoder", "cpu"), role("worker")], "encoder", {}, "engine.ecConnector"),
        ([role("encoder"), role("worker", "cpu")], "worker", {}, "engine.ecConnector"),
        (EPD, "decode", {"kvConnector": {"kv_role": "kv_both"}}, "engine.kvConnector"),
        (EPD, "encoder", {"ecConnector": {"ec_role": "ec_both"}}, "engine.ecConnector"),
        (
            [role("encoder", accelerator={"kind": "nvidia", "count": 2}, parallelism={"data": 2}), role("worker")],
            "encoder",
            {},
            "parallelism.data",
        ),
    ],
)
def test_an_unavailable_transfer_is_an_error_with_its_field(
    pools: list[dict[str, Any]], name: str, engine: dict[str, Any], path: str
) -> None:
    with pytest.raises(LaunchError) as caught:
        launched(pools, name, **engine)
    assert caught.value.path == path


def test_a_users_flags_are_read_in_all_their_spellings() -> None:
    args = [
        "--dtype",
        "half",
        "--kv_cache_dtype=fp8",
        "-q",
        "awq",
        "--seed",
        "1",
        "--calculate-kv-scales",
        "--dtype=bf16",
    ]
    assert chosen_flags(args, KV_LAYOUT_FLAGS) == {
        "--dtype": "bf16",
        "--kv-cache-dtype": "fp8",
        "-q": "awq",
        "--calculate-kv-scales": "",
    }
