import base64
import contextlib
from urllib.parse import quote_from_bytes

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmrouter_router.media import mime_type
from mmrouter_router.media.data_uri import decode
from mmrouter_router.media.types import MediaError

LIMIT = 1000


def encoded(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


@settings(max_examples=60, deadline=None)
@given(st.binary(min_size=1, max_size=200), st.sampled_from(["data:", "DATA:", "dAtA:image/png", "data:a/b;c=d"]))
def test_both_encodings_are_decoded(data, start):
    text = base64.b64encode(data).decode()
    for uri in (
        f"{start};base64,{text}",
        f"{start};BASE64,{text}",
        f"{start};base64,{text.replace('+', '%2B').replace('=', '%3d')}",
        f"{start},{quote_from_bytes(data)}",
        f"{start},{quote_from_bytes(data, safe='')}",
    ):
        assert decode(uri, LIMIT) == data


@pytest.mark.parametrize("form", [encoded, lambda data: "data:," + quote_from_bytes(data)])
@pytest.mark.parametrize("size", [LIMIT - 2, LIMIT - 1, LIMIT])
def test_limit_is_the_number_of_decoded_bytes(form, size):
    assert len(decode(form(b"\xff" * size), LIMIT)) == size
    with pytest.raises(MediaError) as caught:
        decode(form(b"\xff" * (size + 3)), LIMIT)
    assert caught.value.reason == "too_large"


BROKEN = {
    "data:image/png;base64": "data_uri",
    "data:": "data_uri",
    "image/png;base64,AAAA": "data_uri",
    "data:" + "x" * 600 + ",a": "data_uri",
    "data:image/png;base64,": "empty",
    "data:,": "empty",
    "data:;base64,A": "data_uri",
    "data:;base64,AA": "data_uri",
    "data:;base64,AAA": "data_uri",
    "data:;base64,AA==AA==": "data_uri",
    "data:;base64,AA A": "data_uri",
    "data:;base64,AAAA\n": "data_uri",
    "data:;base64,AA%0AAA": "data_uri",
    "data:;base64,_-_-": "data_uri",
    "data:;base64,\u00c4AAA": "data_uri",
    "data:;base64,%zzAA": "data_uri",
    "data:,a b": "data_uri",
    "data:,%": "data_uri",
    "data:,%4": "data_uri",
    "data:,\u00e4": "data_uri",
}


@pytest.mark.parametrize("uri", BROKEN)
def test_ambiguous_uris_are_refused(uri):
    with pytest.raises(MediaError) as caught:
        decode(uri, LIMIT)
    assert caught.value.reason == BROKEN[uri]


@settings(max_examples=60, deadline=None)
@given(st.text(alphabet=st.characters(max_codepoint=300), max_size=60))
def test_any_uri_is_decoded_like_the_standard_library_or_refused(text):
    with contextlib.suppress(MediaError):
        data = decode("data:;base64," + text, LIMIT)
        if "%" not in text:
            assert data == base64.b64decode(text, validate=True)


def test_oversized_uri_is_refused_before_decoding():
    with pytest.raises(MediaError) as caught:
        decode("data:;base64," + "?" * 2000, LIMIT)
    assert caught.value.reason == "too_large"


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"\x89PNG\r\n\x1a\n....", "image/png"),
        (b"\xff\xd8\xff\xe0", "image/jpeg"),
        (b"GIF89a", "image/gif"),
        (b"RIFF\x00\x00\x00\x00WEBPVP8 ", "image/webp"),
        (b"RIFF\x00\x00\x00\x00WAVEfmt ", "audio/wav"),
        (b"RIFF\x00\x00\x00\x00????", mime_type.UNKNOWN),
        (b"\x00\x00\x00\x20ftypavif", "image/avif"),
        (b"\x00\x00\x00\x20ftypisom", "video/mp4"),
        (b"", mime_type.UNKNOWN),
        (b"hello", mime_type.UNKNOWN),
    ],
)
def test_type_is_detected_from_the_bytes(data, kind):
    assert mime_type.detect(data) == kind


def test_web_pages_are_recognised():
    assert mime_type.is_page(b"\xef\xbb\xbf \n<!DOCTYPE HTML><html>")
    assert mime_type.is_page(b'<svg xmlns="http://www.w3.org/2000/svg">')
    assert not mime_type.is_page(b"\x89PNG\r\n\x1a\n<html>")
