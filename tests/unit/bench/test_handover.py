"""The hand-over's figures count only where what was read is what was written."""

import json
import random

import pytest

from bench.handover import fresh_segment, shared_memory
from bench.rows import to_json

SIZE = 1 << 20


def test_both_ways_hand_over_what_was_written_and_every_payload_has_its_times():
    times = shared_memory.measure(SIZE, 3, 4)
    counts = [len(values) for values in (times.copy, times.write, times.read, times.peer_write, times.peer_read)]
    assert counts == [12] * 5
    assert min(times.ratios) > 0
    rows = shared_memory.rows(times, 4 * shared_memory.MB, shared_memory.IN_FLIGHT[0])
    assert rows[0].name == "ratio_to_memcpy, 4 MB"
    assert rows[0].met is not None


@pytest.mark.parametrize("way", ["ours", "the fresh segment"])
def test_a_way_that_hands_over_something_else_ends_the_run(monkeypatch, way):
    if way == "ours":
        honest = shared_memory.Pool.put
        monkeypatch.setattr(shared_memory.Pool, "put", lambda self, payload, name: honest(self, payload[::-1], name))
    else:
        framed = fresh_segment.frame
        monkeypatch.setattr(fresh_segment, "frame", lambda payload: framed(payload[::-1]))
    with pytest.raises(shared_memory.PayloadsDifferError, match=way):
        shared_memory.measure(SIZE, 1, 1)


def test_the_peers_frame_is_taken_apart_as_it_was_made_and_refused_where_it_is_not_whole():
    payload = random.Random(1).randbytes(1000)
    raw = fresh_segment.frame(payload)
    assert fresh_segment.parts(raw)[1] == payload
    for wrong in (raw[:-1], raw + b"x"):
        with pytest.raises(ValueError, match="not a framed payload"):
            fresh_segment.parts(wrong)


def test_rows_are_json():
    times = shared_memory.Times([1.0], [1.1], [0.1], [8.0], [2.0])
    rows = {
        item["name"]: item for item in json.loads(to_json(shared_memory.rows(times, 16 * shared_memory.MB, 8)))["rows"]
    }
    assert rows["ratio_to_memcpy, 16 MB"]["value"] == 1.2
    assert rows["ratio_to_memcpy, 16 MB"]["met"] is True
    assert rows["hand-over, 16 MB: below a fresh segment"]["value"] == pytest.approx(10 / 1.2, rel=1e-3)
