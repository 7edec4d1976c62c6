"""Requests of the encode, prefill and decode stages, and the parameters passed between them."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmrouter_lib.engines.base.request_rewriting import ImageRewrite
from mmrouter_lib.engines.vllm.stage_requests import (
    StageError,
    decode_request,
    encode_request,
    prefill_request,
    read_encoded,
    read_prefilled,
    why_whole,
    with_embeddings,
)

BODY = {"model": "m", "messages": [{"role": "user", "content": "x"}], "temperature": 0, "stream": True}


def captured(captures, name):
    return [json.loads(line) for line in (captures.folder / f"{name}.jsonl").read_text().splitlines()]


def test_an_encode_request_names_the_images_and_makes_one_token():
    images = [ImageRewrite(0, 1, "data:a", "m1-a"), ImageRewrite(2, 0, "data:b", "m1-b")]
    body = encode_request(images, model="m")
    parts = body["messages"][0]["content"]
    assert [(part["image_url"]["url"], part["uuid"]) for part in parts] == [("data:a", "m1-a"), ("data:b", "m1-b")]
    assert (body["max_tokens"], body["stream"], body["model"]) == (1, False, "m")


def test_a_real_encoders_answer_is_read(captures):
    row = captured(captures, "qwen2vl_encoder_disagg")[0]
    found = read_encoded(json.dumps(row).encode(), ["ec-1"])
    assert found == row["ec_transfer_params"]


def test_a_real_prefills_answer_is_passed_to_the_decoder_unchanged(captures):
    for row in captured(captures, "qwen2vl_pd_nixl"):
        params = read_prefilled(json.dumps(row["P"]).encode())
        assert decode_request(BODY, params)["kv_transfer_params"] == row["P"]["kv_transfer_params"]


@pytest.mark.parametrize("raw", [b"", b"[]", b"{", b"\xff", b'{"ec_transfer_params": {"a": 1}}', b"{}"])
def test_an_encoders_answer_without_the_image_is_an_error(raw):
    with pytest.raises(StageError, match="encoder"):
        read_encoded(raw, ["a"])


@pytest.mark.parametrize("raw", [b"", b"[]", b"{}", b'{"kv_transfer_params": {"do_remote_prefill": false}}', b"\xff"])
def test_a_prefills_answer_without_blocks_is_an_error(raw):
    with pytest.raises(StageError, match="prefill"):
        read_prefilled(raw)


@given(st.lists(st.sampled_from("abcdef"), max_size=12), st.sets(st.sampled_from("abcdef")))
def test_merged_parameters_have_each_encoded_image_once_with_all_positions(order, answered):
    encoded = {name: {"item_indices": [0], "metadata": {"of": name}, "peer_host": name} for name in answered}
    body = with_embeddings(BODY, encoded, order)
    params = body.get("ec_transfer_params", {})
    assert set(params) == answered & set(order)
    for name, said in params.items():
        assert said["item_indices"] == [place for place, other in enumerate(order) if other == name]
        assert said["metadata"] == {"of": name}
        assert said["peer_host"] == name
    assert {key: value for key, value in body.items() if key != "ec_transfer_params"} == BODY
    assert all(said["item_indices"] == [0] for said in encoded.values())


def test_a_prefill_computes_the_same_prompt_and_one_token():
    asked = {"max_tokens": 500, "min_tokens": 10, "stream_options": {"include_usage": True}, "logprobs": True}
    body = prefill_request(BODY | asked | {"tools": [{"type": "function"}], "chat_template_kwargs": {"a": 1}})
    assert body["max_tokens"] == 1
    assert body["stream"] is False
    assert body["kv_transfer_params"] == {"do_remote_decode": True, "do_remote_prefill": False}
    assert not {"min_tokens", "stream_options", "logprobs"} & set(body)
    # All that changes the prompt stays.
    for name in ("messages", "tools", "chat_template_kwargs", "temperature", "model"):
        assert name in body


def test_a_limit_under_its_newer_name_is_one_token_too():
    body = prefill_request(BODY | {"max_completion_tokens": 9})
    assert (body["max_completion_tokens"], "max_tokens" in body) == (1, False)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, None),
        ({"n": 1, "prompt_logprobs": None}, None),
        ({"n": 2}, "several_answers"),
        ({"best_of": 3}, "several_answers"),
        ({"use_beam_search": True}, "several_answers"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"echo": True}, "prompt_logprobs"),
    ],
)
def test_requests_that_need_one_engine_have_a_reason(fields, reason):
    assert why_whole(BODY | fields) == reason
