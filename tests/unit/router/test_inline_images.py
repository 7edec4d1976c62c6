"""Inline images: extraction before parsing changes nothing; engines get each by its URL, its uuid or its bytes."""

import base64
import copy
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
from mmrouter_router.intake import Limits, chat, parse_chat, request
from mmrouter_router.intake.json_body import SEARCHED
from mmrouter_router.media import content
from mmrouter_router.media.content import Media
from mmrouter_router.request.prepared import CHAT, NO_URL, Outgoing, OutgoingImage

LIMITS = Limits(max_images=3)
FEW = 12
EXAMPLES = 60


@pytest.fixture(autouse=True, scope="module")
def short():
    """Extract short images, too, as those of the examples are."""
    before = request.MIN_URI
    request.MIN_URI = chat.MIN_URI = FEW
    yield
    request.MIN_URI = chat.MIN_URI = before


def data_of(part) -> bytes | str:
    try:
        return part.inline.data if part.inline is not None else content.decode(part.url, 10_000)
    except Exception as error:  # both ways must raise the same
        return f"{type(error)} {error}"


def outcome(parse, raw: bytes) -> Any:
    """Return all that later stages use of a request, or its error."""
    try:
        request = parse(raw, LIMITS, "m", "vllm")
    except RequestError as error:
        return error.status, error.to_body()
    images, body = [], json.loads(json.dumps(request.body))
    for image in request.images:
        place = body["messages"][image.message]["content"][image.part]["image_url"]
        place["url"] = ""  # rewritten from the bytes
        images.append((image.message, image.part, image.param, data_of(image)))
    media = [(part.param, part.kind, part.place, data_of(part)) for part in request.media]
    return body, images, media, request.inexact, request.removed, request.stream, request.max_tokens


def test_body_with_many_small_uris_is_not_searched_further():
    """Searching millions of them would block the event loop for seconds."""
    large = '"data:image/png;base64,' + "A" * 32 + '"'
    few = '"data:",' * request.MAX_SKIPPED
    assert request.extract_images(f"[{few}{large}]".encode()) is not None
    assert request.extract_images(f'[{few}"data:",{large}]'.encode()) is None


@pytest.mark.parametrize("body", [b"x", b'"data:image/png;base64,' + b"A" * 32_000 + b'"'])
def test_one_call_searches_a_bounded_part_of_a_body(body):
    """Python changes threads between calls only."""

    class Recorded(bytearray):
        def find(self, text, start, end):
            spans.append((start, end))
            return super().find(text, start, end)

    spans: list[tuple[int, int]] = []
    extracted = request.extract_images(Recorded(b"[" + b"x" * 3 * SEARCHED + body + b"y" * 3 * SEARCHED + b"]"))
    assert (extracted is not None) == (len(body) > 1)
    assert len(spans) > 6
    assert max(end - start for start, end in spans) < SEARCHED + 10


WHOLE = "data:image/png;base64,AAAABBBBCCCC"
ODD = ["", "hello", '"', "\\", '\\"', '"data:', f'"{WHOLE}"', "data:image/png;base64,QUJD", "\u20ac\n"]
WORDS = st.sampled_from(ODD)
DATA = st.binary(min_size=1, max_size=30).map(lambda data: base64.b64encode(data).decode())
TYPES = st.sampled_from(["image/png", "", "image/svg+xml", "a b", "text/html"])
ENDS = st.sampled_from(["QR==", "Q", "=", " ", "%3D", "\u20ac", "\\", '"'])
URLS = st.one_of(
    st.builds("data:{};base64,{}".format, TYPES, DATA),
    st.builds("data:image/png;base64,{}{}".format, DATA, ENDS),
    st.sampled_from(["https://a/b.png", "data:,abc", "data:image/png;base64,", "x" * 40]),
)
PARTS = st.one_of(
    st.builds(lambda words: {"type": "text", "text": words}, WORDS | URLS),
    st.builds(lambda kind, url: {"type": kind, kind: {"url": url}}, st.sampled_from(["image_url", "video_url"]), URLS),
    st.builds(lambda url: {"type": "image_url", "image_url": url}, URLS),
    st.builds(lambda url: {"type": "image_url", "image_url": {"url": url}, url: url}, URLS),
)
BODIES = st.builds(
    lambda parts, more: {"model": "m", "messages": [{"role": "user", "content": parts}], **more},
    st.lists(PARTS, min_size=1, max_size=4),
    st.sampled_from([{}, {"stream": True}, {"user": WHOLE}, {"data:image/png;base64,AAAA": 1}]),
)


def written(body: Any, how: int) -> bytes:
    options = ({}, {"ensure_ascii": False, "separators": (",", ":")}, {"indent": 1})[how % 3]
    raw = json.dumps(body, **options)
    return (raw.replace("/", "\\/") if how > 2 else raw).encode()


NOTHING = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}


@example({"model": "m", "messages": [{"role": "user", "content": [NOTHING]}]}, 0)
@given(BODIES, st.integers(0, 5))
@settings(max_examples=EXAMPLES, deadline=None)
def test_extraction_preserves_the_request(body, how):
    raw = written(body, how)
    assert outcome(parse_chat, raw) == outcome(chat.parse_unextracted, raw)


PUT = st.sampled_from([b'"', b"\\", b"{", b"}", b",", b"\n", b"\xff", b'"data:'])
BREAKS = st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 3), PUT), min_size=1, max_size=4)


@given(BODIES, st.integers(0, 5), BREAKS)
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


def test_an_extracted_video_is_a_view_of_the_body():
    data = os.urandom(100_000)
    raw = (DOUBLE % (b'{"url": "data:video/mp4;base64,%b"}' % base64.b64encode(data))).replace(
        b"image_url", b"video_url"
    )
    request = parse_chat(raw, LIMITS, "m")
    (video,) = request.media
    assert (video.inline.data, video.kind, video.place) == (data, "video", (0, 0))
    assert video.inline.text.obj is raw
    assert len(request.source) < 1000


def test_replayed_placeholder_refers_to_no_image():
    raw = DOUBLE % (b'{"url": %b}' % A)
    spliced = request.extract_images(raw)
    word = parse_chat(spliced.raw, LIMITS, "m").images[0]
    assert word.inline is None
    both = parse_chat(DOUBLE % (b'{"url": %b}, "cache_control": "%b"' % (A, word.url.encode())), LIMITS, "m")
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
    assert [url if url.startswith("file") else content.decode(url, 100) for url in urls] == [
        "file:///x" if number in files else data for number, data in enumerate(datas)
    ]


URI = "data:image/png;base64,YmI="


def part(**more):
    return {"type": "image_url", "image_url": {"url": NO_URL, **more}, "uuid": "m1-a"}


def outgoing():
    messages = [
        {"role": "system", "content": "text"},
        {"role": "user", "content": [part(detail="low"), {"type": "text", "text": "and"}, part()]},
        {"role": "user", "content": [part()]},
    ]
    images = [OutgoingImage(1, 0, "m1-a", PICTURE), OutgoingImage(1, 2, "m1-b", PICTURE)]
    return Outgoing("/v1", {"model": "m", "messages": messages}, (*images, OutgoingImage(2, 0, "m1-c", PICTURE)))


PICTURE = Media(b"bb", "image/png", "data")


def shown(body: bytes):
    messages = json.loads(body)["messages"]
    return [messages[1]["content"][0], messages[1]["content"][2], messages[2]["content"][0]]


def test_each_image_is_sent_by_its_url_or_its_bytes():
    request = outgoing()
    before = copy.deepcopy(request.fields)
    body = request.body({**request.fields, "seed": 1}, {(1, 0): "file:///x.png", (2, 0): None})
    first, second, third = shown(body)
    assert first["image_url"] == {"url": "file:///x.png", "detail": "low"}
    assert second["image_url"] == {"url": URI}
    assert (third["image_url"], third["uuid"]) == (None, "m1-a")
    assert json.loads(body)["seed"] == 1
    assert request.fields == before
    assert [one["image_url"]["url"] for one in shown(request.plain)] == [URI] * 3
    assert shown(request.plain)[0]["image_url"]["detail"] == "low"


def test_unused_image_bytes_are_not_encoded():
    request = outgoing()
    request.body(request.fields, dict.fromkeys((image.place for image in request.images), "file:///x"))
    assert not any("url" in vars(image) for image in request.images)
    assert request.images[0].url == URI
