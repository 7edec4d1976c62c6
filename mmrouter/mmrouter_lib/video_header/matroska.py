"""Matroska and WebM: the size is the track's, the rate that of its ``DefaultDuration``, and the frames are its blocks,
whose times have to be those of the rate.

These containers have no number of frames, so OpenCV multiplies the segment's ``Duration``, which is that of the sound,
too, by the rate. vLLM seeks to the end and takes the number of frames up to there instead, if it is smaller by more
than one: so one frame too many stays.

A file costs at most :data:`MAX_ELEMENTS` elements, whatever its bytes.
"""

import math
import struct
from collections import defaultdict
from collections.abc import Iterator
from fractions import Fraction
from typing import Final

from mmrouter_lib.video_header.base import VideoHeader, VideoHeaderError, reduced

MAGIC: Final = b"\x1a\x45\xdf\xa3"
MAX_ELEMENTS: Final = 65_536
"""Elements that are read of one file: 10 minutes of 60 frames a second, with 50 blocks of sound a second."""
MIN_FRAMES: Final = 2
MAX_TERM: Final = 30_000
"""Greatest numerator and denominator of the rate that FFmpeg makes of ``DefaultDuration``."""

CODECS: Final = frozenset((b"V_MPEG4/ISO/AVC", b"V_MPEGH/ISO/HEVC", b"V_MPEG4/ISO/ASP", b"V_VP8", b"V_VP9"))
"""Codecs that are read: OpenCV's FFmpeg decodes them, and a frame has the size of its track."""

_EBML, _SEGMENT, _INFO, _TRACKS, _CLUSTER = 0x1A45DFA3, 0x18538067, 0x1549A966, 0x1654AE6B, 0x1F43B675
_OTHERS: Final = frozenset((0x114D9B74, 0x1C53BB6B, 0x1254C367, 0x1043A770, 0xEC, 0xBF))
"""Parts of a segment without meaning for frames: SeekHead, Cues, Tags, Chapters, Void, CRC-32."""
_TIMESTAMP_SCALE, _DURATION = 0x2AD7B1, 0x4489
_TRACK, _NUMBER, _TYPE, _CODEC, _VIDEO, _DEFAULT_DURATION = 0xAE, 0xD7, 0x83, 0x86, 0xE0, 0x23E383
_WIDTH, _HEIGHT = 0xB0, 0xBA
_TIMESTAMP, _SIMPLE_BLOCK, _BLOCK_GROUP, _BLOCK = 0xE7, 0xA3, 0xA0, 0xA1
_UNUSUAL: Final = frozenset((0x6D80, 0x23314F, 0x537F, 0xE2, 0x56AA))
"""Elements that change a track's frames or their times: ContentEncodings, TrackTimestampScale, TrackOffset,
TrackOperation, CodecDelay."""
_UNUSUAL_VIDEO: Final = frozenset((0x7670, 0x54AA, 0x54BB, 0x54CC, 0x54DD, 0x53B8, 0x53C0))
"""Elements that change what is shown: Projection, the four of PixelCrop, StereoMode, AlphaMode."""

_VIDEO_TYPE: Final = 1
_LACED: Final = 0x06  # bits of a block's flags
_SHOWN: Final = 0x10  # bit of the first byte of a VP8 frame
_SECOND: Final = 1_000_000_000

Element = tuple[int, int]  # where the content of an element begins and ends


def read(data: bytes) -> VideoHeader:
    """Return what the file says. Raises :class:`VideoHeaderError`, ``IndexError`` or ``struct.error``."""
    return _Reader(data).read()


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data, self._elements_left = data, MAX_ELEMENTS

    def read(self) -> VideoHeader:
        file = list(self._elements((0, len(self._data))))
        if [kind for kind, _ in file] != [_EBML, _SEGMENT]:
            raise VideoHeaderError("the file is not one segment")
        info, tracks, times = None, None, list[int]()
        for kind, element in self._elements(file[1][1]):
            if kind == _INFO and info is None:
                info = self._children(element)
            elif kind == _TRACKS and tracks is None:
                tracks = self._children(element)
                number, is_vp8, width, height, step = self._video(tracks)
            elif kind == _CLUSTER and info is not None and tracks is not None:
                times += self._times(element, number, is_vp8=is_vp8)
            elif kind not in _OTHERS:
                raise VideoHeaderError(f"the segment has an element {kind:#x} where none is read")
        if info is None or tracks is None:
            raise VideoHeaderError("the segment has no description or no tracks")
        scale = self._number(info, _TIMESTAMP_SCALE, 1_000_000)
        if not 0 < scale * 4 <= step < 1 << 63:
            raise VideoHeaderError("the track has no distance of frames, or its times are too coarse", "video_timing")
        rate = reduced(Fraction(_SECOND, step), MAX_TERM)
        if not rate:
            raise VideoHeaderError("the track has no distance of frames", "video_timing")
        _require_even(sorted(times), scale, step)
        there, claimed = len(times), math.floor(self._seconds(info, scale) * float(rate) + 0.5)
        if there < MIN_FRAMES or not claimed:
            raise VideoHeaderError(f"the duration is one of {claimed} frames, and there are {there}", "video_timing")
        frames = claimed if claimed <= there + 1 else there
        return VideoHeader(width, height, frames, float(rate), max(frames - there, 0))

    def _elements(self, within: Element) -> Iterator[tuple[int, Element]]:
        """Yield the id and the content of each element within one."""
        at, end = within
        while at < end:
            if self._elements_left == 0:
                raise VideoHeaderError(f"the file has more than {MAX_ELEMENTS} elements")
            self._elements_left -= 1
            size_at = at + self._length(at)
            kind = int.from_bytes(self._data[at:size_at])
            begin = size_at + self._length(size_at)
            at = begin + self._varied(size_at, begin)
            if at > end:
                raise VideoHeaderError("the file is cut off, damaged, or has elements of unknown size")
            yield kind, (begin, at)

    def _length(self, at: int) -> int:
        """Return the bytes of a number of varied length, which its leading zeros tell."""
        return 9 - self._data[at].bit_length()

    def _varied(self, begin: int, end: int) -> int:
        """Return a number of varied length without its marker. One of ones alone stands for an unknown size."""
        return int.from_bytes(self._data[begin:end]) & ((1 << 7 * (end - begin)) - 1)

    def _children(self, element: Element) -> dict[int, list[Element]]:
        """Return id -> elements within one."""
        children: dict[int, list[Element]] = defaultdict(list)
        for kind, content in self._elements(element):
            children[kind].append(content)
        return children

    def _number(self, elements: dict[int, list[Element]], kind: int, default: int = 0) -> int:
        places = elements.get(kind, ())
        if len(places) > 1 or any(end - begin > 8 for begin, end in places):
            raise VideoHeaderError(f"an element {kind:#x} appears twice or is too long")
        return int.from_bytes(self._data[slice(*places[0])]) if places else default

    def _seconds(self, info: dict[int, list[Element]], scale: int) -> float:
        """Return the duration, rounded to microseconds as FFmpeg does."""
        places = info.get(_DURATION, ())
        if len(places) != 1:
            raise VideoHeaderError("the segment has no duration", "video_timing")
        ((begin, end),) = places
        (units,) = struct.unpack(">f" if end - begin == 4 else ">d", self._data[begin:end])
        microseconds = units * scale * 1000 / 1_000_000
        if not 0 < microseconds < 1 << 53:
            raise VideoHeaderError("the duration is no time", "video_timing")
        return int(microseconds) / 1_000_000

    def _video(self, tracks: dict[int, list[Element]]) -> tuple[int, bool, int, int, int]:
        """Return number, whether its codec is VP8, width, height and nanoseconds per frame of the only video track."""
        entries = [self._children(element) for element in tracks.get(_TRACK, ())]
        videos = [entry for entry in entries if self._number(entry, _TYPE) == _VIDEO_TYPE]
        if len(videos) != 1:
            raise VideoHeaderError(f"the file has {len(videos)} video tracks")
        (track,) = videos
        codecs = [self._data[slice(*element)].rstrip(b"\0") for element in track.get(_CODEC, ())]
        if len(codecs) != 1 or codecs[0] not in CODECS:
            raise VideoHeaderError(f"the codec {codecs!r} is not read")
        number = self._number(track, _NUMBER)
        if [self._number(entry, _NUMBER) for entry in entries].count(number) > 1 or len(track.get(_VIDEO, ())) != 1:
            raise VideoHeaderError("the video track is not described once")
        shown = self._children(track[_VIDEO][0])
        if _UNUSUAL & track.keys() or any(self._number(shown, kind) for kind in _UNUSUAL_VIDEO & shown.keys()):
            raise VideoHeaderError("the video is encoded twice, delayed, cropped, projected or not flat and opaque")
        width, height = self._number(shown, _WIDTH), self._number(shown, _HEIGHT)
        if not (0 < width < 1 << 16 and 0 < height < 1 << 16):
            raise VideoHeaderError("the video track has no size")
        return number, codecs[0] == b"V_VP8", width, height, self._number(track, _DEFAULT_DURATION)

    def _times(self, cluster: Element, track: int, *, is_vp8: bool) -> Iterator[int]:
        """Yield the time of each frame of a track in a cluster, in units of the file's scale."""
        base = None
        for kind, element in self._elements(cluster):
            if kind == _TIMESTAMP and base is None and element[1] - element[0] <= 8:
                base = int.from_bytes(self._data[slice(*element)])
                continue
            for begin, end in self._blocks(kind, element):
                at = begin + self._length(begin)
                if self._varied(begin, at) != track:
                    continue
                time, flags = struct.unpack_from(">hB", self._data, at)
                if base is None or flags & _LACED or at + 3 >= end:
                    raise VideoHeaderError("a block is not one frame")
                if not is_vp8 or self._data[at + 3] & _SHOWN:
                    yield base + time

    def _blocks(self, kind: int, element: Element) -> list[Element]:
        if kind == _BLOCK_GROUP:
            return self._children(element).get(_BLOCK, [])
        return [element] if kind == _SIMPLE_BLOCK else []


def _require_even(times: list[int], scale: int, step: int) -> None:
    """Raise :class:`VideoHeaderError` unless sorted times are ``step`` nanoseconds apart, but for their rounding."""
    if any(abs((time - times[0]) * scale - number * step) > scale for number, time in enumerate(times)):
        raise VideoHeaderError("the distance between frames varies", "video_timing")
