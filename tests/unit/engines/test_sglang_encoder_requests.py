"""The order in which encoders are tried for an image: stable, bounded in load, and independent of other encoders."""

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


def test_an_image_has_the_same_key_in_every_request() -> None:
    image = "data:image/png;base64,QUJD"
    key = image_key(part(image))
    assert image_key(part(image, "data:other", req_id="s", part_idx=1, embedding_port=4711)) == key
    assert image_key(part(image + "A")) != key
    assert image_key(part({"url": image, "detail": "low"})) != image_key(part({"url": image, "detail": "high"}))


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", part(), b'{"req_id": 1, "mm_items": ["a"]}', b'{"req_id": "r"}'])
def test_a_body_that_is_no_encode_request_is_an_error(body: bytes) -> None:
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
def test_no_encoder_exceeds_its_bound_and_those_down_come_last(
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


def test_an_image_being_encoded_goes_to_the_same_encoder_however_busy() -> None:
    encoders = fleet(["a", "b"])
    key = b"k"
    own, other = ranked(key, encoders)
    full = {own.name: {b"1", b"2", b"3", b"4", b"5"}}
    assert order(key, encoders, full, ())[0] == other
    assert order(key, encoders, {own.name: full[own.name] | {key}}, ())[0] == own
