"""Large bodies: the event loop serves others while they are read, and its own work does not grow with them."""

import asyncio
import base64
import io
import random
import struct
import threading
import zlib
from collections.abc import Callable
from typing import Any

import httpx
import orjson
import pytest
from PIL import Image
from unit.counted_lines import counted_lines
from unit.router.router_rig import HELLO

from mmrouter_lib.prompt.segment_cache import MAX_TOKENS, MAX_WORD
from mmrouter_router.app import Router
from mmrouter_router.core.worker_threads import INLINE_BYTES, THREADS
from mmrouter_router.request.prepare import MAX_TEXT
from mmrouter_router.request.prepared import CHAT

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:PIL.TiffImagePlugin")  # as a router does

Body = dict[str, Any]
OTHER_LINES = 2_000
"""Lines of Python that the loop may run more for twice the body: steps of its own that come while it waits."""


def chat(content: object, **fields: object) -> Body:
    return {"model": "t", "messages": [{"role": "user", "content": content}], **fields}


def picture(data: bytes, kind: str = "jpeg") -> list[Body]:
    url = f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
    return [{"type": "image_url", "image_url": {"url": url}}]


def segments(size: int) -> bytes:
    return b"\xff\xd8" + b"\xff\xe1\x00\x64Exif\0\0" + bytes(92) + b"\xff\xe1\x00\x02" * (size // 4)


def texts(size: int) -> bytes:
    out = io.BytesIO()
    Image.new("1", (8, 8)).save(out, "PNG")
    png = out.getvalue()
    chunk = struct.pack(">I", 3) + b"tEXta\0b"
    chunk += struct.pack(">I", zlib.crc32(chunk[4:]))
    return png[:33] + chunk * (size // len(chunk)) + png[33:]


def directory(size: int) -> bytes:
    """A TIFF of as many tags as there can be, each with many values."""
    tags = min(size // 12, 65_535)
    entries = b"".join(struct.pack("<HHII", 1000 + tag % 60_000, 4, size // 8, 8) for tag in range(tags))
    return b"II*\0\x08\0\0\0" + struct.pack("<H", tags) + entries + bytes(size)


BODIES: dict[str, tuple[str, Callable[[int], Body]]] = {
    "content parts": (CHAT, lambda size: chat([{"type": "text", "text": "x"}] * (size // 100))),
    "messages": (CHAT, lambda size: {**HELLO, "messages": HELLO["messages"] * (size // 100)}),
    "text": (CHAT, lambda size: chat("hello " * (size // 6))),
    "equal turns in a text": (CHAT, lambda size: chat(("<|im_end|>" + "7" * 250) * (size // 260))),
    "tools": (CHAT, lambda size: chat("x", tools=[{"type": "function", "function": {"name": "f"}}] * (size // 100))),
    "unknown field": (CHAT, lambda size: chat("x", unknown=[[]] * (size // 10))),
    "image of segments": (CHAT, lambda size: chat(picture(segments(size)))),
    "image of texts": (CHAT, lambda size: chat(picture(texts(size), "png"))),
    "image of tags": (CHAT, lambda size: chat(picture(directory(size), "tiff"))),
    "percent escapes": (
        CHAT,
        lambda size: chat([{"type": "image_url", "image_url": {"url": "data:," + "%41" * size}}]),
    ),
    "token ids": ("/v1/completions", lambda size: {"model": "t", "prompt": [100] * (size // 10)}),
    "Anthropic's messages": (
        "/v1/messages",
        lambda size: {"model": "t", "max_tokens": 9, "messages": HELLO["messages"] * (size // 100)},
    ),
    "input items": ("/v1/responses", lambda size: {"model": "t", "input": HELLO["messages"] * (size // 100)}),
}
SIZE = 400_000
LINES = 70_000  # of Python that the loop runs for a body up to INLINE_BYTES: 5 ms


@pytest.mark.parametrize(("path", "body"), BODIES.values(), ids=list(BODIES))
async def test_others_are_answered_while_a_large_body_waits_for_a_thread(
    r: Router, client: httpx.AsyncClient, path: str, body: Callable[[int], Body]
) -> None:
    opened = threading.Event()
    holders = [asyncio.create_task(r.threads.run("", INLINE_BYTES + 1, opened.wait, 60)) for _ in range(THREADS)]
    await asyncio.sleep(0)
    large = asyncio.create_task(client.post(path, content=orjson.dumps(body(SIZE))))
    try:
        small = await client.post(CHAT, json=HELLO)
        assert small.status_code == 503, "there is no worker"
        assert not large.done()
    finally:
        opened.set()
        await asyncio.gather(*holders)
    assert (await large).status_code in (400, 503)


async def lines(client: httpx.AsyncClient, path: str, raw: bytes) -> int:
    """Return the lines of Python that run in this thread for a request."""
    with counted_lines() as counted:
        answer = await asyncio.create_task(client.post(path, content=raw))
    assert answer.status_code in (400, 503)
    return counted.lines


@pytest.mark.parametrize(("path", "body"), BODIES.values(), ids=list(BODIES))
async def test_the_loops_work_does_not_grow_with_the_body(
    client: httpx.AsyncClient, path: str, body: Callable[[int], Body]
) -> None:
    small, large = (orjson.dumps(body(size)) for size in (SIZE, 2 * SIZE))
    await lines(client, path, small)  # caches
    assert await lines(client, path, large) - await lines(client, path, small) < OTHER_LINES


@pytest.mark.parametrize(("path", "body"), BODIES.values(), ids=list(BODIES))
async def test_a_body_that_is_small_in_bytes_is_small_in_work(
    client: httpx.AsyncClient, path: str, body: Callable[[int], Body]
) -> None:
    """Bytes alone do not bound the work: 32 KiB hold a thousand messages, which took 40 ms."""
    raws = (orjson.dumps(body(size)) for size in range(INLINE_BYTES // 4, 5 * INLINE_BYTES, 1000))
    raw = max((raw for raw in raws if len(raw) <= INLINE_BYTES), key=len)
    await lines(client, path, raw)  # caches
    assert await lines(client, path, raw) < LINES


async def test_a_prompt_beyond_the_bound_is_placed_by_affinity(r: Router) -> None:
    too_long = ("affinity", ("prompt_size:messages",))
    exact: tuple[str, tuple[str, ...]] = ("exact", ())
    texts = {
        "x" * MAX_WORD: exact,
        "x" * (2 * MAX_WORD): too_long,
        "x " * MAX_WORD: exact,
        "x " * (MAX_TEXT // 2): too_long,
        ("7" * 1023 + " ") * (MAX_TOKENS // 1023 + 1): too_long,
    }
    for text, expected in texts.items():
        prepared = await r.chat.prepare(CHAT, orjson.dumps(chat(text)), r.chat.tenants.authenticate([]))
        assert (prepared.exactness, prepared.reasons) == expected


async def test_tokens_of_images_count_against_the_bound(r: Router) -> None:
    out = io.BytesIO()
    Image.new("1", (1200, 1200)).save(out, "PNG")
    text: Body = {"type": "text", "text": ("7" * 1023 + " ") * (MAX_TOKENS >> 10)}
    for content, expected in (([text], "exact"), ([text, *picture(out.getvalue(), "png")], "affinity")):
        prepared = await r.chat.prepare(CHAT, orjson.dumps(chat(content)), r.chat.tenants.authenticate([]))
        assert prepared.exactness == expected
        assert len(prepared.ids) <= MAX_TOKENS


async def test_an_image_that_stays_in_the_body_does_not_count_as_text(r: Router) -> None:
    out = io.BytesIO()
    Image.frombytes("RGB", (1400, 1100), random.Random(1).randbytes(1400 * 1100 * 3)).save(out, "BMP")
    url = f"data:image/bmp;name=x;base64,{base64.b64encode(out.getvalue()).decode()}"  # no form that is extracted
    assert len(url) > MAX_TEXT
    body = orjson.dumps(chat([{"type": "image_url", "image_url": {"url": url}}]))
    prepared = await r.chat.prepare(CHAT, body, r.chat.tenants.authenticate([]))
    assert (prepared.exactness, prepared.reasons) == ("exact", ())


@pytest.mark.parametrize(("side", "certain"), [(400, True), (4200, False)])
async def test_a_large_rotated_png_is_not_decoded_and_not_certain(r: Router, side: int, certain: bool) -> None:
    tags, out = Image.Exif(), io.BytesIO()
    tags[0x0112] = 6
    Image.new("1", (side, side // 2 * 2 - 2)).save(out, "PNG", exif=tags)
    url = "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()
    body = orjson.dumps(chat([{"type": "image_url", "image_url": {"url": url}}]))
    prepared = await r.chat.prepare(CHAT, body, r.chat.tenants.authenticate([]))
    assert (prepared.exactness == "exact") == certain
    assert (prepared.images[0].width, prepared.images[0].height) == (side - 2, side)


async def test_percent_escapes_are_bounded(client: httpx.AsyncClient) -> None:
    url = "data:," + "%41" * 1_100_000
    answer = await client.post(CHAT, json=chat([{"type": "image_url", "image_url": {"url": url}}]))
    assert answer.status_code == 400
    assert "percent escapes" in answer.json()["error"]["message"]
