"""Request bodies for the whole intake: parsed, then rewritten for an engine, without a socket.

A body is refused with a 4xx in OpenAI's shape, or parsed to what Python's ``json`` reads in it. The engine gets the
tenant's salt, the served model, and no field that clients may not set; it reads what was written.
"""

import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import orjson
import pybase64
from campaign.mutation import changed, mutated
from campaign.target import BrokenPropertyError, Target
from unit.router.test_intake_fuzz import CHAT, NAMES, ODD, RESPONSES

from mmrouter_lib.engines import adapter
from mmrouter_lib.engines.base import request_fields
from mmrouter_lib.engines.base.adapter import ImageRewrite
from mmrouter_router.core.errors import RequestError
from mmrouter_router.intake import ChatRequest, Limits, parse_chat, parse_completion, parse_forwarded
from mmrouter_router.intake.chat import parse_unextracted

LIMITS = Limits(max_request_bytes=1 << 20, max_images=8)
SALT = "t1-ours"
ROUTES: dict[bytes, partial[ChatRequest]] = {
    b"vllm chat": partial(parse_chat, engine="vllm"),
    b"sglang chat": partial(parse_chat, engine="sglang"),
    b"vllm completion": partial(parse_completion, engine="vllm"),
    b"sglang completion": partial(parse_completion, engine="sglang"),
    b"vllm forwarded": partial(parse_forwarded, engine="vllm"),
    b"sglang forwarded": partial(parse_forwarded, engine="sglang"),
}
ENDPOINTS = {
    b"chat": request_fields.CHAT,
    b"completion": request_fields.COMPLETIONS,
    b"forwarded": request_fields.RESPONSES,
}
LARGE = "data:image/png;base64," + pybase64.b64encode_as_string(bytes(13_000))
PART = {"type": "image_url", "image_url": {"url": LARGE, "uuid": "u", "content_hash": "h"}, "uuid": "u"}
PICTURE = {"model": "demo", "messages": [{"role": "user", "content": [PART, {"type": "text", "text": LARGE[:60]}]}]}
DONORS = (CHAT, RESPONSES, PICTURE)
COMPLETION = {"model": "demo", "prompt": ["a", "b"], "max_tokens": 5, "stream": True}
STEERING = {name: "x" for engine in ("vllm", "sglang") for name in adapter(engine).removed_fields}
WORDS = (*STEERING, *NAMES, "vllm_xargs", "model", "messages", "input", "prompt", "previous_input_messages")
KNOWN = {*WORDS, *PART, *CHAT, *RESPONSES, *COMPLETION}
MEDIA = ("image_url", "video_url", "audio_url")
IDENTITIES = ("uuid", "content_hash")


class ChatBodies(Target):
    """An input: a line with engine and kind of route, then the body."""

    name = "chat_bodies"
    short = 2000
    words = (
        *(b'"%b":' % word.encode() for word in WORDS),
        *b'{|}|[|]|,|:|"|\\|\\"|\\u0000|\\ud800|\\ud83d\\ude00|null|true|false|NaN|Infinity|-0|1e999|1E-400'.split(
            b"|"
        ),
        *(b"18446744073709551616", b"-9223372036854775809", b"0.1e1", b"\xef\xbb\xbf", b"\xed\xa0\x80", b"\x00"),
        *(b"[" * 120, b'{"a":' * 120, b'"data:image/png;base64,', b'"cache_salt":"x",', b'"uuid":"u",'),
    )

    def seeds(self) -> list[bytes]:
        bodies: list[dict[str, Any]] = [CHAT, PICTURE, {**CHAT, **STEERING, "vllm_xargs": {"kv_transfer_params": {}}}]
        responses, completions = ([one, {**one, **STEERING}] for one in (RESPONSES, COMPLETION))
        kinds = {b"chat": bodies, b"completion": completions, b"forwarded": responses}
        routes = [(route, body) for route in ROUTES for body in kinds[route.split()[1]]]
        return [route + b"\n" + json.dumps(_known(route, body)).encode() for route, body in routes]

    def draw(self, source: random.Random, kept: Sequence[bytes]) -> bytes:
        route, _, raw = source.choice(kept).partition(b"\n")
        if source.random() < 0.5:
            try:
                return route + b"\n" + json.dumps(changed(source, json.loads(raw), WORDS, ODD, DONORS)).encode()
            except (ValueError, RecursionError):
                pass
        other = source.choice(kept).partition(b"\n")[2]
        return route + b"\n" + mutated(source, (raw, raw, other), self.words)

    def check(self, data: bytes) -> str:
        route, _, raw = data.partition(b"\n")
        if route not in ROUTES:
            return "no route"
        try:
            with self.product():
                request = ROUTES[route](raw, LIMITS, "demo")
                sent = orjson.dumps(_rewritten(request, route))
        except RequestError as error:
            return _refused(error)
        _check_read(request, raw, route)
        _check_sent(json.loads(sent), route)
        return " ".join((route.decode(), *sorted({reason.reason for reason in request.inexact}), *request.removed))


def _known(route: bytes, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return a body without the fields that its route does not know, so that not every input is refused for them."""
    endpoint = ENDPOINTS[route.split()[1]]
    fields = adapter("vllm" if route.startswith(b"vllm") else "sglang").request_fields[endpoint]
    return {name: value for name, value in body.items() if fields.knows(name)}


def _rewritten(request: ChatRequest, route: bytes) -> dict[str, Any]:
    images = [ImageRewrite(image.message, image.part, "data:,ours", "m1-ours") for image in request.images]
    for part in request.media:
        part.embed("data:,ours")
    engine = "vllm" if route.startswith(b"vllm") else "sglang"
    return adapter(engine).rewrite_chat(request.body, images, model="served", cache_salt=SALT).body


def _refused(error: RequestError) -> str:
    answer = json.loads(error.to_body())["error"]
    if not 400 <= error.status < 500:
        raise BrokenPropertyError(f"refused with {error.status}: {error.message}", "5xx")
    if not answer["message"]:
        raise BrokenPropertyError("refused without a message")
    # Only known names, because an outcome is kept with an input, and a client's own names are without end.
    named = "".join(part if part in KNOWN else "?" for part in re.findall(r"[A-Za-z_]+", error.param or "")[:2])
    return f"{error.status} {error.code} {named}"


def _check_read(request: ChatRequest, raw: bytes, route: bytes) -> None:
    """The body was read as Python's ``json`` reads it, apart from what the parser replaces."""
    reference = json.loads(raw.decode())
    if not route.endswith(b"chat"):
        kept = {name: value for name, value in reference.items() if name not in ("input", "prompt", "messages")}
        kept.pop("previous_input_messages", None)
        read = {name: request.body[name] for name in kept}
    else:
        whole = parse_unextracted(raw, LIMITS, "demo", "vllm" if route.startswith(b"vllm") else "sglang")
        urls = [image.url for image in whole.images]
        for image, url in zip(request.images, urls, strict=True):
            inline = image.inline
            if inline is not None and inline.data != pybase64.b64decode(url.partition(",")[2], validate=True):
                raise BrokenPropertyError("an image taken from a body has other bytes")
            if inline is None and image.url != url:
                raise BrokenPropertyError("an image has another URL")
        kept = {name: value for name, value in reference.items() if name != "messages"}
        read = {name: whole.body[name] for name in kept}
        texts = [message.get("content") for message in reference["messages"]]
        for text, message in zip(texts, request.messages, strict=True):
            if isinstance(text, str) and message["content"] != text:
                raise BrokenPropertyError("a message has another text")
    if _comparable(kept) != _comparable(read):
        raise BrokenPropertyError(f"read {read}, json reads {kept}")


def _comparable(value: Any) -> Any:
    """Return a value whose integers beyond 64 bits are floats, as orjson reads them; types are part of it."""
    if isinstance(value, dict):
        return {name: _comparable(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_comparable(item) for item in value]
    if isinstance(value, int) and not isinstance(value, bool) and not -(2**63) <= value < 2**64:
        value = float(value)
    return type(value).__name__, value


def _check_sent(sent: dict[str, Any], route: bytes) -> None:
    """The engine's body has the router's own fields only."""
    engine = adapter("vllm" if route.startswith(b"vllm") else "sglang")
    if (sent.get("model"), sent.get("cache_salt")) != ("served", SALT):
        raise BrokenPropertyError("the engine's body lacks the served model or the salt")
    if steering := (set(engine.removed_fields) - {"cache_salt"}) & set(sent):
        raise BrokenPropertyError(f"the engine's body has {sorted(steering)}")
    if isinstance(xargs := sent.get("vllm_xargs"), dict) and set(xargs) & set(engine.removed_xargs):
        raise BrokenPropertyError("the engine's body has refused engine arguments")
    if route.endswith(b"chat"):
        contents = [message.get("content") for message in sent["messages"]]
        parts = [part for content in contents if isinstance(content, list) for part in content]
    else:
        parts = list(_objects([sent.get(name) for name in ("input", "prompt", "previous_input_messages", "messages")]))
    for holder in parts:
        for medium in set(MEDIA) & set(holder):
            inner = holder[medium]
            url = inner.get("url") if isinstance(inner, dict) else inner
            if url not in ("data:,ours", None):
                raise BrokenPropertyError(f"a client's URL reaches the engine: {str(url)[:80]}")
            ours = holder.get("uuid") in (None, "m1-ours") and "content_hash" not in holder
            if not ours or (isinstance(inner, dict) and set(IDENTITIES) & set(inner)):
                raise BrokenPropertyError("a client's identity of a medium reaches the engine")


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _objects(item)
