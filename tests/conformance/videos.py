"""Drawn videos, encoded by PyAV (FFmpeg with its encoders), which is downloaded once."""

import importlib
import random
import subprocess
import sys
import zipfile
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hack.build_once import cache_dir

PYAV = "18.1.0"
SAMPLES = 48_000  # of sound a second
RATES = (
    "24",
    "25",
    "30",
    "30000/1001",
    "24000/1001",
    "60000/1001",
    "60",
    "50",
    "12",
    "10",
    "5",
    "2",
    "1",
    "120",
    "240",
)
CODECS = ("libx264", "libx264", "mpeg4", "libvpx-vp9")
MATROSKA = {"libx264": "mkv", "libx265": "mkv", "mpeg4": "mkv", "libvpx-vp9": "webm", "libvpx": "webm"}
"""Codec -> suffix of the container."""
FAST = {
    "libx264": {"preset": "veryfast"},
    "libx265": {"preset": "ultrafast", "x265-params": "log-level=none:pools=none:frame-threads=1"},
    "libvpx-vp9": {"deadline": "realtime", "cpu-used": "8"},
    "libvpx": {"deadline": "realtime", "cpu-used": "8"},
}
"""Codec -> options of an encoder that takes its time by default."""


@dataclass(frozen=True, slots=True)
class DrawnVideo:
    """``quarters``: turns of the display by the header's matrix. ``uneven``: frames at varying distances. ``sound``:
    seconds of silence.
    """

    codec: str = "libx264"
    width: int = 64
    height: int = 48
    rate: str = "30"
    frames: int = 60
    suffix: str = "mp4"
    quarters: int = 0
    uneven: bool = False
    sound: float = 0
    options: dict[str, str] = field(default_factory=dict)  # of the container
    encoder: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        turned = f"_{90 * self.quarters}" if self.quarters else ""
        rate = self.rate.replace("/", "-")
        return f"{self.codec}_{self.width}x{self.height}_{self.frames}_{rate}{turned}.{self.suffix}"


def drawn_videos(number: int, seed: int) -> list[DrawnVideo]:
    """Return videos of drawn sizes, frame rates, numbers of frames, codecs and rotations."""
    draw = random.Random(seed)
    videos = []
    for _ in range(number):
        codec = draw.choice(CODECS)
        videos.append(
            DrawnVideo(
                codec,
                width=2 * round(2 ** draw.uniform(3, 7.3)),
                height=2 * round(2 ** draw.uniform(3, 7.3)),
                rate=draw.choice(RATES),
                frames=draw.choice((2, 3, 4, 5, 6, 7, 8, 9, draw.randint(10, 60), draw.randint(60, 400))),
                suffix=draw.choice(("mp4", "mov")) if codec != "libvpx-vp9" else "mp4",
                quarters=draw.choice((0, 0, 0, 1, 2, 3)),
                options=draw.choice(({}, {"movflags": "faststart"})),
                encoder=FAST.get(codec, {}) | ({"bf": str(draw.choice((0, 2, 3)))} if codec == "libx264" else {}),
            )
        )
    return videos


def drawn_matroska(number: int, seed: int) -> list[DrawnVideo]:
    """Return videos in Matroska and WebM, some with sound that ends before or after the last frame."""
    draw = random.Random(seed)
    videos = []
    for at in range(number):
        codec = list(MATROSKA)[at % len(MATROSKA)]
        rate, frames = draw.choice(RATES), draw.choice((draw.randint(2, 9), draw.randint(10, 120)))
        seconds = frames / Fraction(rate)
        videos.append(
            DrawnVideo(
                codec,
                width=2 * draw.randint(16, 80),
                height=2 * draw.randint(16, 80),
                rate=rate,
                frames=frames,
                suffix=MATROSKA[codec],
                sound=draw.choice(
                    (0.0, float(seconds * draw.randint(5, 13) / 10), float(seconds + 1 / Fraction(rate)))
                ),
                encoder=FAST.get(codec, {}) | ({"bf": str(draw.choice((0, 3)))} if codec == "libx264" else {}),
            )
        )
    return videos


def pyav_folder() -> Path:
    """Return the folder that holds the module ``av``, or skip the test."""
    home = cache_dir() / "processors"
    folder = home / f"av-{PYAV}"
    if not folder.is_dir():
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        subprocess.run([*command, "--dest", str(home), f"av=={PYAV}"], capture_output=True, text=True, check=False)
        wheels = list(home.glob(f"av-{PYAV}-*.whl"))
        if not wheels:
            pytest.skip(f"not run: PyAV {PYAV} cannot be had from the package index")
        zipfile.ZipFile(wheels[0]).extractall(folder)
    return folder


def pyav() -> Any:
    """Return the module ``av``, or skip the test."""
    if (folder := str(pyav_folder())) not in sys.path:
        sys.path.append(folder)
    return importlib.import_module("av")


def encoded(video: DrawnVideo, path: Path) -> bytes:
    """Write a video with a moving grey level to ``path`` and return its bytes."""
    av = pyav()
    draw, time = random.Random(video.frames), 0
    with av.open(str(path), "w", options=video.options) as container:
        stream = container.add_stream(video.codec, rate=Fraction(video.rate))
        stream.width, stream.height, stream.pix_fmt = video.width, video.height, "yuv420p"
        stream.options = dict(video.encoder)
        if video.codec == "libx265" and video.frames < 3:
            # Now and then x265 gives two frames with reordering packets whose times fall, which no container takes.
            stream.options["x265-params"] += ":bframes=0"
        sound = container.add_stream("libopus", rate=SAMPLES, layout="mono") if video.sound else None
        for number in range(video.frames):
            frame = av.VideoFrame(video.width, video.height, "yuv420p")
            for plane, grey in zip(frame.planes, (number * 7 % 200 + 20, 128, 128), strict=True):
                plane.update(bytes([grey]) * plane.buffer_size)
            if video.uneven:
                frame.pts = time
                time += draw.randint(1, 3)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
        for time in range(0, round(video.sound * SAMPLES), 960):
            silence = av.AudioFrame.from_ndarray(np.zeros((1, 960), np.int16), format="s16", layout="mono")
            silence.sample_rate, silence.pts = SAMPLES, time
            container.mux(sound.encode(silence))
        if sound:
            container.mux(sound.encode())
    data = bytearray(path.read_bytes())
    if video.quarters:
        turn(data, video.quarters)
        path.write_bytes(data)
    return bytes(data)


def turn(data: bytearray, quarters: int) -> None:
    """Write a rotation by quarters into the header of the video track."""
    at = data.index(b"tkhd") + 4
    matrix = {1: (0, 1, -1, 0), 2: (-1, 0, 0, -1), 3: (0, -1, 1, 0)}[quarters]
    a, b, c, d = (value << 16 for value in matrix)
    rows = (a, b, 0, c, d, 0)
    data[at + 40 : at + 64] = b"".join(value.to_bytes(4, "big", signed=True) for value in rows)
