"""MP4 files of a header without frames, box by box."""

import struct
from collections.abc import Sequence

ONE = 1 << 16
TURNS = ((1, 0, 0, 1), (0, 1, -1, 0), (-1, 0, 0, -1), (0, -1, 1, 0))


def box(kind: bytes, *content: bytes) -> bytes:
    body = b"".join(content)
    return struct.pack(">I4s", 8 + len(body), kind) + body


def matrix(a: int, b: int, c: int, d: int) -> bytes:
    return struct.pack(">9i", a * ONE, b * ONE, 0, c * ONE, d * ONE, 0, 0, 0, 1 << 30)


def mp4(
    width: int = 64,
    height: int = 48,
    frames: int = 60,
    *,
    scale: int = 30,
    times: Sequence[tuple[int, int]] | None = None,
    samples: int | None = None,
    offsets: Sequence[tuple[int, int]] = (),
    sync: Sequence[int] = (),
    edits: Sequence[tuple[int, int, int]] = (),
    turns: int = 0,
    long: bool = False,
    codec: bytes = b"avc1",
    tracks: int = 1,
    extra: bytes = b"",
    movie_extra: bytes = b"",
) -> bytes:
    """Return a file of ``frames`` frames, by default 1 of ``scale`` units apart.

    ``times``: runs of (frames, units). ``offsets``: runs of (frames, units from decoding to display). ``sync``: the
    frames that a seek can go to, from 1. ``edits``: (length in thousandths of a second, begin in units, rate).
    ``long``: fields of 64 bits. ``extra``, ``movie_extra``: boxes behind the last one of the file and of the movie.
    """
    times = [(frames, 1)] if times is None else times
    begin = struct.pack(">B3x", 1 if long else 0)
    clock = ">QQIQ" if long else ">IIII"
    movie = begin + struct.pack(clock, 0, 0, 1000, 0) + bytes(16) + matrix(1, 0, 0, 1) + bytes(28)
    media = begin + struct.pack(clock, 0, 0, scale, 0) + bytes(4)
    shown = (
        begin
        + struct.pack(">QQIIQ" if long else ">IIIII", 0, 0, 1, 0, 0)
        + bytes(16)
        + matrix(*TURNS[turns])
        + bytes(8)
    )
    entry = box(codec, bytes(24), struct.pack(">HH", width, height), bytes(50))
    tables = [
        box(b"stsd", struct.pack(">II", 0, 1), entry),
        box(b"stts", struct.pack(">II", 0, len(times)), *(struct.pack(">II", *run) for run in times)),
        box(b"stsz", struct.pack(">III", 0, 8, frames if samples is None else samples)),
    ]
    if offsets:
        runs = [struct.pack(">Ii", *run) for run in offsets]
        tables.append(box(b"ctts", struct.pack(">II", 0, len(offsets)), *runs))
    if sync:
        tables.append(box(b"stss", struct.pack(f">II{len(sync)}I", 0, len(sync), *sync)))
    edit = ">QqI" if long else ">IiI"
    lists = [struct.pack(edit, *each) for each in edits]
    track = box(
        b"trak",
        box(b"tkhd", shown),
        box(b"edts", box(b"elst", begin, struct.pack(">I", len(edits)), *lists)) if edits else b"",
        box(
            b"mdia",
            box(b"mdhd", media),
            box(b"hdlr", bytes(8), b"vide", bytes(13)),
            box(b"minf", box(b"stbl", *tables)),
        ),
    )
    return b"".join(
        (
            box(b"ftyp", b"isom", bytes(4)),
            box(b"moov", box(b"mvhd", movie), *[track] * tracks, movie_extra),
            box(b"mdat", bytes(8 * frames)),
            extra,
        )
    )


def element(kind: int, *content: bytes) -> bytes:
    """Return an element of Matroska, its size in four bytes."""
    body = b"".join(content)
    return kind.to_bytes((kind.bit_length() + 7) // 8) + (len(body) | 1 << 28).to_bytes(4) + body


def number(kind: int, value: int) -> bytes:
    return element(kind, value.to_bytes(max(1, (value.bit_length() + 7) // 8)))


def webm(
    width: int = 64,
    height: int = 48,
    frames: int = 60,
    *,
    step: int = 33_333_333,
    scale: int = 1_000_000,
    duration: float | None = None,
    times: Sequence[int] | None = None,
    codec: bytes = b"V_VP9",
    first: bytes = b"\x92",
    flags: int = 0x80,
    grouped: bool = False,
    sound: int = 0,
    tracks: int = 1,
    track_extra: bytes = b"",
    video_extra: bytes = b"",
    extra: bytes = b"",
    late_tracks: bool = False,
    trailer: bytes = b"",
) -> bytes:
    """Return a file of ``frames`` frames ``step`` nanoseconds apart, in clusters of 20.

    ``duration``, ``times``: in units of ``scale`` nanoseconds. ``first``: what each frame begins with. ``sound``:
    blocks of another track in each cluster. ``extra``: elements of the segment behind the tracks. ``late_tracks``: the
    tracks stand behind the clusters.
    """
    times = [round(at * step / scale) for at in range(frames)] if times is None else times
    duration = frames * step / scale if duration is None else duration
    length = element(0x4489, struct.pack(">d", duration)) if duration else b""
    shown = element(0xE0, number(0xB0, width), number(0xBA, height), video_extra)
    distance = number(0x23E383, step) if step else b""
    video = [
        element(0xAE, number(0xD7, 1 + at), number(0x83, 1), element(0x86, codec), distance, shown, track_extra)
        for at in range(tracks)
    ]
    other = element(0xAE, number(0xD7, 9), number(0x83, 2), element(0x86, b"A_OPUS")) if sound else b""
    described = element(0x1654AE6B, *video, other)
    clusters = []
    for begin in range(0, len(times), 20):
        base = times[begin]
        blocks = [number(0xE7, base)]
        for time in times[begin : begin + 20]:
            block = b"\x81" + struct.pack(">hB", time - base, flags) + first
            blocks.append(element(0xA0, element(0xA1, block)) if grouped else element(0xA3, block))
        blocks += [element(0xA3, b"\x89" + bytes(3) + b"\xfc")] * sound
        clusters.append(element(0x1F43B675, *blocks))
    parts = [element(0x1549A966, number(0x2AD7B1, scale), length), described, extra, *clusters]
    if late_tracks:
        parts.append(parts.pop(1))
    return element(0x1A45DFA3, element(0x4282, b"webm")) + element(0x18538067, *parts) + trailer
