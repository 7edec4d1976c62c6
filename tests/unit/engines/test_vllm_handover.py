"""The plugin's HTTP API: requests, answers, and offers that are passed on unchanged."""

import json
from typing import Any

import pytest

from mmrouter_lib.block_keys import Span
from mmrouter_lib.engines.vllm.handover import (
    HandoverError,
    Status,
    is_cache_miss,
    items_request,
    read_items,
    read_render,
    read_status,
    render_request,
    without_bytes,
)
from mmrouter_lib.engines.vllm.renderer import RenderError
from mmrouter_lib.media_identity import to_wire

A, B = to_wire(b"a" * 32), to_wire(b"b" * 32)


def answer(**changes: Any) -> bytes:
    features = {"mm_hashes": {"image": [A, B]}, "mm_placeholders": {"image": [place(2, 3), place(6, 2)]}}
    body = {
        "token_ids": list(range(9)),
        "features": features,
        "lease": "l-1",
        "offers": {A: {"way": "shm", "length": 5, "handle": {"path": "p", "of the next release": [1, 2]}}},
        "withheld": {B: "full"},
        "fell": [["nixl", "absent"]],
    }
    return json.dumps(body | changes).encode()


def place(offset: int, length: int) -> dict[str, int]:
    return {"offset": offset, "length": length}


def image(name: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": "data:,"}, "uuid": name}


def test_a_rendered_answer_has_the_prompt_offers_and_reasons():
    read = read_render(answer())
    assert read.ids.tolist() == list(range(9))
    assert read.spans == (Span(2, 3, b"a" * 32), Span(6, 2, b"b" * 32))
    assert (read.offers[A].way, read.offers[A].length, read.lease) == ("shm", 5, "l-1")
    assert (read.withheld, read.fell) == ({B: "full"}, (("nixl", "absent"),))


def test_an_offer_is_passed_on_unchanged():
    sent = json.loads(items_request(read_render(answer()).offers, seconds=3))
    assert sent == {"items": json.loads(answer())["offers"], "seconds": 3}


@pytest.mark.parametrize(
    ("raw", "error"),
    [
        (b"<html>", HandoverError),
        (answer(lease=None), HandoverError),
        (answer(offers={A: {"way": "pigeon", "length": 1}}), HandoverError),
        (answer(offers={A: []}), HandoverError),
        (answer(offers={A: {"way": "shm", "length": "5"}}), HandoverError),
        (answer(token_ids=[]), RenderError),
    ],
)
def test_an_answer_of_another_shape_is_refused(raw: bytes, error: type[Exception]):
    with pytest.raises(error):
        read_render(raw)


def test_unknown_reasons_become_other():
    assert read_render(answer(withheld={B: "moon phase"})).withheld == {B: "other"}
    taken = read_items(json.dumps({"held": [A], "refused": {B: "tide"}}).encode())
    assert (taken.held, taken.refused) == (frozenset({A}), {B: "other"})


def test_only_the_images_that_the_engine_holds_lose_their_bytes():
    text = {"type": "text", "text": "and"}
    before = {
        "model": "m",
        "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": [image(A), text, image(B)]}],
    }
    kept = json.dumps(before)
    after = without_bytes(before, {A})
    assert after["messages"][0] is before["messages"][0]
    assert after["messages"][1]["content"] == [image(A) | {"image_url": None}, text, image(B)]
    assert json.dumps(before) == kept


def test_a_cache_miss_is_distinguished_from_other_errors():
    said = b'{"error": {"message": "Cache miss for image at index 0 but data is not provided."}}'
    assert is_cache_miss(400, said)
    assert not is_cache_miss(400, b'{"error": {"message": "max_tokens must be positive"}}')
    assert not is_cache_miss(200, said)


def test_a_render_request_has_the_ways_in_order_and_no_tensors():
    body = {"model": "m", "messages": [], "stream": True}
    asked = render_request(body, ways=("shm", "inline"), seconds=30, images=[B, A], inline_bytes=9)
    assert asked == {
        "chat": {"model": "m", "messages": [], "mm_payload": "none"},
        "ways": ["shm", "inline"],
        "seconds": 30,
        "images": [A, B],
        "inline_bytes": 9,
    }
    assert render_request(body, ways=(), seconds=1)["images"] is None


def test_a_way_is_offered_only_by_a_plugin_of_this_version_that_is_enabled_and_gives_no_reason():
    status = {"version": 1, "role": "engine", "enabled": True, "ways": {"shm": "", "nixl": "absent"}}
    read = read_status(json.dumps(status).encode())
    assert read == Status(1, "engine", True, ways={"shm": "", "nixl": "absent"})
    assert (read.offers("shm"), read.offers("nixl"), read.offers("inline")) == (True, False, False)
    for change in ({"version": 2}, {"enabled": False, "reason": "vLLM 0.99 is not known"}):
        assert not read_status(json.dumps(status | change).encode()).offers("shm")
    with pytest.raises(HandoverError):
        read_status(b"[]")
