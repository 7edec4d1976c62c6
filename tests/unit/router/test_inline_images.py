"""Extraction of inline images before parsing: requests and errors are the same as without it."""

import base64
import json
import os
from dataclasses import replace
from typing import Any

import orjson
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mmrouter_lib.media_identity import to_wire
from mmrouter_router.core.errors import RequestError
from mmrouter_router.intake import Limits, chat, inline_images, parse_chat
from mmrouter_router.media import Media, data_uri
from mmrouter_router.request.engine_request import CHAT, Outgoing, OutgoingImage

LIMITS = Limits(max_images=3)
FEW = 12
EXAMPLES = 60


@pytest.fixture(autouse=True, scope="module")
def short():
    """Extract short images, too, as those of the examples are."""
    before = inline_images.MIN_URI
    inline_images.MIN_URI = chat.MIN_URI = FEW
    yield
    inline_images.MIN_URI = chat.MIN_URI = before


def outcome(parse, raw: bytes) -> Any:
    """Return all that later stages use of a request, or its error."""
    try:
        request = parse(raw, LIMITS, "m", "vllm")
    except RequestError as error:
        return error.status, error.to_body()
    images, body = [], json.loads(json.dumps(request.body))
    for image in request.images:
        place = body["messages"][image.message]["content"][image.part]["image_url"]
        try:
            data = image.inline.data if image.inline is not None else data_uri.decode(image.url, 10_000)
        except Exception as error:  # both ways must raise the same
            data = f"{type(error)} {error}"
        place["url"] = ""  # rewritten from the bytes
        images.append((image.message, image.part, image.param, data))
    media = [(part.url, part.param, part.kind) for part in request.media]
    return body, images, media, request.inexact, request.removed, request.stream, request.max_tokens


def test_body_with_many_small_uris_is_not_searched_further():
    """Searching millions of them would block the event loop for seconds."""
    large = '"data:image/png;base64,' + "A" * 32 + '"'
    few = '"data:",' * inline_images.MAX_SKIPPED
    assert inline_images.extract_images(f"[{few}{large}]".encode()) is not None
    assert inline_images.extract_images(f'[{few}"data:",{large}]'.encode()) is None


WORDS = st.sampled_from(
    [
        "",
        "hello",
        '"',
        "\\",
        '\\"',
        '"data:',
        '"data:image/png;base64,AAAABBBBCCCC"',
        "data:image/png;base64,QUJD",
        "\u20ac\n",
    ]
)
DATA = st.binary(min_size=1, max_size=30).map(lambda data: base64.b64encode(data).decode())
URLS = st.one_of(
    st.builds(
        "data:{};base64,{}".format, st.sampled_from(["image/png", "", "image/svg+xml", "a b", "text/html"]), DATA
    ),
    st.builds(
        "data:image/png;base64,{}{}".format, DATA, st.sampled_from(["QR==", "Q", "=", " ", "%3D", "\u20ac", "\\", '"'])
    ),
    st.sampled_from(["https://a/b.png", "data:,abc", "data:image/png;base64,", "x" * 40]),
)
PARTS = st.one_of(
    st.builds(lambda words: {"type": "text", "text": words}, WORDS),
    st.builds(lambda url: {"type": "image_url", "image_url": {"url": url}}, URLS),
    st.builds(lambda url: {"type": "image_url", "image_url": url}, URLS),
    st.builds(lambda url: {"type": "video_url", "video_url": {"url": url}}, URLS),
    st.builds(lambda url: {"type": "image_url", "image_url": {"url": url}, url: url}, URLS),
    st.builds(lambda url: {"type": "text", "text": url}, URLS),
)
BODIES = st.builds(
    lambda parts, more: {"model": "m", "messages": [{"role": "user", "content": parts}], **more},
    st.lists(PARTS, min_size=1, max_size=4),
    st.sampled_from(
        [{}, {"stream": True}, {"user": "data:image/png;base64,AAAABBBBCCCC"}, {"data:image/png;base64,AAAA": 1}]
    ),
)


def written(body: Any, how: int) -> bytes:
    raw = [json.dumps(body), json.dumps(body, ensure_ascii=False, separators=(",", ":")), json.dumps(body, indent=1)][
        how % 3
    ]
    return (raw.replace("/", "\\/") if how > 2 else raw).encode()


NOTHING = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}


@example({"model": "m", "messages": [{"role": "user", "content": [NOTHING]}]}, 0)
@given(BODIES, st.integers(0, 5))
@settings(max_examples=EXAMPLES, deadline=None)
def test_extraction_preserves_the_request(body, how):
    raw = written(body, how)
    assert outcome(parse_chat, raw) == outcome(chat.parse_unextracted, raw)


@given(
    BODIES,
    st.integers(0, 5),
    st.lists(
        st.tuples(
            st.integers(0, 2000),
            st.integers(0, 3),
            st.sampled_from([b'"', b"\\", b"{", b"}", b",", b"\n", b"\xff", b'"data:']),
        ),
        min_size=1,
        max_size=4,
    ),
)
@settings(max_examples=EXAMPLES, deadline=None)
def test_extraction_preserves_errors(body, how, breaks):
    raw = written(body, how)
    for place, gone, put in breaks:
        at = place % (len(raw) + 1)
        raw = raw[:at] + put + raw[at + gone :]
    assert outcome(parse_chat, raw) == outcome(chat.parse_unextracted, raw)


DOUBLE = b'{"model": "m", "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": %b}]}]}'
A, B = (b'"data:image/png;base64,%b"' % base64.b64encode(letter * 30) for letter in (b"a", b"b"))


@pytest.mark.parametrize("holder", [b'{"url": %b, "url": %b}' % (A, B), b'{"url": %b, "%%b": 1}' % A])
def test_extraction_preserves_the_last_of_duplicate_keys(holder):
    raw = DOUBLE % holder
    assert outcome(parse_chat, raw) == outcome(chat.parse_unextracted, raw)


def test_extracted_image_is_a_view_of_the_body():
    data = os.urandom(100_000)
    raw = DOUBLE % (b'{"url": "data:image/png;base64,%b"}' % base64.b64encode(data))
    request = parse_chat(raw, LIMITS, "m")
    (image,) = request.images
    assert image.inline.data == data
    assert image.inline.text.obj is raw
    assert len(request.source) < 1000


def test_replayed_placeholder_refers_to_no_image():
    raw = DOUBLE % (b'{"url": %b}' % A)
    spliced = inline_images.extract_images(raw)
    word = parse_chat(spliced.raw, LIMITS, "m").images[0]
    assert word.inline is None
    both = parse_chat(DOUBLE % (b'{"url": %b}, "x": "%b"' % (A, word.url.encode())), LIMITS, "m")
    assert [image.inline.data for image in both.images] == [b"a" * 30]


def test_oversized_body_is_refused_before_extraction():
    with pytest.raises(RequestError) as refused:
        parse_chat(DOUBLE % (b'{"url": %b}' % A), replace(LIMITS, max_request_bytes=100), "m")
    assert refused.value.status == 413


@given(
    st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=4),
    st.sets(st.integers(0, 3)),
    st.sets(st.integers(0, 3)),
)
def test_pieces_of_an_engine_body_join_to_the_body(datas, encoded, files):
    parts, images, shown = [], [], {}
    for number, data in enumerate(datas):
        text = memoryview(base64.b64encode(data)) if number in encoded else memoryview(b"")
        images.append(OutgoingImage(0, number, to_wire(bytes(32)), Media(data, "image/png", "data", text)))
        parts.append({"type": "image_url", "image_url": {"url": "", "detail": "low"}, "uuid": images[-1].uuid})
        if number in files:
            shown[0, number] = "file:///x"
    outgoing = Outgoing(CHAT, {"messages": [{"role": "user", "content": parts}], "model": "m"}, tuple(images))
    pieces = outgoing.pieces(outgoing.fields, shown)
    whole = pieces if isinstance(pieces, bytes) else b"".join(pieces)
    assert whole == outgoing.body(outgoing.fields, shown)
    urls = [part["image_url"]["url"] for part in orjson.loads(whole)["messages"][0]["content"]]
    assert [url if url.startswith("file") else data_uri.decode(url, 100) for url in urls] == [
        "file:///x" if number in files else data for number, data in enumerate(datas)
    ]
