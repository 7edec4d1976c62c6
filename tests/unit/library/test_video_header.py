"""Headers of MP4 files. tests/conformance/vllm/test_videos.py compares encoded videos with vLLM's own loader."""

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from video_files import box, mp4

from mmrouter_lib.video_header import VideoHeader, VideoHeaderError, read_video_header
from mmrouter_lib.video_header.mp4 import MAX_BOXES, MAX_ENTRIES


@pytest.mark.parametrize("long", [False, True])
@pytest.mark.parametrize(
    ("options", "header"),
    [
        ({}, VideoHeader(64, 48, 60, 30.0)),
        ({"scale": 30_000, "times": [(60, 1001)]}, VideoHeader(64, 48, 60, 30_000 / 1001)),
        # The rate is the mean one where distances vary.
        ({"times": [(59, 1), (1, 2)]}, VideoHeader(64, 48, 60, 1800 / 61)),
        ({"times": [(20, 1), (1, 2), (39, 1)]}, VideoHeader(64, 48, 60, 1800 / 61)),
        ({"times": [(30, 1), (30, 2)], "sync": [1]}, VideoHeader(64, 48, 60, 20.0)),
        ({"times": [(30, 2), (30, 1)]}, VideoHeader(64, 48, 60, 20.0)),
        ({"times": [(2, 2), (3, 1)], "frames": 5, "offsets": [(1, 3), (4, 0)]}, VideoHeader(64, 48, 5, 150 / 7)),
        ({"turns": 1}, VideoHeader(48, 64, 60, 30.0)),
        ({"turns": 2}, VideoHeader(64, 48, 60, 30.0)),
        ({"turns": 3}, VideoHeader(48, 64, 60, 30.0)),
        ({"edits": [(2000, 0, 1 << 16)]}, VideoHeader(64, 48, 60, 30.0)),
        # Two frames of delay between decoding and display, which the edit list takes back.
        ({"offsets": [(58, 2), (2, 2)], "edits": [(2000, 2, 1 << 16)]}, VideoHeader(64, 48, 60, 30.0)),
        ({"frames": 10_000, "times": [(10_000, 1)]}, VideoHeader(64, 48, 10_000, 30.0)),
        ({"codec": b"hvc1"}, VideoHeader(64, 48, 60, 30.0)),
    ],
)
def test_the_header_gives_size_frames_and_rate(options, header, long):
    assert read_video_header(mp4(**options, long=long)) == header


@pytest.mark.parametrize(
    ("options", "cause", "says"),
    [
        ({"times": [(30, 1), (30, 2)]}, "video_timing", "distance between frames varies"),
        ({"times": [(30, 1), (30, 2)], "sync": [1, 31]}, "video_timing", "distance between frames varies"),
        ({"times": [(59, 1), (1, 30)]}, "video_timing", "distance between frames varies"),
        ({"times": [(30, 1), (30, 2)], "sync": [1] * 61}, "video_timing", "do not agree"),
        ({"times": [(30, 1), (30, 2)], "offsets": [(59, 2)]}, "video_timing", "do not agree"),
        ({"times": [(30, 1), (30, 2)], "offsets": [(60, -2)]}, "video_timing", "do not agree"),
        ({"times": [(60, 0)]}, "video_timing", "do not agree"),
        ({"samples": 61}, "video_timing", "do not agree"),
        ({"scale": 0}, "video_timing", "do not agree"),
        ({"scale": 1, "times": [(1, (1 << 32) - 1)] * 60}, "video_timing", "too far apart"),
        ({"scale": (1 << 32) - 1, "frames": 4, "times": [(4, 1)]}, "video_timing", "too close together"),
        ({"frames": 4, "times": [(1 << 30, 1)], "samples": 1 << 30}, "video_timing", "do not agree"),
        ({"edits": [(2000, 5, 1 << 16)]}, "video_timing", "hides frames"),
        ({"edits": [(1900, 0, 1 << 16)]}, "video_timing", "hides frames"),
        ({"edits": [(2000, -1, 1 << 16)]}, "video_timing", "moves frames"),
        ({"edits": [(2000, 0, 1 << 17)]}, "video_timing", "moves frames"),
        ({"edits": [(1000, 0, 1 << 16)] * 2}, "video_timing", "moves frames"),
        ({"offsets": [(59, 2)], "edits": [(2000, 2, 1 << 16)]}, "video_timing", "do not agree"),
        ({"codec": b"drac"}, "video_format", "codec"),
        ({"codec": b"av01"}, "video_format", "codec"),
        ({"width": 0}, "video_format", "no size"),
        ({"tracks": 2}, "video_format", "2 video tracks"),
        ({"tracks": 0}, "video_format", "0 video tracks"),
        ({"extra": box(b"moof")}, "video_format", "fragmented"),
        ({"movie_extra": box(b"mvex")}, "video_format", "fragmented"),
        ({"extra": struct.pack(">I4s", 100, b"mdat")}, "video_format", "cut off"),
        ({"extra": struct.pack(">I4s", 4, b"free")}, "video_format", "cut off"),
    ],
)
def test_a_header_that_does_not_tell_is_not_read(options, cause, says):
    with pytest.raises(VideoHeaderError, match=says) as caught:
        read_video_header(mp4(**options))
    assert caught.value.cause == cause


@pytest.mark.parametrize("data", [b"", b"RIFF" + bytes(100), b"GIF89a" + bytes(50)])
def test_other_formats_are_not_read(data):
    with pytest.raises(VideoHeaderError, match="this is no MP4") as caught:
        read_video_header(data)
    assert caught.value.cause == "video_format"


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (mp4(extra=box(b"free") * 20_000), f"more than {MAX_BOXES} boxes"),
        (mp4(movie_extra=box(b"trak") * 20_000), f"more than {MAX_BOXES} boxes"),
        (
            mp4(frames=100_000, offsets=[(1, 2)] * 100_000, edits=[(1 << 30, 2, 1 << 16)]),
            f"more than {MAX_ENTRIES} entries",
        ),
        (mp4(frames=100_000, times=[(1, 1)] * 100_000), "table of times has 100000 entries"),
        (mp4(frames=100_000, times=[(50_000, 2), (50_000, 1)]), f"more than {MAX_ENTRIES} frames"),
    ],
    ids=["boxes", "tracks", "display times", "times", "frames"],
)
def test_a_hostile_file_costs_a_bounded_number_of_boxes_and_entries(data, says):
    with pytest.raises(VideoHeaderError, match=says):
        read_video_header(data)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_damaged_bytes_are_read_or_refused(data):
    times = data.draw(st.sampled_from([[(60, 1)], [(30, 2), (20, 1), (10, 2)]]))
    whole = bytearray(mp4(times=times, sync=[1, 31], offsets=[(60, 2)], edits=[(4000, 2, 1 << 16)]))
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(whole[: data.draw(st.integers(0, len(whole)))])
    for each in (bytes(whole), cut):
        try:
            header = read_video_header(each)
        except VideoHeaderError:
            continue
        assert min(header.width, header.height, header.frames) > 0
        assert header.fps > 0
