"""Headers of WebM and Matroska files. tests/conformance/vllm/test_videos.py compares encoded videos with vLLM's own
loader.
"""

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from video_files import element, number, webm

from mmrouter_lib.video_header import VideoHeader, VideoHeaderError, read_video_header
from mmrouter_lib.video_header.matroska import MAX_ELEMENTS

FOUND = VideoHeader(64, 48, 60, 30.0)


@pytest.mark.parametrize(
    ("options", "header"),
    [
        ({}, FOUND),
        ({"step": 33_366_667}, VideoHeader(64, 48, 60, 30_000 / 1001)),
        # FFmpeg's terms of a rate are at most 30,000, so this is not 60000/1001.
        ({"step": 16_683_333}, VideoHeader(64, 48, 60, 19_001 / 317)),
        ({"step": 1_000_000_000}, VideoHeader(64, 48, 60, 1.0)),
        ({"step": 270_000_000}, VideoHeader(64, 48, 60, 100 / 27)),
        ({"step": 900_000, "scale": 1000}, VideoHeader(64, 48, 60, 10_000 / 9)),
        ({"step": 41_666_666, "scale": 100_000}, VideoHeader(64, 48, 60, 24.0)),
        ({"codec": b"V_MPEG4/ISO/AVC\0"}, FOUND),
        ({"grouped": True}, FOUND),
        ({"sound": 20}, FOUND),
        ({"extra": element(0xEC, bytes(50))}, FOUND),
        ({"video_extra": number(0x54AA, 0)}, FOUND),
        ({"times": [round((at + 15) * 100 / 3) for at in range(60)]}, FOUND),
        # Three frames are decoded after the ones that are displayed later.
        ({"times": [0, 133, 67, 33, 100], "duration": 167.0}, VideoHeader(64, 48, 5, 30.0)),
    ],
)
def test_the_tables_give_size_frames_and_rate(options, header):
    assert read_video_header(webm(**options)) == header


@pytest.mark.parametrize(
    ("claimed", "frames", "missing"),
    [(40, 40, 0), (59, 59, 0), (60, 60, 0), (61, 61, 1), (62, 60, 0), (105, 60, 0), (10_000_000, 60, 0)],
)
def test_frames_behind_the_last_one_are_those_that_vllms_seek_to_the_end_leaves(claimed, frames, missing):
    header = read_video_header(webm(duration=claimed * 1000 / 30))
    assert header == VideoHeader(64, 48, frames, 30.0, missing)


def test_a_frame_that_vp8_does_not_show_is_none():
    shown, hidden = (webm(codec=b"V_VP8", first=first) for first in (b"\x10", b"\0"))
    assert read_video_header(shown) == FOUND
    with pytest.raises(VideoHeaderError, match="there are 0"):
        read_video_header(hidden)


@pytest.mark.parametrize(
    ("options", "cause", "says"),
    [
        ({"step": 0}, "video_timing", "no distance"),
        ({"step": 10_000, "scale": 1000, "times": [0, 10]}, "video_timing", "too close together"),
        ({"scale": 10_000_000}, "video_timing", "too coarse"),
        ({"scale": 0, "duration": 1.0, "times": [0, 1]}, "video_timing", "too coarse"),
        ({"times": [0, 33, 100, 133], "duration": 166.0}, "video_timing", "distance between frames varies"),
        ({"times": [0, 33, 67, 101], "step": 33_000_000, "duration": 132.0}, "video_timing", "distance between"),
        ({"step": 1 << 60, "scale": 1 << 40, "times": [0]}, "video_timing", "no distance"),
        ({"duration": 0.0}, "video_timing", "no duration"),
        ({"duration": -1.0}, "video_timing", "no time"),
        ({"duration": float("nan")}, "video_timing", "no time"),
        ({"duration": float("inf")}, "video_timing", "no time"),
        ({"duration": 1.0}, "video_timing", "is one of 0 frames"),
        ({"frames": 1, "duration": 33.3}, "video_timing", "there are 1"),
        ({"codec": b"V_AV1"}, "video_format", "is not read"),
        ({"flags": 0x82}, "video_format", "not one frame"),
        ({"first": b""}, "video_format", "not one frame"),
        ({"width": 0}, "video_format", "no size"),
        ({"tracks": 0}, "video_format", "0 video tracks"),
        ({"tracks": 2}, "video_format", "2 video tracks"),
        ({"track_extra": element(0x6D80)}, "video_format", "encoded twice"),
        ({"track_extra": number(0xD7, 1)}, "video_format", "appears twice"),
        ({"video_extra": number(0x54AA, 2)}, "video_format", "cropped"),
        ({"video_extra": number(0x53C0, 1)}, "video_format", "opaque"),
        ({"extra": element(0x1941A469)}, "video_format", "an element 0x1941a469"),
        ({"extra": element(0x1549A966)}, "video_format", "an element 0x1549a966"),
        ({"late_tracks": True}, "video_format", "an element 0x1f43b675"),
        ({"trailer": bytes(1)}, "video_format", "ends before"),
        ({"trailer": element(0x18538067)}, "video_format", "not one segment"),
    ],
)
def test_a_file_that_does_not_tell_is_not_read(options, cause, says):
    with pytest.raises(VideoHeaderError, match=says) as caught:
        read_video_header(webm(**options))
    assert caught.value.cause == cause


def test_a_recording_of_unknown_size_is_not_read():
    data = bytearray(webm())
    at = data.index(b"\x1f\x43\xb6\x75") + 4
    data[at : at + 4] = b"\x1f\xff\xff\xff"
    with pytest.raises(VideoHeaderError, match="unknown size") as caught:
        read_video_header(bytes(data))
    assert caught.value.cause == "video_format"


@pytest.mark.parametrize(
    "extra",
    [element(0xEC) * 2 * MAX_ELEMENTS, element(0x1F43B675, element(0xEC) * 2 * MAX_ELEMENTS)],
    ids=["in the segment", "in a cluster"],
)
def test_a_hostile_file_costs_a_bounded_number_of_elements(extra):
    with pytest.raises(VideoHeaderError, match=f"more than {MAX_ELEMENTS} elements"):
        read_video_header(webm(extra=extra))


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_damaged_bytes_are_read_or_refused(data):
    whole = bytearray(webm(frames=5, sound=1, grouped=data.draw(st.booleans())))
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(whole[: data.draw(st.integers(4, len(whole)))])
    for each in (bytes(whole), cut, cut[:4] + struct.pack(">d", 1.0) + cut[4:]):
        try:
            header = read_video_header(each)
        except VideoHeaderError:
            continue
        assert min(header.width, header.height, header.frames - header.missing) > 0
        assert header.fps > 0
