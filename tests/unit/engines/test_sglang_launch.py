"""The command line of an SGLang engine: the wiring, the fields of the resource, and flags that users must not set."""

import json
from typing import Any

import pytest

from mmrouter_lib.api import SpecError, parse_deployment
from mmrouter_lib.api.engine_types.sglang import OWNED_FLAGS
from mmrouter_lib.engines import adapter
from mmrouter_lib.engines.base.launch import LaunchError
from mmrouter_lib.engines.sglang.launch import API_KEY_ENV, launch
from mmrouter_sim.sglang.flags import parse

POOL = {"name": "worker", "role": "worker", "accelerator": {"kind": "nvidia"}}


def deployment(pool: dict[str, Any] | None = None, **spec: Any) -> Any:
    return parse_deployment(
        {
            "apiVersion": "mmrouter.io/v1alpha1",
            "kind": "MMRouterDeployment",
            "metadata": {"name": "vl"},
            "spec": {"model": {"id": "org/model"}, "engine": {"type": "sglang"}, "pools": [POOL | (pool or {})]} | spec,
        }
    )


def arguments(pool: dict[str, Any] | None = None, **spec: Any) -> list[str]:
    dep = deployment(pool, **spec)
    return launch(dep, dep.spec.pools[0]).args


def value(args: list[str], flag: str) -> str:
    assert args.count(flag) == 1
    return args[args.index(flag) + 1]


def test_the_shortest_resource_gets_the_complete_command_line() -> None:
    dep = deployment()
    line = launch(dep, dep.spec.pools[0])
    assert (line.command[:2], line.health_path, line.env) == (["sglang", "serve"], "/ready", {})
    assert value(line.args, "--model-path") == "org/model"
    assert value(line.args, "--served-model-name") == "vl"
    assert value(line.args, "--host") == "$(POD_IP)"
    assert f"--api-key=$({API_KEY_ENV})" in line.args
    assert value(line.args, "--page-size") == "16"
    assert json.loads(value(line.args, "--kv-events-config")) == {
        "publisher": "zmq",
        "endpoint": "tcp://$(POD_LOOPBACK):5557",
        "replay_endpoint": "tcp://$(POD_LOOPBACK):5657",
        "buffer_steps": 10_000,
        "hwm": 10_000,
    }
    assert {"--enable-metrics", "--enable-cache-report"} <= set(line.args)
    assert not {"--mm-preprocess-cache-size-mb", "--mm-process-config", "--device", "--chat-template"} & set(line.args)


def test_the_engine_takes_a_key_that_begins_with_a_dash() -> None:
    dep = deployment()
    line = launch(dep, dep.spec.pools[0])
    given = [argument.replace(f"$({API_KEY_ENV})", "-key") for argument in line.args if "api-key" in argument]
    assert parse(["serve", "--model-path", "m", *given]).api_keys == ("-key",)


def test_fields_of_the_resource_become_flags() -> None:
    args = arguments(
        {"parallelism": {"tensor": 2, "data": 2}, "accelerator": {"kind": "nvidia", "count": 4}, "args": ["--x=1"]},
        model={"id": "org/model", "revision": "abc", "trustRemoteCode": True},
        engine={
            "type": "sglang",
            "blockSize": 32,
            "chatTemplate": {"configMap": {"name": "t", "key": "template"}},
            "processor": {"minPixels": 3136, "maxPixels": 1003520},
            "args": ["--mem-fraction-static", "0.8"],
        },
        routing={"media": {"maxImages": 5}},
    )
    assert value(args, "--page-size") == "32"
    assert value(args, "--revision") == "abc"
    assert json.loads(value(args, "--mm-process-config")) == {"image": {"min_pixels": 3136, "max_pixels": 1003520}}
    assert json.loads(value(args, "--limit-mm-data-per-request")) == {"image": 5}
    assert value(args, "--tensor-parallel-size") == "2"
    assert value(args, "--data-parallel-size") == "2"
    assert value(args, "--chat-template").endswith("template.jinja")
    assert "--trust-remote-code" in args
    assert args[-3:] == ["--mem-fraction-static", "0.8", "--x=1"]


@pytest.mark.parametrize(
    ("model", "named"),
    [
        ("Qwen/Qwen2.5-VL-3B-Instruct", True),
        ("Qwen/Qwen2-VL-2B-Instruct", True),
        ("Qwen/Qwen3-VL-2B-Instruct", True),
        ("org/my-qwen2-vl-tuned", True),
        ("llava-hf/llava-1.5-7b-hf", False),
        ("Qwen/Qwen3-8B", False),
    ],
)
def test_qwen_vl_engines_name_images_by_their_bytes(model: str, named: bool) -> None:
    assert ("--mm-preprocess-cache-size-mb" in arguments(model={"id": model})) is named


@pytest.mark.parametrize(
    ("kind", "page", "device"),
    [
        ("nvidia", "16", None),
        ("amd", "16", None),
        ("intel-xe", "64", "xpu"),
        ("gaudi", "64", "hpu"),
        ("cpu", "16", "cpu"),
    ],
)
def test_pages_and_device_follow_the_accelerator(kind: str, page: str, device: str | None) -> None:
    args = arguments({"accelerator": {"kind": kind}})
    assert value(args, "--page-size") == page
    assert (value(args, "--device") if "--device" in args else None) == device
    dep = deployment({"accelerator": {"kind": kind}})
    assert launch(dep, dep.spec.pools[0]).env == ({"SGLANG_USE_CPU_ENGINE": "1"} if kind == "cpu" else {})


@pytest.mark.parametrize("flag", sorted(owned.name for owned in OWNED_FLAGS))
def test_owned_flags_are_refused_in_args(flag: str) -> None:
    with pytest.raises(SpecError, match="cannot be set here"):
        deployment(engine={"type": "sglang", "args": [f"{flag}=1"]})


def test_users_may_set_the_preprocessing_cache() -> None:
    args = arguments(engine={"type": "sglang", "args": ["--mm-preprocess-cache-size-mb", "1024"]})
    assert value(args, "--mm-preprocess-cache-size-mb") == "1024"


def test_renderer_pools_are_refused() -> None:
    renderer = {"name": "r", "role": "renderer", "accelerator": {"kind": "cpu"}}
    with pytest.raises(SpecError, match="renderer pools exist for engine type vllm only"):
        deployment(pools=[POOL, renderer])


def role(name: str, kind: str = "nvidia") -> dict[str, Any]:
    return {"name": name, "role": name, "accelerator": {"kind": kind}}


def launched(name: str, kind: str = "nvidia", **engine: Any) -> Any:
    pools = [role("encoder", kind), role("prefill", kind), role("decode", kind)]
    dep = deployment(engine={"type": "sglang"} | engine, pools=pools)
    return launch(dep, dep.pool(name))


def test_prefill_and_decode_get_transfer_flags_and_a_bootstrap_port() -> None:
    for name in ("prefill", "decode"):
        made = launched(name)
        assert value(made.args, "--disaggregation-mode") == name
        assert value(made.args, "--disaggregation-transfer-backend") == "nixl"
        assert value(made.args, "--disaggregation-bootstrap-port") == "8998"
        assert made.health_path == "/ready"
    assert launched("prefill").ports == {"bootstrap": 8998}
    assert "--kv-events-config" in launched("prefill").args
    assert "--kv-events-config" not in launched("decode").args  # it keeps no prefix cache


def test_an_encoder_gets_encoder_flags_and_a_long_probe_timeout() -> None:
    made = launched("encoder")
    assert {"--encoder-only", "--enable-prefix-mm-cache"} <= set(made.args)
    assert value(made.args, "--encoder-transfer-backend") == "zmq_to_tokenizer"
    assert not {"--page-size", "--kv-events-config", "--enable-cache-report"} & set(made.args)
    assert (made.health_path, made.health_seconds) == ("/health", 30)


@pytest.mark.parametrize("name", ["worker", "prefill"])
def test_with_encoder_pools_an_engine_gets_its_sidecars_urls(name: str) -> None:
    pools = [role("encoder"), *([role("prefill"), role("decode")] if name == "prefill" else [role("worker")])]
    dep = deployment(pools=pools, model={"id": "Qwen/Qwen2.5-VL-7B-Instruct"})
    made = launch(dep, dep.pool(name))
    assert "--language-only" in made.args
    assert value(made.args, "--encoder-transfer-backend") == "zmq_to_tokenizer"
    first = made.args.index("--encoder-urls") + 1
    urls = [arg for arg in made.args[first:] if arg.startswith("http")]
    assert urls == [f"http://$(POD_LOOPBACK):8002/encoders/{slot}" for slot in range(16)]
    assert made.env["SGLANG_ENCODER_BOOTSTRAP_HEALTH_CHECK_INTERVAL"] == "0"
    assert "--mm-preprocess-cache-size-mb" not in made.args  # its encoders process images


def test_without_encoders_and_in_decode_pools_there_are_no_encoder_urls() -> None:
    decode = launched("decode")
    assert not {"--language-only", "--encoder-urls", "--encoder-transfer-backend"} & {*decode.args, *arguments()}
    assert decode.env == {}


def test_a_users_connector_replaces_the_default() -> None:
    said = {"transferBackend": "mooncake", "ibDevice": "mlx5_0"}
    args = launched("decode", "intel-xe", kvConnector=said).args
    assert value(args, "--disaggregation-transfer-backend") == "mooncake"
    assert value(args, "--disaggregation-ib-device") == "mlx5_0"


@pytest.mark.parametrize(
    ("name", "kind", "engine", "path"),
    [
        ("prefill", "intel-xe", {}, "engine.kvConnector"),
        ("decode", "cpu", {}, "engine.kvConnector"),
        ("decode", "nvidia", {"kvConnector": {"ibDevice": "mlx5_0"}}, "engine.kvConnector"),
        ("decode", "nvidia", {"kvConnector": {"transferBackend": "nixl", "port": 1}}, "engine.kvConnector.port"),
        ("encoder", "nvidia", {"ecConnector": {"ec_connector": "X"}}, "engine.ecConnector.ec_connector"),
        ("encoder", "nvidia", {"ecConnector": {"transferBackend": "mooncake"}}, "engine.ecConnector.transferBackend"),
        ("prefill", "nvidia", {"ecConnector": {"transferBackend": "mooncake"}}, "engine.ecConnector.transferBackend"),
    ],
)
def test_an_unavailable_transfer_is_an_error_with_its_field(
    name: str, kind: str, engine: dict[str, Any], path: str
) -> None:
    with pytest.raises(LaunchError) as caught:
        launched(name, kind, **engine)
    assert caught.value.path == path


def test_every_launched_flag_that_exactness_needs_is_owned() -> None:
    lines = [arguments(), *(launched(name).args for name in ("encoder", "prefill", "decode"))]
    flags = [arg.partition("=")[0] for line in lines for arg in line if arg.startswith("--")]
    assert set(flags) <= {owned.name for owned in OWNED_FLAGS} | {"--mm-preprocess-cache-size-mb", "--device"}


def test_an_unknown_engine_has_no_adapter() -> None:
    with pytest.raises(ValueError, match="other"):
        adapter("other")
