"""In which order encoders are asked for an image: each keeps its own, and one that is busy or lost moves no others."""

import json
from collections import Counter
from math import ceil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmrouter_lib.engines.sglang.encoder_requests import BOUND, Encoder, PartError, image_key, order, ranked

names = st.lists(st.text(max_size=8), min_size=1, max_size=8, unique=True)
keys = st.binary(min_size=1, max_size=8)


def fleet(found: list[str]) -> list[Encoder]:
    return [Encoder(name, f"10.0.0.{number}") for number, name in enumerate(found)]


def part(*items: object, **more: object) -> bytes:
    return json.dumps(
        {"encoder_idx": 3, "mm_items": items, "num_parts": 2, "part_idx": 0, "req_id": "r"} | more
    ).encode()


def test_the_same_image_has_one_key_whatever_request_it_is_in() -> None:
    image = "data:image/png;base64,QUJD"
    key = image_key(part(image))
    assert image_key(part(image, "data:other", req_id="s", part_idx=1, embedding_port=4711)) == key
    assert image_key(part(image + "A")) != key
    assert image_key(part({"url": image, "detail": "low"})) != image_key(part({"url": image, "detail": "high"}))


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", part(), b'{"req_id": 1, "mm_items": ["a"]}', b'{"req_id": "r"}'])
def test_what_is_no_share_of_a_request_is_said_to_be_none(body: bytes) -> None:
    with pytest.raises(PartError):
        image_key(body)


@given(names, keys, st.data())
def test_an_encoder_that_leaves_moves_its_own_images_only(found: list[str], key: bytes, data: st.DataObject) -> None:
    encoders = fleet(found)
    before = ranked(key, encoders)
    gone = data.draw(st.sampled_from(encoders))
    after = ranked(key, [encoder for encoder in reversed(encoders) if encoder != gone])
    assert after == [encoder for encoder in before if encoder != gone]


def test_images_are_spread_evenly() -> None:
    encoders = fleet([f"encoder-{number}" for number in range(4)])
    firsts = Counter(ranked(number.to_bytes(4, "big"), encoders)[0].name for number in range(4000))
    assert all(850 < count < 1150 for count in firsts.values())


@settings(max_examples=50)
@given(names, keys, st.sets(keys, max_size=20), st.data())
def test_nobody_gets_more_than_its_share_and_who_is_down_comes_last(
    found: list[str], key: bytes, others: set[bytes], data: st.DataObject
) -> None:
    encoders = fleet(found)
    down = data.draw(st.sets(st.sampled_from(found)))
    busy: dict[str, set[bytes]] = {}
    for other in sorted(others - {key}):
        busy.setdefault(data.draw(st.sampled_from(found)), set()).add(other)
    asked = order(key, encoders, busy, down)
    assert set(asked) == set(encoders)
    assert len(asked) == len(encoders)
    places = [encoder.name in down for encoder in asked]
    assert places == sorted(places)
    if able := [encoder for encoder in encoders if encoder.name not in down]:
        share = ceil(BOUND * (len(others | {key})) / len(able))
        assert len(busy.get(asked[0].name, ())) < share
        preferred = next(encoder for encoder in ranked(key, encoders) if encoder.name not in down)
        if len(busy.get(preferred.name, ())) < share:
            assert asked[0] == preferred


def test_a_repeat_of_what_is_being_encoded_goes_where_it_is_however_busy_that_one_is() -> None:
    encoders = fleet(["a", "b"])
    key = b"k"
    own, other = ranked(key, encoders)
    full = {own.name: {b"1", b"2", b"3", b"4", b"5"}}
    assert order(key, encoders, full, ())[0] == other
    assert order(key, encoders, {own.name: full[own.name] | {key}}, ())[0] == own
