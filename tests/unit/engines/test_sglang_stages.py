"""Requests that several SGLang engines serve: paired prefill and decode, and the choice among encoders."""

import json
from collections import Counter
from math import ceil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.conftest import examples

from mmrouter_lib.engines.base.launch import BOOTSTRAP_PORT
from mmrouter_lib.engines.sglang import stage_requests as stages


@pytest.mark.parametrize(("rank", "ranks"), [(0, 1), (0, 2), (1, 2), (6, 7)])
def test_a_room_is_unique_and_maps_to_the_computing_rank(rank, ranks):
    rooms = [stages.new_meeting("10.0.0.1", rank, ranks).room for _ in range(10_000)]
    assert len(set(rooms)) == len(rooms)
    assert all(0 <= room < stages.ROOMS and room % ranks == rank for room in rooms)
    assert max(rooms).bit_length() > 60  # of all that there are, not of a few


def test_both_engines_get_the_same_meeting():
    meeting = stages.new_meeting("10.0.0.1")
    values = {"host": "10.0.0.1", "port": BOOTSTRAP_PORT, "room": meeting.room}
    expected = {f"bootstrap_{name}": value for name, value in values.items()}
    assert stages.prefill_fields(meeting) == stages.decode_fields(meeting) == expected
    headers = {f"x-override-bootstrap-{name}": str(value) for name, value in values.items()}
    assert stages.override_headers(stages.prefill_fields(meeting)) == headers


def test_with_several_ranks_each_engine_gets_its_rank_and_the_decoder_the_prefills():
    meeting = stages.Meeting("10.0.0.1", room=7, rank=1, ranks=2)
    assert stages.prefill_fields(meeting)["routed_dp_rank"] == 1
    fields = stages.decode_fields(meeting, rank=3, ranks=4)
    assert (fields["disagg_prefill_dp_rank"], fields["routed_dp_rank"]) == (1, 3)
    headers = stages.override_headers(fields)
    assert (headers["x-override-disagg-prefill-dp-rank"], headers["x-override-routed-dp-rank"]) == ("1", "3")
    assert "routed_dp_rank" not in stages.decode_fields(meeting)
    assert "disagg_prefill_dp_rank" not in stages.decode_fields(stages.Meeting("10.0.0.1", room=7), rank=3, ranks=4)


CHOICES, DONE = b'data: {"choices": []}\n\n', b"data: [DONE]\n\n"


@pytest.mark.parametrize(
    ("status", "answer", "found"),
    [
        (200, b'{"choices": []}', None),
        (200, CHOICES + DONE, None),
        (200, b'data: {"error": {"message": "x", "code": 500}}\n\n', (500, {"message": "x", "code": 500})),
        (200, CHOICES + b'data: {"error":{"message":"x","code":400}}\n\n' + DONE, (400, {"message": "x", "code": 400})),
        (200, b'data: {"error": {"message": "x"}}', (500, {"message": "x"})),
        (200, b'data: {"choices": [{"delta": {"content": "\\n\\ndata: {\\"error\\": {"}}]}\n\n', None),
        (503, b'{"error": {"message": "busy"}}', (503, {"message": "busy"})),
    ],
)
def test_a_request_that_failed_in_a_stream_has_failed(status, answer, found):
    failure = stages.failure_of(status, answer)
    assert (failure and (failure.status, json.loads(failure.body)["error"])) == found


names = st.lists(st.text(max_size=8), min_size=1, max_size=8, unique=True)
keys = st.binary(min_size=1, max_size=8)


def fleet(found: list[str]) -> list[stages.Encoder]:
    return [stages.Encoder(name, f"10.0.0.{number}") for number, name in enumerate(found)]


def part(*items: object, **more: object) -> bytes:
    return json.dumps(
        {"encoder_idx": 3, "mm_items": items, "num_parts": 2, "part_idx": 0, "req_id": "r"} | more
    ).encode()


def test_an_image_has_the_same_key_in_every_request() -> None:
    image = "data:image/png;base64,QUJD"
    key = stages.image_key(part(image))
    assert stages.image_key(part(image, "data:other", req_id="s", part_idx=1, embedding_port=4711)) == key
    assert stages.image_key(part(image + "A")) != key
    assert stages.image_key(part({"url": image, "detail": "low"})) != stages.image_key(
        part({"url": image, "detail": "high"})
    )


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", part(), b'{"req_id": 1, "mm_items": ["a"]}', b'{"req_id": "r"}'])
def test_a_body_that_is_no_encode_request_is_an_error(body: bytes) -> None:
    with pytest.raises(stages.PartError):
        stages.image_key(body)


@given(names, keys, st.data())
def test_an_encoder_that_leaves_moves_its_own_images_only(found: list[str], key: bytes, data: st.DataObject) -> None:
    encoders = fleet(found)
    before = stages.ranked(key, encoders)
    gone = data.draw(st.sampled_from(encoders))
    after = stages.ranked(key, [encoder for encoder in reversed(encoders) if encoder != gone])
    assert after == [encoder for encoder in before if encoder != gone]


def test_images_are_spread_evenly() -> None:
    encoders = fleet([f"encoder-{number}" for number in range(4)])
    firsts = Counter(stages.ranked(number.to_bytes(4, "big"), encoders)[0].name for number in range(4000))
    assert all(850 < count < 1150 for count in firsts.values())


@settings(max_examples=examples(50))
@given(names, keys, st.sets(keys, max_size=20), st.data())
def test_no_encoder_exceeds_its_bound_and_those_down_come_last(
    found: list[str], key: bytes, others: set[bytes], data: st.DataObject
) -> None:
    encoders = fleet(found)
    down = data.draw(st.sets(st.sampled_from(found)))
    busy: dict[str, set[bytes]] = {}
    for other in sorted(others - {key}):
        busy.setdefault(data.draw(st.sampled_from(found)), set()).add(other)
    asked = stages.order(key, encoders, busy, down)
    assert set(asked) == set(encoders)
    assert len(asked) == len(encoders)
    places = [encoder.name in down for encoder in asked]
    assert places == sorted(places)
    if able := [encoder for encoder in encoders if encoder.name not in down]:
        share = ceil(stages.BOUND * (len(others | {key})) / len(able))
        assert len(busy.get(asked[0].name, ())) < share
        preferred = next(encoder for encoder in stages.ranked(key, encoders) if encoder.name not in down)
        if len(busy.get(preferred.name, ())) < share:
            assert asked[0] == preferred


def test_an_image_being_encoded_goes_to_the_same_encoder_however_busy() -> None:
    encoders = fleet(["a", "b"])
    key = b"k"
    own, other = stages.ranked(key, encoders)
    full = {own.name: {b"1", b"2", b"3", b"4", b"5"}}
    assert stages.order(key, encoders, full, ())[0] == other
    assert stages.order(key, encoders, {own.name: full[own.name] | {key}}, ())[0] == own
