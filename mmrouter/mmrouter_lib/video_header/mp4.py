"""MP4 and QuickTime: the frames are those of the table of times, and the rate is their number by their time.

Not read are frames that an edit list hides, and frames at varying distances of which vLLM's seek to the end finds
fewer, because it numbers a frame by its time and the rate.

A file costs at most :data:`MAX_BOXES` boxes and :data:`MAX_ENTRIES` entries of one table, whatever its bytes.
"""

import math
import struct
from collections import defaultdict
from collections.abc import Iterable, Sequence
from fractions import Fraction
from itertools import accumulate, chain, repeat
from operator import add, mul
from typing import Final

from mmrouter_lib.video_header.base import VideoHeader, VideoHeaderError, reduced

MAGIC: Final = b"ftyp"
MAX_BOXES: Final = 1024
"""Boxes that are read of one file; recorders and encoders write under 100."""
MAX_ENTRIES: Final = 65_536
"""Entries of the table of display times: 18 minutes of 60 frames a second, each in an entry of its own."""
MAX_TERM: Final = (1 << 31) - 1
"""Greatest numerator and denominator of a rate in FFmpeg."""

CODECS: Final = frozenset((b"avc1", b"avc3", b"hvc1", b"hev1", b"mp4v", b"vp08", b"vp09"))
"""Codes of the codecs that are read: OpenCV's FFmpeg decodes them, AV1 not, and a frame has its sample entry's size."""

_ONE: Final = 1 << 16  # in fixed point
_TURNS: Final = {(_ONE, 0, 0, _ONE): 0, (0, _ONE, -_ONE, 0): 1, (-_ONE, 0, 0, -_ONE): 2, (0, -_ONE, _ONE, 0): 3}
"""Matrix without its projection and shift -> quarter turns, by which OpenCV turns the frames."""

Box = tuple[int, int]  # where the content of a box begins and ends


def read(data: bytes) -> VideoHeader:
    """Return what the file says. Raises :class:`VideoHeaderError`, ``IndexError`` or ``struct.error``."""
    return _Reader(data).read()


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data, self._boxes_left = data, MAX_BOXES

    def read(self) -> VideoHeader:
        data = self._data
        file = self._boxes((0, len(data)), whole=True)
        if b"moof" in file:
            raise VideoHeaderError("the frames of a fragmented file are in no table of its header")
        movie = self._boxes(_only(file, b"moov"))
        if b"mvex" in movie:
            raise VideoHeaderError("the frames of a fragmented file are in no table of its header")
        header = _only(movie, b"mvhd")[0]
        if self._turns(header + (48 if data[header] else 36)) != 0:
            raise VideoHeaderError("the whole movie is turned")
        (movie_scale,) = struct.unpack_from(">I", data, header + (20 if data[header] else 12))
        videos = []
        for box in movie.get(b"trak", ()):
            track = self._boxes(box)
            media = self._boxes(_only(track, b"mdia"))
            handler = _only(media, b"hdlr")[0]
            if data[handler + 8 : handler + 12] == b"vide":
                videos.append((track, media))
        if len(videos) != 1:
            raise VideoHeaderError(f"the file has {len(videos)} video tracks")
        ((track, media),) = videos
        tables = self._boxes(_only(self._boxes(_only(media, b"minf")), b"stbl"))
        width, height = self._size(_only(tables, b"stsd")[0])
        counts, units, scale = self._runs(tables, _only(media, b"mdhd")[0])
        frames, length = sum(counts), sum(map(mul, counts, units))
        rate = reduced(Fraction(frames * scale, length), MAX_TERM)
        if not rate:
            raise VideoHeaderError("the frames are too far apart", "video_timing")
        if len(set(units)) == 1:
            first, last = self._displayed(tables.get(b"ctts", ()), frames, units[0])
        else:
            first, last = self._uneven(tables, counts, units, float(rate) / scale)
        for edits in self._boxes(track[b"edts"][0]).get(b"elst", ()) if b"edts" in track else ():
            begin, length = self._edit(edits[0])
            end = begin + (2 * length * scale + movie_scale) // max(2 * movie_scale, 1)
            if first < begin or last >= end:
                raise VideoHeaderError("an edit list hides frames", "video_timing")
        shown = _only(track, b"tkhd")[0]
        if self._turns(shown + (52 if data[shown] else 40)) % 2:
            width, height = height, width
        return VideoHeader(width, height, frames, float(rate))

    def _boxes(self, within: Box, *, whole: bool = False) -> dict[bytes, list[Box]]:
        """Return kind -> boxes within a box. ``whole``: each must be there to its end."""
        boxes: dict[bytes, list[Box]] = defaultdict(list)
        at, end = within
        while at + 8 <= end:
            if self._boxes_left == 0:
                raise VideoHeaderError(f"the header has more than {MAX_BOXES} boxes")
            self._boxes_left -= 1
            size, kind = struct.unpack_from(">I4s", self._data, at)
            content = at + 8
            if size == 1:
                (size,) = struct.unpack_from(">Q", self._data, content)
                content += 8
            elif size == 0:
                size = end - at
            if size < content - at or (whole and at + size > end):
                raise VideoHeaderError("the file is cut off or damaged")
            boxes[kind].append((content, min(at + size, end)))
            at += size
        return boxes

    def _turns(self, at: int) -> int:
        """Return the quarter turns of the matrix at a place."""
        a, b, u, c, d, v = struct.unpack_from(">6i", self._data, at)
        turns = _TURNS.get((a, b, c, d))
        if turns is None or u or v:
            raise VideoHeaderError("the video is scaled, mirrored or turned by less than a quarter")
        return turns

    def _size(self, at: int) -> tuple[int, int]:
        """Return width and height of the only sample entry."""
        (entries,) = struct.unpack_from(">I", self._data, at + 4)
        codec = self._data[at + 12 : at + 16]
        if entries != 1 or codec not in CODECS:
            raise VideoHeaderError(f"{entries} sample entries, the first of the codec {codec!r}")
        width, height = struct.unpack_from(">HH", self._data, at + 40)
        if not (width and height):
            raise VideoHeaderError("the sample entry has no size")
        return width, height

    def _runs(self, tables: dict[bytes, list[Box]], media: int) -> tuple[list[int], list[int], int]:
        """Return the runs of frames at one distance, as numbers of frames and units of time between two, and the units
        per second.
        """
        (scale,) = struct.unpack_from(">I", self._data, media + (20 if self._data[media] else 12))
        (samples,) = struct.unpack_from(">I", self._data, _only(tables, b"stsz")[0] + 8)
        at = _only(tables, b"stts")[0]
        (entries,) = struct.unpack_from(">I", self._data, at + 4)
        if not 0 < entries <= MAX_ENTRIES:
            raise VideoHeaderError(f"the table of times has {entries} entries", "video_timing")
        numbers = struct.unpack_from(f">{2 * entries}I", self._data, at + 8)
        counts, units = list(numbers[::2]), list(numbers[1::2])
        frames = sum(counts)
        if not (scale and all(units) and 0 < frames <= len(self._data)) or frames != samples:
            raise VideoHeaderError("the tables do not agree on frames and times", "video_timing")
        return counts, units, scale

    def _uneven(
        self, tables: dict[bytes, list[Box]], counts: list[int], units: list[int], rate: float
    ) -> tuple[int, int]:
        """Return when the earliest and the latest frame are displayed. ``rate``: frames per unit of time."""
        frames = sum(counts)
        if frames > MAX_ENTRIES:
            raise VideoHeaderError(f"more than {MAX_ENTRIES} frames are at varying distances", "video_timing")
        decoded = accumulate(chain.from_iterable(map(repeat, units, counts)), initial=0)
        shown = list(map(add, decoded, self._offsets(tables, frames)))
        order = sorted(range(frames), key=shown.__getitem__)
        numbered = [0] * frames
        for number, frame in enumerate(order):
            numbered[frame] = number
        first, last = shown[order[0]], shown[order[-1]]
        for frame in self._entries(tables, frames):
            if math.floor((shown[frame] - first) * rate + 0.5) < numbered[frame] - 1:
                raise VideoHeaderError("the distance between frames varies by too much", "video_timing")
        return first, last

    def _entries(self, tables: dict[bytes, list[Box]], frames: int) -> Sequence[int]:
        """Return the frames that a seek can go to, those of the table of sync samples."""
        if b"stss" not in tables:
            return range(frames)
        at = tables[b"stss"][0][0]
        (entries,) = struct.unpack_from(">I", self._data, at + 4)
        if entries > frames:
            raise VideoHeaderError("the tables do not agree on frames and times", "video_timing")
        numbers = struct.unpack_from(f">{entries}I", self._data, at + 8)
        return [number - 1 for number in numbers if 0 < number <= frames]

    def _offsets(self, tables: dict[bytes, list[Box]], frames: int) -> Iterable[int]:
        """Return the time from decoding to display of each frame."""
        if b"ctts" not in tables:
            return repeat(0, frames)
        at = tables[b"ctts"][0][0]
        (entries,) = struct.unpack_from(">I", self._data, at + 4)
        if entries > MAX_ENTRIES:
            raise VideoHeaderError(f"the display times have more than {MAX_ENTRIES} entries", "video_timing")
        numbers = struct.unpack_from(">" + "Ii" * entries, self._data, at + 8)
        if sum(numbers[::2]) != frames or min(numbers[1::2]) < 0:
            raise VideoHeaderError("the tables do not agree on frames and times", "video_timing")
        return chain.from_iterable(map(repeat, numbers[1::2], numbers[::2]))

    def _edit(self, at: int) -> tuple[int, int]:
        """Return begin, in the track's time, and length, in the movie's time, of the only edit."""
        version, entries = self._data[at], struct.unpack_from(">I", self._data, at + 4)[0]
        length, begin, rate = struct.unpack_from(">Qqi" if version else ">Iii", self._data, at + 8)
        if entries != 1 or begin < 0 or rate != _ONE:
            raise VideoHeaderError("an edit list moves frames", "video_timing")
        return begin, length

    def _displayed(self, offsets: list[Box] | tuple[()], frames: int, step: int) -> tuple[int, int]:
        """Return when the earliest and the latest frame are displayed, by the table of offsets from decoding times."""
        if not offsets:
            return 0, (frames - 1) * step
        at = offsets[0][0]
        (entries,) = struct.unpack_from(">I", self._data, at + 4)
        if entries > MAX_ENTRIES:
            raise VideoHeaderError(f"the display times have more than {MAX_ENTRIES} entries", "video_timing")
        table = self._data[at + 8 : at + 8 + 8 * entries]
        done, times = 0, list[int]()
        for count, offset in struct.iter_unpack(">Ii", table):
            if count:
                times += (done * step + offset, (done + count - 1) * step + offset)
            done += count
        if done != frames:
            raise VideoHeaderError("the tables do not agree on frames and times", "video_timing")
        return min(times), max(times)


def _only(boxes: dict[bytes, list[Box]], kind: bytes) -> Box:
    """Return the only box of a kind."""
    places = boxes.get(kind, ())
    if len(places) != 1:
        raise VideoHeaderError(f"the header has {len(places)} boxes {kind.decode('latin-1')!r} where one is needed")
    return places[0]
