"""Number of samples in a WAV file of one channel of plain PCM, by its chunks (RIFF)."""

import struct
from typing import Final, NamedTuple

_PCM: Final = 1
_BITS: Final = (8, 16, 24, 32)
MAX_CHUNKS: Final = 64


class WavHeader(NamedTuple):
    """Sample rate in Hz, and number of samples."""

    rate: int
    samples: int


def read_wav_header(data: bytes) -> WavHeader | None:
    """Return the header of a file that decoders agree on, ``None`` for any other.

    Its chunks end where the file ends, with one format of plain PCM before one chunk of whole samples. Of several
    channels vLLM's decoders make different numbers of samples.
    """
    if data[:4] != b"RIFF" or data[8:12] != b"WAVE" or int.from_bytes(data[4:8], "little") != len(data) - 8:
        return None
    at, seen, form, size = 12, list[bytes](), b"", 0
    while at < len(data) and len(seen) < MAX_CHUNKS:
        kind, length = data[at : at + 4], int.from_bytes(data[at + 4 : at + 8], "little")
        if len(kind) < 4 or at + 8 + length > len(data):
            return None
        if kind == b"fmt ":
            form = data[at + 8 : at + 8 + length]
        elif kind == b"data":
            size = length
        seen.append(kind)
        at += 8 + length + length % 2
    known = [kind for kind in seen if kind in (b"fmt ", b"data")]
    if known != [b"fmt ", b"data"] or len(form) != 16 or at != len(data):
        return None
    code, channels, rate, speed, frame, bits = struct.unpack("<HHIIHH", form)
    consistent = bits in _BITS and frame == channels * bits // 8 and speed == rate * frame
    if code != _PCM or channels != 1 or not consistent or rate == 0 or size == 0 or size % frame:
        return None
    return WavHeader(rate, size // frame)
