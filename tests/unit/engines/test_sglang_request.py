"""Chat requests, errors, metrics and server information of SGLang engines."""

from typing import Any

import pytest
from unit.engines.sglang_rows import capture_rows

from mmrouter_lib.engines.base.metrics import RankLoad
from mmrouter_lib.engines.base.request_rewriting import ImageRewrite
from mmrouter_lib.engines.sglang.metrics import METRICS, parse_block_size, parse_load
from mmrouter_lib.engines.sglang.request import REFUSED_FIELDS, prompt_error_field, rewrite_chat
from mmrouter_lib.engines.sglang.server_info import parse_info

URI = "data:image/png;base64,AAAA"


def chat(**image: Any) -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": "https://x/y.png", **image}}, {"type": "text", "text": "q"}]
    return {"model": "m", "messages": [{"role": "user", "content": parts}], "max_tokens": 3}


def rewritten(body: dict[str, Any], salt: str | None = None) -> Any:
    return rewrite_chat(body, [ImageRewrite(0, 0, URI, "m1-ab")], model="served", cache_salt=salt)


def test_images_are_inlined_without_an_identity() -> None:
    body = chat(detail="high")
    got = rewritten(body, "tenant").body
    assert got["messages"][0]["content"][0] == {"type": "image_url", "image_url": {"url": URI, "detail": "high"}}
    assert (got["model"], got["cache_salt"], got["max_tokens"]) == ("served", "tenant", 3)
    assert "m1-ab" not in str(got)
    assert body == chat(detail="high")


@pytest.mark.parametrize("field", REFUSED_FIELDS)
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


def test_an_image_without_a_part_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"messages\[3\]"):
        rewrite_chat(chat(), [ImageRewrite(3, 0, URI, "")], model="m", cache_salt=None)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (
            {"object": "error", "message": "content hash mismatch for media_data[0]: expected a", "param": None},
            "messages",
        ),
        ({"object": "error", "message": "Could not decode image: cannot identify image file"}, "messages"),
        ({"object": "error", "message": "Image count 9 exceeds limit 2 per request."}, "messages"),
        (
            {"error": {"message": "The input (9 tokens) is longer than the model's context length (8 tokens)."}},
            "messages",
        ),
        ({"object": "error", "message": "1 validation error [{'loc': ('body', 'top_p'), 'msg': 'x'}]"}, "top_p"),
        ({"object": "error", "message": "bad", "param": "stop"}, "stop"),
        ({"object": "error", "message": "Internal Server Error"}, None),
        ({"detail": "Not Found"}, None),
    ],
)
def test_errors_name_their_field(body: dict[str, Any], field: str | None) -> None:
    assert prompt_error_field(400, body) == field
    assert prompt_error_field(200, body) is None


def test_the_recorded_refusal_is_about_messages() -> None:
    line = next(row for row in capture_rows("qwen3_vl.page4.jsonl") if row["case"] == "chat_content_hash_wrong")
    assert prompt_error_field(line["reply"]["status"], line["reply"]["body"]) == "messages"


def test_every_metric_that_is_read_exists() -> None:
    line = next(row for row in capture_rows("qwen3_vl.page4.jsonl") if row["case"] == "metrics_names")
    assert set(METRICS.values()) <= set(line["reply"])


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
    assert parse_load(text) == {0: RankLoad(3.0, 0.0, 0.0), 1: RankLoad(0.0, 2.0, 0.25)}
    assert parse_block_size(text) == 32
    assert parse_load("sglang:num_running_reqs 1.0\n") == {0: RankLoad(1.0, 0.0, 0.0)}
    assert parse_load("") == {}
    assert parse_block_size("sglang:page_size x\n") is None


def test_engine_info_has_the_facts_that_identity_needs() -> None:
    rows = {row["case"]: row["reply"] for row in capture_rows("qwen3_vl.page4.jsonl")}
    info = parse_info([rows["server_info.kv_events"], rows["model_info"]])
    assert info is not None
    assert (info.version, info.block_size, info.publishes) == ("0.5.23", 4, True)
    assert info.facts["model_type"] == "qwen3_vl"
    assert info.facts["architectures"] == '["Qwen3VLForConditionalGeneration"]'
    assert info.facts["page_size"] == "4"


def test_fields_of_other_types_are_left_out() -> None:
    server = {"version": 5, "kv_events": None, "revision": None, "mm_process_config": {"image": {}}}
    assert parse_info([server, {}]) is None
    info = parse_info([server, {"model_type": None}])
    assert info is not None
    assert (info.version, info.block_size, info.publishes) == ("", None, False)
    assert info.facts == {"version": "", "revision": "null", "mm_process_config": '{"image":{}}'}
