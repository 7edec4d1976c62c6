"""Requests that are forwarded without a prediction: their media, their head, and the refusal of invalid ones."""

import json
import re

import pytest
from unit.router.test_intake import MISSING, PART_TYPE, TOO_MANY, TYPE, UNKNOWN, fault, read

from mmrouter_router.intake import parse_forwarded as forwarded

CONTENT = [
    {"type": "input_text", "text": "http://not-media.example/"},
    {"type": "input_image", "image_url": "http://secret.example/1", "uuid": "mine", "file_id": None},
    {"type": "image_url", "image_url": {"url": "http://secret.example/2", "content_hash": "mine"}},
]


SCREENSHOT = {"type": "computer_screenshot", "image_url": "http://secret.example/3"}


RESPONSES = {
    "model": "demo",
    "instructions": "be brief",
    "input": [{"role": "user", "content": CONTENT}, {"type": "computer_call_output", "output": SCREENSHOT}],
}


def test_media_of_a_forwarded_request_are_collected_at_any_depth():
    request = read(RESPONSES, parse=forwarded)
    assert [(part.kind, part.url, part.param) for part in request.media] == [
        ("image", "http://secret.example/1", "input[0].content[1].image_url"),
        ("image", "http://secret.example/2", "input[0].content[2].image_url.url"),
        ("image", "http://secret.example/3", "input[1].output.image_url"),
    ]
    assert request.removed == ("content_hash", "uuid")
    assert "secret" not in json.dumps(request.body)
    assert "mine" not in json.dumps(request.body)
    for part in request.media:
        part.embed("data:,x")
    expected = re.sub(r"http://secret.example/\d", "data:,x", json.dumps(RESPONSES))
    expected = re.sub(r'"uuid": "mine", |, "content_hash": "mine"', "", expected)
    assert request.body == json.loads(expected)


@pytest.mark.parametrize("medium", [{"type": "input_image", "image_url": None}, {"type": "image_url", "image_url": {}}])
def test_an_identity_alone_reaches_no_engine(medium):
    part = {**medium, "uuid": "of another tenant", "content_hash": "of another tenant"}
    body = {"model": "demo", "input": [{"role": "user", "content": [part]}]}
    if part["image_url"] is not None:
        assert fault(body, parse=forwarded) == (400, "input[0].content[0].image_url.url", MISSING)
        return
    request = read(body, parse=forwarded)
    assert request.removed == ("content_hash", "uuid")
    assert "another" not in json.dumps(request.body)


def test_a_medium_within_a_medium_is_collected():
    inner = {"type": "image_url", "image_url": {"url": "http://secret.example/2"}, "uuid": "mine"}
    outer = {"type": "image_url", "image_url": {"url": "http://secret.example/1", "detail": inner}}
    request = read({"model": "demo", "input": [outer]}, parse=forwarded)
    assert [part.param for part in request.media] == [
        "input[0].image_url.url",
        "input[0].image_url.detail.image_url.url",
    ]
    assert not {"secret", "mine"} & set(re.findall("[a-z]+", json.dumps(request.body)))


def test_forwarded_request_is_never_exact():
    for body, tokens in (({"model": "demo", "input": "x", "max_output_tokens": 4}, 4), (RESPONSES, None)):
        request = read(body, parse=forwarded)
        assert [reason.reason for reason in request.inexact] == ["not_modelled"]
        assert (request.images, request.max_tokens) == ((), tokens)


def test_head_of_a_forwarded_prompt_is_stable_as_it_grows():
    def head(body):
        return read({"model": "demo", **body}, parse=forwarded).messages

    longer = {**RESPONSES, "input": [*RESPONSES["input"], {"role": "user", "content": "more"}]}
    assert head(RESPONSES) == head(longer)
    assert head({"input": "a", "prompt_cache_key": "k"}) == head({"input": "b", "prompt_cache_key": "k"})
    one, other = ([{"content": [{"type": "input_image", "image_url": url}]}] for url in ("data:,a", "data:,b"))
    assert head({"input": one}) != head({"input": other})


FIRST = "input[0].content[0]"


def of_part(times=1, **part):
    return {"model": "demo", "input": [{"content": [part] * times}]}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"model": "demo"}, (400, "input", MISSING)),
        ({"model": "demo", "input": None}, (400, "input", MISSING)),
        ({"model": "other", "input": "x"}, (404, "model", "model_not_found")),
        ({"model": "demo", "input": []}, (400, "input", TYPE)),
        ({"model": "demo", "input": 7}, (400, "input", TYPE)),
        (of_part(type="input_file", file_url="http://a.example/"), (400, f"{FIRST}.file_url", PART_TYPE)),
        (of_part(type="input_image", file_id="f"), (400, f"{FIRST}.file_id", PART_TYPE)),
        (of_part(type="image_embeds", image_embeds="x"), (400, f"{FIRST}.image_embeds", PART_TYPE)),
        (of_part(type="input_image", image_url="data:,x", fps=2), (400, f"{FIRST}.fps", UNKNOWN)),
        (of_part(type="image_url", image_url={"url": "x", "new": 2}), (400, f"{FIRST}.image_url.new", UNKNOWN)),
        (of_part(type="input_image", image_url=["http://a.example/"]), (400, f"{FIRST}.image_url", TYPE)),
        (of_part(4, type="input_image", image_url="data:,x"), (400, "input[0].content[3].image_url", TOO_MANY)),
        ({"model": "demo", "input": "x", "stream": "yes"}, (400, "stream", TYPE)),
    ],
)
def test_invalid_forwarded_request_is_refused_with_status_field_and_code(body, expected):
    assert fault(body, parse=forwarded) == expected
