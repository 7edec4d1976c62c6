"""WAV headers: the samples that Python's own reader finds, or nothing."""

import io
import struct
import wave

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmrouter_lib.wav_header import read_wav_header


def chunk(kind: bytes, data: bytes) -> bytes:
    return kind + struct.pack("<I", len(data)) + data + b"\0" * (len(data) % 2)


def riff(*chunks: bytes) -> bytes:
    body = b"WAVE" + b"".join(chunks)
    return b"RIFF" + struct.pack("<I", len(body)) + body


def form(code: int = 1, channels: int = 1, rate: int = 16_000, bits: int = 16, **changes: int) -> bytes:
    frame = channels * bits // 8
    values = {"speed": rate * frame, "frame": frame, **changes}
    return chunk(b"fmt ", struct.pack("<HHIIHH", code, channels, rate, values["speed"], values["frame"], bits))


DATA = chunk(b"data", bytes(8))


@given(st.integers(1, 300), st.sampled_from((1, 2, 3, 4)), st.integers(1, 192_000), st.binary())
def test_the_samples_are_those_of_pythons_own_reader(samples, width, rate, note):
    frames = bytes(samples * width)
    data = riff(chunk(b"LIST", note), form(1, 1, rate, 8 * width), chunk(b"data", frames), chunk(b"id3 ", note))
    with wave.open(io.BytesIO(data)) as file:
        assert tuple(read_wav_header(data)) == (file.getframerate(), file.getnframes()) == (rate, samples)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        riff(),
        riff(form()),
        riff(DATA, form()),
        riff(form(), form(), DATA),
        riff(form(), DATA, DATA),
        riff(form(code=3, bits=32), DATA),
        riff(form(code=0xFFFE), DATA),
        riff(form(channels=2), DATA),
        riff(form(bits=12), DATA),
        riff(form(speed=1), DATA),
        riff(form(frame=4), DATA),
        riff(form(rate=0), DATA),
        riff(form(), chunk(b"data", b"")),
        riff(form(), chunk(b"data", bytes(7))),
        riff(form(), DATA)[:-1],
        riff(form(), DATA) + b"\0\0",
        riff(form(), DATA).replace(b"RIFF", b"RIFX"),
        riff(form(), *[chunk(b"junk", b"")] * 100, DATA),
    ],
)
def test_a_file_on_which_decoders_may_differ_has_no_header(data):
    assert read_wav_header(data) is None


@given(st.binary(max_size=80), st.integers(0, 51))
def test_no_bytes_are_an_error(junk, at):
    read_wav_header(junk)
    whole = riff(form(), DATA)
    read_wav_header(whole[:at] + junk + whole[at + len(junk) :])
