"""Headers that pair a prefill and a decode engine: rooms, ranks and errors in a stream."""

import json

import pytest

from mmrouter_lib.engines.base.launch import BOOTSTRAP_PORT
from mmrouter_lib.engines.sglang.pair_headers import (
    ROOMS,
    Meeting,
    decode_headers,
    failure_of,
    new_meeting,
    prefill_headers,
)


@pytest.mark.parametrize(("rank", "ranks"), [(0, 1), (0, 2), (1, 2), (6, 7)])
def test_a_room_is_unique_and_maps_to_the_computing_rank(rank, ranks):
    rooms = [new_meeting("10.0.0.1", rank, ranks).room for _ in range(10_000)]
    assert len(set(rooms)) == len(rooms)
    assert all(0 <= room < ROOMS and room % ranks == rank for room in rooms)
    assert max(rooms).bit_length() > 60  # of all that there are, not of a few


def test_both_engines_get_the_same_meeting():
    meeting = new_meeting("10.0.0.1")
    assert (
        prefill_headers(meeting)
        == decode_headers(meeting)
        == {
            "x-override-bootstrap-host": "10.0.0.1",
            "x-override-bootstrap-port": str(BOOTSTRAP_PORT),
            "x-override-bootstrap-room": str(meeting.room),
        }
    )


def test_with_several_ranks_each_engine_gets_its_rank_and_the_decoder_the_prefills():
    meeting = Meeting("10.0.0.1", room=7, rank=1, ranks=2)
    assert prefill_headers(meeting)["x-override-routed-dp-rank"] == "1"
    told = decode_headers(meeting, rank=3, ranks=4)
    assert (told["x-override-disagg-prefill-dp-rank"], told["x-override-routed-dp-rank"]) == ("1", "3")
    assert "x-override-routed-dp-rank" not in decode_headers(meeting)
    assert "x-override-disagg-prefill-dp-rank" not in decode_headers(Meeting("10.0.0.1", room=7), rank=3, ranks=4)


@pytest.mark.parametrize(
    ("status", "answer", "found"),
    [
        (200, b'{"choices": []}', None),
        (200, b'data: {"choices": []}\n\ndata: [DONE]\n\n', None),
        (200, b'data: {"error": {"message": "x", "code": 500}}\n\n', (500, {"message": "x", "code": 500})),
        (
            200,
            b'data: {"choices": []}\n\ndata: {"error":{"message":"x","code":400}}\n\ndata: [DONE]\n\n',
            (400, {"message": "x", "code": 400}),
        ),
        (200, b'data: {"error": {"message": "x"}}', (500, {"message": "x"})),
        (200, b'data: {"choices": [{"delta": {"content": "\\n\\ndata: {\\"error\\": {"}}]}\n\n', None),
        (503, b'{"error": {"message": "busy"}}', (503, {"message": "busy"})),
    ],
)
def test_a_request_that_failed_in_a_stream_has_failed(status, answer, found):
    failure = failure_of(status, answer)
    assert (failure and (failure.status, json.loads(failure.body)["error"])) == found
