"""Adapters: images and identities of chat requests, removed fields, shared bodies; errors name their field; load."""

import copy
from pathlib import Path
from typing import Any

import pytest
from unit.engines.conftest import capture_rows

from mmrouter_lib.engines import adapter
from mmrouter_lib.engines.base.adapter import ImageRewrite, RankLoad, TokenCounts
from mmrouter_lib.engines.sglang import adapter as sglang
from mmrouter_lib.engines.vllm import adapter as vllm

BIG = "data:image/png;base64," + "A" * 1_000_000


def image(url: str, **beside: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}} | beside


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": [*parts]}


def body(**fields: Any) -> dict[str, Any]:
    first = {"type": "image_url", "image_url": {"url": "http://client.example/a.png", "detail": "high"}}
    asked = user({"type": "text", "text": "what is this"}, first, image(BIG, uuid="stolen"))
    return {"model": "client-name", "messages": [{"role": "system", "content": "be brief"}, asked], **fields}


IMAGES = [ImageRewrite(1, 1, "data:image/png;base64,QQ==", "m1-aa"), ImageRewrite(1, 2, BIG, "m1-bb")]


def test_every_image_gets_the_bytes_and_the_identity() -> None:
    new = vllm.VLLM.rewrite_chat(body(), IMAGES, model="served", cache_salt="tenant").body
    parts = new["messages"][1]["content"]
    assert parts[1]["image_url"] == {"url": "data:image/png;base64,QQ==", "detail": "high"}
    assert (parts[1]["type"], parts[1]["uuid"], len(parts[1])) == ("image_url", "m1-aa", 3)
    assert parts[2] == image(BIG, uuid="m1-bb")
    assert (new["model"], new["cache_salt"]) == ("served", "tenant")


def test_the_clients_body_is_not_changed_and_megabytes_are_shared() -> None:
    old = body(cache_salt="mine", vllm_xargs={"kv_cache_report_mode": "full"})
    before = copy.deepcopy(old)
    new = vllm.VLLM.rewrite_chat(old, IMAGES, model="served", cache_salt=None).body
    assert old == before
    assert new["messages"][0] is old["messages"][0]
    assert new["messages"][1]["content"][0] is old["messages"][1]["content"][0]
    assert new["messages"][1]["content"][2]["image_url"]["url"] is IMAGES[1].url


@pytest.mark.parametrize("field", vllm.VLLM.removed_fields)
def test_fields_of_the_router_are_removed_and_named(field: str) -> None:
    rewritten = vllm.VLLM.rewrite_chat(body(**{field: "x"}), IMAGES, model="served", cache_salt=None)
    assert field not in rewritten.body
    assert set(rewritten.removed) == {field, "uuid"}
    if field == "cache_salt":
        ours = vllm.VLLM.rewrite_chat(body(cache_salt="theirs"), IMAGES, model="served", cache_salt="ours")
        assert (ours.body[field], set(ours.removed)) == ("ours", {field, "uuid"})


def test_uuids_are_removed_from_parts_and_images() -> None:
    video = {"type": "video_url", "video_url": {"url": "v"}}
    picture = {"type": "image_url", "image_url": {"url": "i", "uuid": "inside"}}
    request = {"model": "m", "messages": [user(video | {"uuid": "u"}), user(picture)]}
    rewritten = vllm.VLLM.rewrite_chat(request, [ImageRewrite(1, 0, "data:,", "m1-cc")], model="m", cache_salt=None)
    assert rewritten.body["messages"][0]["content"] == [video]
    assert rewritten.body["messages"][1]["content"][0]["image_url"] == {"url": "data:,"}
    assert set(rewritten.removed) == {"uuid", "image_url.uuid"}


def test_a_video_gets_its_identity_beside_its_url() -> None:
    video = {"type": "video_url", "video_url": {"url": "data:,"}}
    request = {"model": "m", "messages": [user(video | {"uuid": "theirs"})]}
    rewritten = vllm.VLLM.rewrite_chat(request, [ImageRewrite(0, 0, "", "m1-cc")], model="m", cache_salt=None)
    assert rewritten.body["messages"][0]["content"] == [video | {"uuid": "m1-cc"}]
    assert set(rewritten.removed) == {"uuid"}


def test_only_the_keys_that_steer_caches_leave_vllm_xargs() -> None:
    xargs = {"kv_cache_report_mode": "full", "kv_transfer_params": "x", "mine": 1}
    rewritten = vllm.VLLM.rewrite_chat(body(vllm_xargs=xargs), IMAGES, model="m", cache_salt=None)
    assert rewritten.body["vllm_xargs"] == {"mine": 1}
    assert {"vllm_xargs.kv_cache_report_mode", "vllm_xargs.kv_transfer_params"} <= set(rewritten.removed)


def test_options_that_the_engine_itself_refuses_stay_in_place() -> None:
    fields = {"mm_processor_kwargs": {"max_pixels": 1}, "media_io_kwargs": {"image": {}}, "priority": 3, "seed": 7}
    new = vllm.VLLM.rewrite_chat(body(**fields), IMAGES, model="m", cache_salt=None).body
    assert fields.items() <= new.items()


def test_an_image_written_as_a_bare_string_becomes_a_whole_part() -> None:
    request = {"model": "m", "messages": [user({"type": "image_url", "image_url": "http://x"})]}
    new = vllm.VLLM.rewrite_chat(request, [ImageRewrite(0, 0, "data:,", "m1-dd")], model="m", cache_salt=None).body
    assert new["messages"][0]["content"] == [image("data:,", uuid="m1-dd")]


@pytest.mark.parametrize("place", [(7, 0), (1, 9), (0, 0)])
def test_an_image_without_a_place_is_an_error(place: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=rf"messages\[{place[0]}\]"):
        vllm.VLLM.rewrite_chat(body(), [ImageRewrite(*place, "data:,", "m1-ee")], model="m", cache_salt=None)


def test_captured_errors_name_the_field_that_they_are_about(captures: Any) -> None:
    named = {}
    for name in captures.names():
        for line in captures.lines(name):
            answer = line.get("reply") if isinstance(line.get("reply"), dict) else {}
            error = answer.get("error") or line.get("error")
            if error:
                named[error["message"][:24]] = vllm.prompt_error_field(line["status"], {"error": error})
    assert named == {
        "Failed to apply Phi3VPro": "messages",
        "EngineCore encountered a": None,
        "Cache miss for image at ": "messages",
        "Per-request mm_processor": "mm_processor_kwargs",
        "Per-request media_io_kwa": "media_io_kwargs",
        "Internal server error": None,
    }


MANY = {"message": "At most 1 image(s) may be provided in one prompt.", "param": "image"}
LONG = {"message": "The input (9 tokens) is longer than the model's context length (8 tokens)."}


@pytest.mark.parametrize(
    ("engine", "answer", "field"),
    [
        (vllm, {"error": {"message": "x", "param": "body.temperature"}}, "temperature"),
        (vllm, {"error": MANY}, "messages"),
        (vllm, {"error": {"message": "This model's maximum context length is 8", "param": "input_tokens"}}, "messages"),
        (vllm, {"message": "The decoder prompt (length 9) is longer than the maximum model length of 8."}, "messages"),
        (vllm, {"error": {"message": "bad (parameter=top_p, value=7)", "param": None}}, "top_p"),
        (vllm, {"error": {"message": None, "param": 3}}, None),
        (vllm, {"error": "text"}, None),
        (sglang, {"message": "content hash mismatch for media_data[0]: expected a", "param": None}, "messages"),
        (sglang, {"message": "Could not decode image: cannot identify image file"}, "messages"),
        (sglang, {"message": "Image count 9 exceeds limit 2 per request."}, "messages"),
        (sglang, {"error": LONG}, "messages"),
        (sglang, {"message": "1 validation error [{'loc': ('body', 'top_p'), 'msg': 'x'}]"}, "top_p"),
        (sglang, {"message": "bad", "param": "stop"}, "stop"),
        (sglang, {"message": "Internal Server Error"}, None),
        (sglang, {"detail": "Not Found"}, None),
    ],
)
def test_errors_name_their_field(engine: Any, answer: dict[str, Any], field: str | None) -> None:
    assert engine.prompt_error_field(400, answer) == field
    assert engine.prompt_error_field(200, answer) is None


@pytest.mark.parametrize(
    ("status", "message", "about_a_file"),
    [
        (500, "[Errno 2] No such file or directory: '<path>'", True),
        (500, "[Errno 13] Permission denied: '<path>'", True),
        (500, "Cannot load local files without `--allowed-local-media-path`.", True),
        (400, "The file path <path> must be a subpath of `--allowed-local-media-path <path>`.", True),
        (400, "Failed to load image: cannot identify image file <_io.BytesIO object>", False),
        (500, "cannot schedule new futures after shutdown", False),
        (503, "[Errno 2] No such file or directory: '<path>'", False),
    ],
)
def test_errors_about_local_files_are_recognized(status, message, about_a_file):
    assert vllm.is_file_refused(status, f'{{"error": {{"message": "{message}"}}}}'.encode()) is about_a_file


def test_a_path_becomes_a_quoted_file_url():
    assert vllm.file_url(Path("/a b/c%d.png")) == "file:///a%20b/c%25d.png"
    with pytest.raises(ValueError, match="relative"):
        vllm.file_url(Path("a.png"))


TEXT = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a \\"quoted\\" } name"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 1.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 9.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 1e-3
vllm:cache_config_info{block_size="32",engine="0",hash_block_size="16",num_gpu_blocks="24"} 1.0
"""


def test_load_is_read_per_rank() -> None:
    assert vllm.parse_load(TEXT) == {0: RankLoad(3, 2, 0.25), 1: RankLoad(1, 0, 0.001)}


def test_the_engines_own_block_size_is_read_and_not_the_hash_block_size() -> None:
    assert vllm.parse_block_size(TEXT) == 32
    assert vllm.parse_block_size('vllm:cache_config_info{hash_block_size="16"} 1.0\n') is None


@pytest.mark.parametrize(
    ("label", "cpu"), [('"4294967296"', True), ('"None"', False), ('""', False), ('"1",x="2"', True)]
)
def test_a_size_of_the_cache_that_no_flag_set_shows_a_cpu(label: str, cpu: bool) -> None:
    assert vllm.shows_cpu(f'vllm:cache_config_info{{block_size="32",kv_cache_memory_bytes={label}}} 1.0\n') is cpu
    assert not vllm.shows_cpu(f"vllm:cache_config_info{{x_kv_cache_memory_bytes={label}}} 1.0\n")
    assert not vllm.shows_cpu(TEXT)
    assert not adapter("sglang").shows_cpu(TEXT)


@pytest.mark.parametrize(
    ("args", "sets"),
    [
        (["--kv-cache-memory-bytes", "4Gi"], True),
        (["--kv_cache_memory_bytes=4096"], True),
        (["--kv-cache-mem=1"], True),
        (["--kv-cache-dtype", "fp8"], False),
    ],
)
def test_a_flag_for_the_size_of_the_cache_is_found_in_every_form(args: list[str], sets: bool) -> None:
    assert vllm.sets_cache_bytes(["serve", *args, "--seed=1"]) is sets


RUNNING = 'num_requests_running{engine="0"}'


@pytest.mark.parametrize("text", ["", "nothing", f"vllm:{RUNNING} NaN", f"vllm:{RUNNING} many", f"other:{RUNNING} 1"])
def test_missing_samples_give_no_load(text: str) -> None:
    assert vllm.parse_load(text) == {}


def test_tokens_are_summed_over_ranks_and_over_what_splits_a_counter() -> None:
    text = """\
vllm:prefix_cache_queries_total{engine="0",model_name="m"} 100.0
vllm:prefix_cache_queries_total{engine="1",model_name="m"} 20.0
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 48.0
vllm:generation_tokens_total{engine="1",model_name="m"} 7.0
"""
    assert vllm.parse_tokens(text) == TokenCounts(120, 48, 7)
    text = """\
sglang:prompt_tokens_total{is_streaming="true"} 90.0
sglang:prompt_tokens_total{is_streaming="false"} 10.0
sglang:cached_tokens_total{cache_source="device"} 30.0
sglang:cached_tokens_total{cache_source="host"} 2.0
sglang:generation_tokens_total{is_streaming="true"} 5.0
"""
    assert sglang.parse_tokens(text) == TokenCounts(100, 32, 5)
    assert vllm.parse_tokens('vllm:generation_tokens_total{engine="0"} 0.0\n') == TokenCounts()
    assert vllm.parse_tokens(TEXT) is None


def test_samples_without_labels_belong_to_rank_zero() -> None:
    assert vllm.parse_load("vllm:num_requests_waiting 4\n") == {0: RankLoad(0, 4, 0)}


URI = "data:image/png;base64,AAAA"


def chat(**beside: Any) -> dict[str, Any]:
    picture = {"type": "image_url", "image_url": {"url": "https://x/y.png", **beside}}
    return {"model": "m", "messages": [user(picture, {"type": "text", "text": "q"})], "max_tokens": 3}


def rewritten(body: dict[str, Any], salt: str | None = None) -> Any:
    return sglang.SGLANG.rewrite_chat(body, [ImageRewrite(0, 0, URI, "m1-ab")], model="served", cache_salt=salt)


def test_images_are_inlined_without_an_identity() -> None:
    body = chat(detail="high")
    got = rewritten(body, "tenant").body
    assert got["messages"][0]["content"][0] == {"type": "image_url", "image_url": {"url": URI, "detail": "high"}}
    assert (got["model"], got["cache_salt"], got["max_tokens"]) == ("served", "tenant", 3)
    assert "m1-ab" not in str(got)
    assert body == chat(detail="high")


@pytest.mark.parametrize("field", sglang.SGLANG.removed_fields)
def test_fields_that_steer_caches_are_removed(field: str) -> None:
    got = rewritten(chat() | {field: "client"})
    assert got.removed == (field,)
    assert field not in got.body
    if field == "cache_salt":
        assert rewritten(chat() | {field: "client"}, "ours").body[field] == "ours"


def test_hashes_beside_an_image_are_removed() -> None:
    body = chat(content_hash="sha256:" + "0" * 64)
    body["messages"][0]["content"][0]["uuid"] = "x"
    got = rewritten(body)
    assert set(got.removed) == {"image_url.content_hash", "uuid"}
    assert "content_hash" not in str(got.body)
    assert "uuid" not in got.body["messages"][0]["content"][0]


@pytest.fixture
def replies() -> dict[str, Any]:
    """A real engine's answers by case."""
    return {row["case"]: row["reply"] for row in capture_rows("qwen3_vl.page4.jsonl")}


def test_the_recorded_refusal_is_about_messages(replies: dict[str, Any]) -> None:
    refusal = replies["chat_content_hash_wrong"]
    assert sglang.prompt_error_field(refusal["status"], refusal["body"]) == "messages"


def test_every_metric_that_is_read_exists(replies: dict[str, Any]) -> None:
    assert set(sglang.METRICS.values()) <= set(replies["metrics_names"])


def test_load_is_the_maximum_per_rank() -> None:
    text = """# HELP sglang:num_running_reqs x
sglang:num_running_reqs{dp_rank="0",model_name="a,b{}",tp_rank="0"} 3.0
sglang:num_running_reqs{dp_rank="0",model_name="a",tp_rank="1"} 3.0
sglang:num_running_reqs{dp_rank="0",model_name="a",priority="1"} 9.0
sglang:num_queue_reqs{dp_rank="1",priority=""} 2.0
sglang:num_queue_reqs_other{dp_rank="1"} 7.0
sglang:token_usage{dp_rank="1"} 0.25
sglang:token_usage{dp_rank="0"} NaN
sglang:page_size{dp_rank="0"} 32.0
"""
    assert sglang.parse_load(text) == {0: RankLoad(3.0, 0.0, 0.0), 1: RankLoad(0.0, 2.0, 0.25)}
    assert sglang.parse_block_size(text) == 32
    assert sglang.parse_load("sglang:num_running_reqs 1.0\n") == {0: RankLoad(1.0, 0.0, 0.0)}
    assert sglang.parse_load("") == {}
    assert sglang.parse_block_size("sglang:page_size x\n") is None


def test_engine_info_has_the_facts_that_identity_needs(replies: dict[str, Any]) -> None:
    info = sglang.parse_info([replies["server_info.kv_events"], replies["model_info"]])
    assert info is not None
    assert (info.version, info.block_size, info.publishes) == ("0.5.23", 4, True)
    assert info.facts["model_type"] == "qwen3_vl"
    assert info.facts["architectures"] == '["Qwen3VLForConditionalGeneration"]'
    assert info.facts["page_size"] == "4"


def test_fields_of_other_types_are_left_out() -> None:
    server = {"version": 5, "kv_events": None, "revision": None, "mm_process_config": {"image": {}}}
    assert sglang.parse_info([server, {}]) is None
    info = sglang.parse_info([server, {"model_type": None}])
    assert info is not None
    assert (info.version, info.block_size, info.publishes) == ("", None, False)
    assert info.facts == {"version": "", "revision": "null", "mm_process_config": '{"image":{}}'}
    assert (info.device, info.devices) == ("", 0)


@pytest.mark.parametrize(("shared", "devices"), [(False, 8), (True, 4)])
def test_the_device_is_the_resolved_one(shared: bool, devices: int) -> None:
    sizes = {"tp_size": 4, "pp_size": 1, "dp_size": 2, "enable_dp_attention": shared}
    info = sglang.parse_info([{"version": "0.5.23", "device": "cuda:0", **sizes}, {"model_type": "m"}])
    assert info is not None
    assert (info.device, info.devices) == ("cuda", devices)
