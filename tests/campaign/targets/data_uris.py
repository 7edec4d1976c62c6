"""``data:`` URIs against a simple reference decoder: two decoders must not read two images from one URI."""

import base64
import random
import re
import string
from collections.abc import Sequence

from campaign.mutation import mutated
from campaign.target import BrokenPropertyError, Target

from mmrouter_router.media.content import MediaError, decode

MAX_BYTES = 70_000
_DIGITS = string.ascii_uppercase + string.ascii_lowercase + string.digits + "+/"


class DataUris(Target):
    """An input: the URI."""

    name = "data_uris"
    short = 2000
    words = (
        *b"data: DATA: ;base64, ;base64 base64 , ; = == %3D %2B %2f %00 %zz %4 image/png ;charset=x + - _ % %%".split(),
        *(b" ", b"\n", b"\t", b"\xc3\xa9", b"\0", b"A" * 400, b"%41" * 100),
    )  # fmt: skip

    def seeds(self) -> list[bytes]:
        whole = base64.b64encode(bytes(range(256)))
        texts = [
            b"data:image/png;base64," + whole,
            b"data:,a%20b",
            b"data:text/plain;charset=x,abc",
            b"data:;base64,QQ==",
        ]
        return [
            *texts,
            b"data:image/png;base64," + whole.replace(b"+", b"%2B"),
            b"data:x;base64,QUI=",
            b"data:x;base64,QUJD",
        ]

    def draw(self, source: random.Random, kept: Sequence[bytes]) -> bytes:
        data = mutated(source, kept, self.words)
        if source.random() < 0.01:  # beyond what is decoded at a time
            at = source.randrange(len(data) + 1)
            data = data[:at] + source.choice((b"A", b"%41", b"QUJD")) * 22_000 + data[at:]
        return data

    def check(self, data: bytes) -> str:
        uri = data.decode("utf-8", "replace")
        try:
            with self.product():
                read = decode(uri, MAX_BYTES)
        except MediaError as error:
            expected = reference(uri)
            if expected and len(expected) <= MAX_BYTES and error.reason != "too_large":
                raise BrokenPropertyError(f"{error.reason}, but it is {expected[:50]!r}") from error
            return error.reason
        expected = reference(uri)
        if read != expected:
            raise BrokenPropertyError(f"read {read[:50]!r} instead of {expected and expected[:50]!r}")
        return "base64" if ";base64," in uri.lower() else "percent"


def reference(uri: str) -> bytes | None:
    """Return the bytes of a URI, ``None`` where it is not well formed (RFC 2397, RFC 4648, RFC 3986)."""
    head, comma, payload = uri.partition(",")
    if not comma or head[:5].lower() != "data:" or len(head) >= 512:
        return None
    parameters = head[5:].split(";")
    based = len(parameters) > 1 and parameters[-1].strip().lower() == "base64"
    if "%" in payload or not based:
        if re.search(r"[^!-~]|%(?![0-9a-fA-F]{2})", payload):
            return None
        raw = re.sub(rb"%(..)", lambda match: bytes([int(match[1], 16)]), payload.encode())
        if not based:
            return raw
        if not raw.isascii():
            return None
        payload = raw.decode()
    digits = payload.rstrip("=")
    padding = len(payload) - len(digits)
    if len(payload) % 4 or padding > 2 or any(digit not in _DIGITS for digit in digits):
        return None
    read = bytearray()
    for at in range(0, len(digits), 4):
        number = sum(_DIGITS.index(digit) << 18 - 6 * place for place, digit in enumerate(digits[at : at + 4]))
        read += number.to_bytes(3, "big")[: len(digits[at : at + 4]) * 6 // 8]
    return bytes(read)
