"""Requests of the stages and of the plugin's HTTP API; parameters and offers that are passed on unchanged."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmrouter_lib.block_keys import Span
from mmrouter_lib.engines.base.adapter import ImageRewrite
from mmrouter_lib.engines.vllm import plugin_api
from mmrouter_lib.engines.vllm import stage_requests as stages
from mmrouter_lib.media_identity import to_wire

BODY = {"model": "m", "messages": [{"role": "user", "content": "x"}], "temperature": 0, "stream": True}


def test_an_encode_request_names_the_images_and_makes_one_token():
    images = [ImageRewrite(0, 1, "data:a", "m1-a"), ImageRewrite(2, 0, "data:b", "m1-b")]
    body = stages.encode_request(images, model="m")
    parts = body["messages"][0]["content"]
    assert [(part["image_url"]["url"], part["uuid"]) for part in parts] == [("data:a", "m1-a"), ("data:b", "m1-b")]
    assert (body["max_tokens"], body["stream"], body["model"]) == (1, False, "m")


def test_a_real_encoders_answer_is_read(captures):
    row = captures.lines("qwen2vl_encoder_disagg.jsonl")[0]
    found = stages.read_encoded(json.dumps(row).encode(), ["ec-1"])
    assert found == row["ec_transfer_params"]


def test_a_real_prefills_answer_is_passed_to_the_decoder_unchanged(captures):
    for row in captures.lines("qwen2vl_pd_nixl.jsonl"):
        params = stages.read_prefilled(json.dumps(row["P"]).encode())
        assert stages.decode_request(BODY, params)["kv_transfer_params"] == row["P"]["kv_transfer_params"]


NO_BLOCKS = b'{"kv_transfer_params": {"do_remote_prefill": false}}'


@pytest.mark.parametrize("raw", [b"", b"[]", b"{", b"\xff", b"{}", b'{"ec_transfer_params": {"a": 1}}', NO_BLOCKS])
def test_an_answer_without_the_image_or_without_blocks_is_an_error(raw):
    with pytest.raises(stages.StageError, match="encoder"):
        stages.read_encoded(raw, ["a"])
    with pytest.raises(stages.StageError, match="prefill"):
        stages.read_prefilled(raw)


@given(st.lists(st.sampled_from("abcdef"), max_size=12), st.sets(st.sampled_from("abcdef")))
def test_merged_parameters_have_each_encoded_image_once_with_all_positions(order, answered):
    encoded = {name: {"item_indices": [0], "metadata": {"of": name}, "peer_host": name} for name in answered}
    body = stages.with_embeddings(BODY, encoded, order)
    params = body.get("ec_transfer_params", {})
    assert set(params) == answered & set(order)
    for name, fields in params.items():
        assert fields["item_indices"] == [place for place, other in enumerate(order) if other == name]
        assert fields["metadata"] == {"of": name}
        assert fields["peer_host"] == name
    assert {key: value for key, value in body.items() if key != "ec_transfer_params"} == BODY
    assert all(fields["item_indices"] == [0] for fields in encoded.values())


def test_a_prefill_computes_the_same_prompt_and_one_token():
    asked = {"max_tokens": 500, "min_tokens": 10, "stream_options": {"include_usage": True}, "logprobs": True}
    body = stages.prefill_request(BODY | asked | {"tools": [{"type": "function"}], "chat_template_kwargs": {"a": 1}})
    assert body["max_tokens"] == 1
    assert body["stream"] is False
    assert body["kv_transfer_params"] == {"do_remote_decode": True, "do_remote_prefill": False}
    assert not {"min_tokens", "stream_options", "logprobs"} & set(body)
    # All that changes the prompt stays.
    for name in ("messages", "tools", "chat_template_kwargs", "temperature", "model"):
        assert name in body


def test_a_limit_under_its_newer_name_is_one_token_too():
    body = stages.prefill_request(BODY | {"max_completion_tokens": 9})
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
    assert stages.why_whole(BODY | fields) == reason


A, B = b"a" * 32, b"b" * 32


def answer(*images: tuple[bytes, int, int], ids: int = 40, **changes: Any) -> bytes:
    features = {
        "mm_hashes": {"image": [to_wire(identity) for identity, _, _ in images]},
        "mm_placeholders": {"image": [{"offset": at, "length": length} for _, at, length in images]},
        "kwargs_data": None,
    }
    body = {"request_id": "r", "token_ids": list(range(ids)), "features": features if images else None, "model": "m"}
    return json.dumps(body | changes).encode()


def test_ids_and_spans_are_in_prompt_order():
    ids, spans = stages.read_rendered(answer((B, 20, 4), (A, 3, 6)))
    assert ids.tolist() == list(range(40))
    assert spans == (Span(3, 6, A), Span(20, 4, B))
    assert stages.read_rendered(answer())[1] == ()
    places = {"image": [{"offset": 20, "length": 4}], "video": [{"offset": 3, "length": 6}]}
    both = answer(features={"mm_hashes": {"image": [to_wire(B)], "video": [to_wire(A)]}, "mm_placeholders": places})
    assert stages.read_rendered(both)[1] == spans


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"<html>", "not a rendered prompt"),
        (b'{"token_ids": [-1]}', "not a rendered prompt"),
        (answer((A, 38, 4)), "is at 38"),
        (answer((A, 3, 0)), "is at 3"),
        (answer(features={"mm_hashes": {"vision_chunk": ["x"]}}), "vision_chunk"),
        (answer(features={"mm_hashes": {"video": ["x"]}}), "1 videos are named"),
        (answer(features={"mm_hashes": {"image": ["x"]}, "mm_placeholders": {"image": []}}), "1 images are named"),
        (answer((A, 0, 1)).replace(to_wire(A).encode(), b"x"), "no identity of mmrouter"),
    ],
)
def test_an_answer_that_cannot_be_used_is_refused_with_a_reason(raw: bytes, says: str):
    with pytest.raises(stages.RenderError, match=says):
        stages.read_rendered(raw)


def test_a_render_request_has_the_prompts_fields_and_no_tensors():
    body = {"model": "m", "messages": [], "stream": True, "cache_salt": "s", "tools": [{"type": "function"}]}
    prompt = {"model": "m", "messages": [], "tools": [{"type": "function"}]}
    assert stages.render_request(body) == {**prompt, "mm_payload": "none"}
    assert body["stream"]


def test_the_recorded_answer_of_a_real_renderer_is_read_whole(captures):
    rows = captures.lines("qwen2vl_render_generate.jsonl")
    reply = next(row["reply"] for row in rows if row["kind"] == "render")
    reply["features"]["mm_hashes"]["image"] = [to_wire(A)]  # that request came without our identity
    ids, spans = stages.read_rendered(json.dumps(reply).encode())
    assert len(ids) == len(reply["token_ids"])
    assert spans == (Span(17, 64, A),)
    assert set(ids[17:81]) == {364}


A_NAME, B_NAME = to_wire(A), to_wire(B)


def handed(**changes: Any) -> bytes:
    """The plugin's answer: a rendered prompt, and offers of its images."""
    offer = {"way": "shm", "length": 5, "handle": {"path": "p", "of the next release": [1, 2]}}
    handover = {"lease": "l-1", "offers": {A_NAME: offer}, "withheld": {B_NAME: "full"}, "fell": [["nixl", "absent"]]}
    return answer((A, 2, 3), (B, 6, 2), ids=9, **handover | changes)


def test_a_rendered_answer_has_the_prompt_offers_and_reasons():
    read = plugin_api.read_render(handed())
    assert read.ids.tolist() == list(range(9))
    assert read.spans == (Span(2, 3, A), Span(6, 2, B))
    assert (read.offers[A_NAME].way, read.offers[A_NAME].length, read.lease) == ("shm", 5, "l-1")
    assert (read.withheld, read.fell) == ({B_NAME: "full"}, (("nixl", "absent"),))


def test_an_offer_is_passed_on_unchanged():
    sent = json.loads(plugin_api.items_request(plugin_api.read_render(handed()).offers, seconds=3))
    assert sent == {"items": json.loads(handed())["offers"], "seconds": 3}


@pytest.mark.parametrize(
    ("raw", "error"),
    [
        (b"<html>", plugin_api.HandoverError),
        (handed(lease=None), plugin_api.HandoverError),
        (handed(offers={A_NAME: {"way": "pigeon", "length": 1}}), plugin_api.HandoverError),
        (handed(offers={A_NAME: []}), plugin_api.HandoverError),
        (handed(offers={A_NAME: {"way": "shm", "length": "5"}}), plugin_api.HandoverError),
        (handed(token_ids=[]), stages.RenderError),
    ],
)
def test_an_answer_of_another_shape_is_refused(raw: bytes, error: type[Exception]):
    with pytest.raises(error):
        plugin_api.read_render(raw)


def test_unknown_reasons_become_other():
    assert plugin_api.read_render(handed(withheld={B_NAME: "moon phase"})).withheld == {B_NAME: "other"}
    taken = plugin_api.read_items(json.dumps({"held": [A_NAME], "refused": {B_NAME: "tide"}}).encode())
    assert (taken.held, taken.refused) == (frozenset({A_NAME}), {B_NAME: "other"})


def test_a_cache_miss_is_distinguished_from_other_errors():
    miss = b'{"error": {"message": "Cache miss for image at index 0 but data is not provided."}}'
    assert plugin_api.is_cache_miss(400, miss)
    assert not plugin_api.is_cache_miss(400, b'{"error": {"message": "max_tokens must be positive"}}')
    assert not plugin_api.is_cache_miss(200, miss)


def test_a_render_request_to_the_plugin_has_the_ways_in_order_and_no_tensors():
    body = {"model": "m", "messages": [], "stream": True}
    asked = plugin_api.render_request(body, ways=("shm", "inline"), seconds=30, images=[B_NAME, A_NAME], inline_bytes=9)
    assert asked == {
        "chat": {"model": "m", "messages": [], "mm_payload": "none"},
        "ways": ["shm", "inline"],
        "seconds": 30,
        "images": [A_NAME, B_NAME],
        "inline_bytes": 9,
    }
    assert plugin_api.render_request(body, ways=(), seconds=1)["images"] is None


def test_a_way_is_offered_only_by_a_plugin_of_this_version_that_is_enabled_and_gives_no_reason():
    status = {"version": 1, "role": "engine", "enabled": True, "ways": {"shm": "", "nixl": "absent"}}
    read = plugin_api.read_status(json.dumps(status).encode())
    assert read == plugin_api.Status(1, "engine", True, ways={"shm": "", "nixl": "absent"})
    assert (read.offers("shm"), read.offers("nixl"), read.offers("inline")) == (True, False, False)
    for change in ({"version": 2}, {"enabled": False, "reason": "vLLM 0.99 is not known"}):
        assert not plugin_api.read_status(json.dumps(status | change).encode()).offers("shm")
    with pytest.raises(plugin_api.HandoverError):
        plugin_api.read_status(b"[]")
