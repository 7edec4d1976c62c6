"""Engines' command lines: fields of the resource, connectors, and flags that users must not set.

The golden files of tests/unit/render hold the complete command lines of every role and accelerator.
"""

import json
from functools import partial
from typing import Any

import pytest
from unit.engines.conftest import deployment, role, value, values

from mmrouter_lib.api import SpecError
from mmrouter_lib.api.engine_traits import SGLANG_FLAGS, VLLM_FLAGS
from mmrouter_lib.engines import adapter
from mmrouter_lib.engines.base.launch import Launch, LaunchError, chosen_flags
from mmrouter_lib.engines.sglang.launch import API_KEY_ENV
from mmrouter_lib.engines.sglang.launch import launch as launch_sglang
from mmrouter_lib.engines.vllm.embedding_transfer import embedding_cache_bytes
from mmrouter_lib.engines.vllm.launch import VLLM
from mmrouter_lib.engines.vllm.launch import launch as launch_vllm
from mmrouter_lib.pod_paths import EMBEDDINGS_DIR, SHARED_DIR
from mmrouter_sim.sglang.flags import parse

OWNED = {"vllm": {owned.name for owned in VLLM_FLAGS}, "sglang": {owned.name for owned in SGLANG_FLAGS}}
EPD = [role("encoder"), role("prefill"), role("decode")]
MODEL = {"id": "org/model", "revision": "abc", "trustRemoteCode": True}
TEMPLATE = {"configMap": {"name": "t", "key": "template"}}
FOUR_GPUS = {"accelerator": {"kind": "nvidia", "count": 4}, "parallelism": {"tensor": 2, "data": 2}}
FIVE_IMAGES = {"media": {"maxImages": 5}}
RECOMPUTE = {"kv_load_failure_policy": "recompute"}
FILES = "ECExampleConnector"
KV, EC = "--kv-transfer-config", "--ec-transfer-config"
CACHE, IMAGES = "--mm-preprocess-cache-size-mb", "--enable-multimodal"


def launched(engine: str, name: str = "worker", pool: Any = None, *, fields: Any = None, **spec: Any) -> Launch:
    """The command line of a pool; ``fields`` are the engine's, ``pool`` those of the only pool."""
    dep = deployment(pool, engine={"type": engine} | (fields or {}), **spec)
    return (launch_vllm if engine == "vllm" else launch_sglang)(dep, dep.pool(name))


vllm, sglang = partial(launched, "vllm"), partial(launched, "sglang")


def as_json(args: list[str], flag: str) -> Any:
    return json.loads(value(args, flag)) if flag in args else None


def flags(line: Launch) -> set[str]:
    return {arg.partition("=")[0] for arg in line.args if arg.startswith("--")}


def test_sglang_takes_a_key_that_begins_with_a_dash() -> None:
    given = [arg.replace(f"$({API_KEY_ENV})", "-key") for arg in sglang().args if "api-key" in arg]
    assert parse(["serve", "--model-path", "m", *given]).api_keys == ("-key",)


@pytest.mark.parametrize("engine", [vllm, sglang])
def test_tls_is_read_again_when_its_files_change(engine: Any) -> None:
    given = engine(fields={"tls": {"secretName": "a"}})
    assert {"--ssl-certfile", "--ssl-keyfile", "--enable-ssl-refresh"} == flags(given) - flags(engine())


def test_every_field_that_changes_prompts_or_blocks_becomes_its_flag_of_vllm() -> None:
    engine = {"processor": {"maxPixels": 1003520}, "args": ["--max-model-len", "8192"]}
    pool = FOUR_GPUS | {"blockSize": 32, "updates": {"drainSeconds": 7}, "args": ["--enforce-eager"]}
    args = vllm(pool=pool, fields=engine | {"chatTemplate": TEMPLATE}, model=MODEL, routing=FIVE_IMAGES).args
    wanted = "--revision --block-size --tensor-parallel-size --data-parallel-size --shutdown-timeout"
    assert values(args, wanted) == ["abc", "32", "2", "2", "7"]
    assert as_json(args, "--mm-processor-kwargs") == {"max_pixels": 1003520}
    assert as_json(args, "--limit-mm-per-prompt") == {"image": 5}
    assert value(args, "--chat-template").startswith("/")
    assert args[-3:] == ["--max-model-len", "8192", "--enforce-eager"]


def test_fields_of_the_resource_become_flags_of_sglang() -> None:
    processor = {"minPixels": 3136, "maxPixels": 1003520}
    engine = {"blockSize": 32, "processor": processor, "args": ["--mem-fraction-static", "0.8"]}
    pool = FOUR_GPUS | {"args": ["--x=1"]}
    args = sglang(pool=pool, fields=engine | {"chatTemplate": TEMPLATE}, model=MODEL, routing=FIVE_IMAGES).args
    assert values(args, "--page-size --revision --tensor-parallel-size --data-parallel-size") == ["32", "abc", "2", "2"]
    assert as_json(args, "--mm-process-config") == {"image": {"min_pixels": 3136, "max_pixels": 1003520}}
    assert as_json(args, "--limit-mm-data-per-request") == {"image": 5}
    assert value(args, "--chat-template").endswith("template.jinja")
    assert "--trust-remote-code" in args
    assert args[-3:] == ["--mem-fraction-static", "0.8", "--x=1"]


def test_a_mounted_model_is_served_from_its_folder_and_without_a_revision() -> None:
    args = vllm(model={"id": "org/model", "volume": {"persistentVolumeClaim": {"claimName": "w"}}}).args
    assert args[0].startswith("/")
    assert "--revision" not in args


def test_every_launched_flag_that_exactness_needs_is_owned() -> None:
    engine = {"chatTemplate": TEMPLATE, "processor": {"minPixels": 9}}
    model = {"id": "m", "trustRemoteCode": True}
    assert flags(vllm(pool=FOUR_GPUS, fields=engine, model=model)) <= OWNED["vllm"]
    for line in (sglang(), *(sglang(pool["name"], pools=EPD) for pool in EPD)):
        assert flags(line) <= OWNED["sglang"] | {"--mm-preprocess-cache-size-mb", "--device"}


@pytest.mark.parametrize(("engine", "flag"), [(engine, flag) for engine in OWNED for flag in sorted(OWNED[engine])])
def test_owned_flags_are_refused_in_args(engine: str, flag: str) -> None:
    with pytest.raises(SpecError, match=r"engine\.args.*cannot be set here"):
        deployment(engine={"type": engine, "args": [f"{flag}=1"]})


def test_a_renderer_gets_every_flag_that_changes_a_prompt_and_none_about_a_cache() -> None:
    engine = {"processor": {"maxPixels": 1003520}, "chatTemplate": TEMPLATE}
    pools = [role("worker"), role("renderer", "cpu")]
    worker, renderer = (vllm(pool["name"], pools=pools, model=MODEL, fields=engine) for pool in pools)
    assert (renderer.command, renderer.health_path) == (["vllm", "launch", "render"], "/health")
    cache = {"--block-size", "--prefix-caching-hash-algo", "--kv-events-config", "--shutdown-timeout"}
    switches = {"--enable-prefix-caching", "--enable-prompt-tokens-details", "--enable-scale-out"}
    left_out = [n for n, arg in enumerate(worker.args) if arg in cache | switches]
    skipped = set(left_out) | {n + 1 for n in left_out if worker.args[n] in cache}
    assert renderer.args == [arg for n, arg in enumerate(worker.args) if n not in skipped]


def test_renderer_pools_of_sglang_are_refused() -> None:
    with pytest.raises(SpecError, match="renderer pools exist for engine type vllm only"):
        sglang(pools=[role("worker"), role("renderer", "cpu")])


@pytest.mark.parametrize(
    ("model", "flags_named"),
    [
        ("Qwen/Qwen2.5-VL-3B-Instruct", [CACHE]),
        ("Qwen/Qwen2-VL-2B-Instruct", [CACHE]),
        ("Qwen/Qwen3-VL-2B-Instruct", [CACHE]),
        ("org/my-qwen2-vl-tuned", [CACHE]),
        ("Qwen/Qwen3.5-9B", [CACHE]),
        ("Qwen/Qwen3.6-35B-A3B", [CACHE]),
        ("PaddlePaddle/PaddleOCR-VL-1.5", [CACHE]),
        ("google/gemma-3-27b-it", [IMAGES]),
        ("google/medgemma-27b-it", [IMAGES]),
        ("org/gemma_3_4b", [IMAGES]),
        ("meta-llama/Llama-4-Scout-17B-16E-Instruct", [IMAGES]),
        ("meta-llama/Llama-Guard-4-12B", [IMAGES]),
        ("google/gemma-3n-E4B-it", []),
        ("google/gemma-4-31b-it", []),
        ("meta-llama/Llama-3.1-8B-Instruct", []),
        ("codellama/codellama-4bit", []),
        ("llava-hf/llava-1.5-7b-hf", []),
        ("Qwen/Qwen3-8B", []),
    ],
)
def test_the_models_name_decides_how_its_images_are_named_and_whether_they_are_taken(
    model: str, flags_named: list[str]
) -> None:
    args = sglang(model={"id": model}).args
    assert [flag for flag in (CACHE, IMAGES) if flag in args] == flags_named


def test_users_may_set_the_preprocessing_cache() -> None:
    args = sglang(fields={"args": ["--mm-preprocess-cache-size-mb", "1024"]}).args
    assert value(args, "--mm-preprocess-cache-size-mb") == "1024"


@pytest.mark.parametrize("name", ["prefill", "decode"])
def test_prefill_and_decode_of_sglang_get_transfer_flags_and_a_bootstrap_port(name: str) -> None:
    line = sglang(name, pools=EPD)
    wanted = "--disaggregation-mode --disaggregation-transfer-backend --disaggregation-bootstrap-port"
    assert (values(line.args, wanted), line.health_path) == ([name, "nixl", "8998"], "/ready")
    assert name == "decode" or line.ports == {"bootstrap": 8998}
    assert ("--kv-events-config" in line.args) is (name == "prefill")  # a decode pool keeps no prefix cache


@pytest.mark.parametrize(
    ("kind", "buffer"), [("amd", "cuda"), ("intel-xe", "xpu"), ("intel-i915", "xpu"), ("cpu", "cpu")]
)
def test_blocks_are_transferred_from_the_accelerators_memory(kind: str, buffer: str) -> None:
    line = vllm("decode", pools=[role("prefill", kind), role("decode", kind)])
    assert as_json(line.args, KV)["kv_buffer_device"] == buffer
    assert line.env.get("UCX_TLS") == ("tcp,self,sm" if kind == "cpu" else None)


@pytest.mark.parametrize(("kind", "cache"), [("nvidia", "4"), ("intel-xe", "4"), ("gaudi", "4"), ("cpu", None)])
def test_an_engine_that_is_to_have_an_accelerator_shows_in_its_metrics_if_it_computes_on_a_cpu(
    kind: str, cache: str | None
) -> None:
    assert vllm(pool=role("worker", kind)).env.get("VLLM_CPU_KVCACHE_SPACE") == cache


@pytest.mark.parametrize(
    ("connector", "size"),
    [(None, 4 * 2**30), ({"ec_connector": "ECExampleConnector"}, None), ({"ec_connector_extra_config": {}}, None)],
)
def test_the_embedding_cache_size_follows_from_the_connector(
    connector: dict[str, Any] | None, size: int | None
) -> None:
    dep = deployment(pools=EPD, engine={"type": "vllm", "ecConnector": connector or {}})
    assert embedding_cache_bytes(dep, dep.pool("encoder")) == size


NODE = {"sharedMemory": {"scope": "node"}}
VOLUME = {"embeddingVolume": {"nfs": {"server": "s", "path": "/"}}}


@pytest.mark.parametrize(
    ("kinds", "pool", "fields", "connector", "folder"),
    [
        (("nvidia", "nvidia", "nvidia"), {}, {}, "ECCPUConnector", None),
        (("intel-xe", "intel-xe", "intel-xe"), NODE, {}, "ECCPUConnector", None),
        (("cpu", "nvidia", "nvidia"), {}, {}, FILES, EMBEDDINGS_DIR),
        (("cpu", "intel-xe", "cpu"), {}, {}, FILES, EMBEDDINGS_DIR),
        (("intel-xe", "nvidia", "nvidia"), {}, {}, FILES, EMBEDDINGS_DIR),
        (("nvidia", "nvidia", "cpu"), NODE, {}, FILES, SHARED_DIR),
        (("cpu", "nvidia", "nvidia"), NODE, {}, FILES, SHARED_DIR),
        (("cpu", "cpu", "cpu"), {}, {}, FILES, EMBEDDINGS_DIR),
        (("nvidia", "nvidia", "nvidia"), NODE, VOLUME, FILES, EMBEDDINGS_DIR),
    ],
)
def test_all_pools_get_one_connector_that_each_of_their_devices_has(
    kinds: tuple[str, str, str], pool: dict[str, Any], fields: dict[str, Any], connector: str, folder: str | None
) -> None:
    names = ("one", "two", "work")
    roles = ("encoder", "encoder", "worker")
    pools = [{**role(each, kind, **pool), "name": name} for name, each, kind in zip(names, roles, kinds, strict=True)]
    made = [as_json(vllm(name, pools=pools, fields=fields).args, EC) for name in names]
    assert {config["ec_connector"] for config in made} == {connector}
    assert {config["ec_connector_extra_config"].get("shared_storage_path") for config in made} == {folder}
    assert [config["ec_role"] for config in made] == ["ec_producer", "ec_producer", "ec_consumer"]


def test_a_decode_pools_device_does_not_count_for_embeddings() -> None:
    pools = [role("encoder"), role("prefill"), role("decode", "cpu")]
    assert as_json(vllm("encoder", pools=pools).args, EC)["ec_connector"] == "ECCPUConnector"


def test_engines_that_prefill_consume_embeddings_where_there_are_encoders() -> None:
    assert as_json(vllm("prefill", pools=EPD).args, EC)["ec_role"] == "ec_consumer"
    assert as_json(vllm("decode", pools=EPD).args, EC) is None
    assert as_json(vllm(pools=[role("encoder"), role("worker")]).args, EC)["ec_role"] == "ec_consumer"
    assert as_json(vllm(pools=[role("worker")]).args, EC) is None


@pytest.mark.parametrize(("name", "others"), [("worker", []), ("prefill", [role("decode")])])
def test_with_encoder_pools_an_sglang_engine_gets_its_sidecars_urls(name: str, others: list[dict[str, Any]]) -> None:
    pools = [role("encoder"), role(name), *others]
    line = sglang(name, pools=pools, model={"id": "Qwen/Qwen2.5-VL-7B-Instruct"})
    assert "--language-only" in line.args
    assert value(line.args, "--encoder-transfer-backend") == "zmq_to_tokenizer"
    first = line.args.index("--encoder-urls") + 1
    urls = [arg for arg in line.args[first:] if arg.startswith("http")]
    assert urls == [f"http://$(POD_LOOPBACK):8002/encoders/{slot}" for slot in range(16)]
    assert line.env["SGLANG_ENCODER_BOOTSTRAP_HEALTH_CHECK_INTERVAL"] == "0"
    assert "--mm-preprocess-cache-size-mb" not in line.args  # its encoders process images


def test_without_encoders_and_in_decode_pools_there_are_no_encoder_urls() -> None:
    decode = sglang("decode", pools=EPD)
    assert not {"--language-only", "--encoder-urls", "--encoder-transfer-backend"} & (flags(decode) | flags(sglang()))
    assert "SGLANG_ENCODER_BOOTSTRAP_HEALTH_CHECK_INTERVAL" not in decode.env
    # Without it the engine ignores the headers by which a pair meets.
    assert decode.env["SGLANG_ENABLE_REQUEST_HEADER_OVERRIDES"] == "1"


def test_a_users_connectors_of_vllm_replace_the_defaults_and_only_what_is_left_out_is_filled_in() -> None:
    kv = {"kv_connector": "MooncakeConnector", "kv_role": "kv_producer"}
    ec = {"ec_connector": "ECExampleConnector", "ec_connector_extra_config": {"shared_storage_path": "/x"}}
    connectors = {"kvConnector": kv, "ecConnector": ec}
    encoder, prefill = (vllm(name, pools=EPD, fields=connectors) for name in ("encoder", "prefill"))
    assert as_json(prefill.args, KV) == RECOMPUTE | kv
    assert as_json(prefill.args, EC) == {"ec_role": "ec_consumer", **ec}
    assert as_json(encoder.args, EC) == {"ec_role": "ec_producer", **ec}
    assert "VLLM_USE_V2_MODEL_RUNNER" not in encoder.env


def test_a_users_connector_of_sglang_replaces_the_default() -> None:
    connector = {"transferBackend": "mooncake", "ibDevice": "mlx5_0"}
    pools = [role("prefill", "intel-xe"), role("decode", "intel-xe")]
    args = sglang("decode", pools=pools, fields={"kvConnector": connector}).args
    assert values(args, "--disaggregation-transfer-backend --disaggregation-ib-device") == ["mooncake", "mlx5_0"]


def test_a_user_may_choose_that_requests_fail_on_missing_blocks() -> None:
    fails = {"kv_connector": "MooncakeConnector", "kv_load_failure_policy": "fail"}
    args = vllm("decode", pools=EPD, fields={"kvConnector": fails}).args
    assert as_json(args, KV)["kv_load_failure_policy"] == "fail"


MOONCAKE = {"transferBackend": "mooncake"}
TWO_RANKS = {"accelerator": {"kind": "nvidia", "count": 2}, "parallelism": {"data": 2}}


@pytest.mark.parametrize(
    ("engine", "pools", "name", "fields", "path"),
    [
        ("vllm", [role("prefill", "gaudi"), role("decode", "gaudi")], "prefill", {}, "engine.kvConnector"),
        ("vllm", EPD, "decode", {"kvConnector": {"kv_role": "kv_both"}}, "engine.kvConnector"),
        ("vllm", EPD, "encoder", {"ecConnector": {"ec_role": "ec_both"}}, "engine.ecConnector"),
        ("vllm", [role("encoder", **TWO_RANKS), role("worker")], "encoder", {}, "parallelism.data"),
        ("sglang", [role("prefill", "intel-xe"), role("decode", "intel-xe")], "prefill", {}, "engine.kvConnector"),
        ("sglang", [role("prefill", "cpu"), role("decode", "cpu")], "decode", {}, "engine.kvConnector"),
        ("sglang", EPD, "decode", {"kvConnector": {"ibDevice": "mlx5_0"}}, "engine.kvConnector"),
        ("sglang", EPD, "decode", {"kvConnector": {"transferBackend": "nixl", "port": 1}}, "engine.kvConnector.port"),
        ("sglang", EPD, "encoder", {"ecConnector": {"ec_connector": "X"}}, "engine.ecConnector.ec_connector"),
        ("sglang", EPD, "encoder", {"ecConnector": MOONCAKE}, "engine.ecConnector.transferBackend"),
        ("sglang", EPD, "prefill", {"ecConnector": MOONCAKE}, "engine.ecConnector.transferBackend"),
    ],
)
def test_an_unavailable_transfer_is_an_error_with_its_field(
    engine: str, pools: list[dict[str, Any]], name: str, fields: dict[str, Any], path: str
) -> None:
    with pytest.raises(LaunchError) as caught:
        launched(engine, name, pools=pools, fields=fields)
    assert caught.value.path == path


def test_a_users_flags_are_read_in_all_their_spellings() -> None:
    line = "--dtype half --kv_cache_dtype=fp8 -q awq --seed 1 --calculate-kv-scales --dtype=bf16"
    wanted = {"--dtype": "bf16", "--kv-cache-dtype": "fp8", "-q": "awq", "--calculate-kv-scales": ""}
    assert chosen_flags(line.split(), VLLM.kv_layout_flags) == wanted


def test_an_unknown_engine_has_no_adapter() -> None:
    with pytest.raises(ValueError, match="other"):
        adapter("other")
