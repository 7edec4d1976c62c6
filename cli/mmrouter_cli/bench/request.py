"""One streamed chat request: sent, timed, and read to its end. Nothing of an answer's text is kept."""

import asyncio
import contextlib
import os
import time
from array import array
from collections.abc import Callable, Mapping
from typing import Any

import aiohttp
import msgspec
from aiohttp.http_exceptions import HttpProcessingError

from mmrouter_cli.bench.types import Answer

CONNECT_SECONDS = 10.0
KEPT_ALIVE_SECONDS = 2.0
"""Connections are given back before servers close them: a request on one that is being closed would be an error."""
END_SECONDS = 1.0
"""How long the end of a stream may come after its last event."""
SAID = 300
"""Characters of an error that are kept."""

clock = time.perf_counter


class Details(msgspec.Struct):
    """What usage says of a prompt."""

    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    """What an answer cost."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: Details | None = None


class Delta(msgspec.Struct):
    """What an event adds; engines name a model's thoughts in two ways."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class Choice(msgspec.Struct):
    """One choice of an event."""

    delta: Delta | None = None
    finish_reason: str | None = None


class Chunk(msgspec.Struct):
    """One event of an answer."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: Any = None


_decoder = msgspec.json.Decoder(Chunk)


def session(timeout: float, connections: int) -> aiohttp.ClientSession:
    """Return a client whose requests take ``timeout`` seconds at most; the caller closes it.

    Proxies are not asked: what is measured is the endpoint.
    """
    return aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=timeout, sock_connect=min(timeout, CONNECT_SECONDS)),
        connector=aiohttp.TCPConnector(limit=connections, keepalive_timeout=KEPT_ALIVE_SECONDS),
        cookie_jar=aiohttp.DummyCookieJar(),
        headers={"accept-encoding": "identity"},
    )


async def ask(
    client: aiohttp.ClientSession,
    url: str,
    headers: Mapping[str, str],
    body: bytes,
    *,
    started: float,
    late: float | None,
    gap: Callable[[float], None],
) -> Answer:
    """Send a request and read its answer. ``gap`` is told of the seconds between two tokens of a whole one.

    Raises nothing for what the endpoint does: that is the answer's ``error``.
    """
    answer = Answer(started, late)
    gaps = array("d")
    began = clock()
    try:
        async with client.post(f"{url}/v1/chat/completions", headers=headers, data=body) as reply:
            _note_routing(answer, reply.headers)
            if reply.status != 200:
                _fail(answer, f"status {reply.status}", meant(await reply.content.read(64 * 1024)))
            elif reply.content_type != "text/event-stream":
                _fail(answer, "no stream", f"content-type is {reply.content_type}")
            else:
                await _read(answer, reply.content, began, gaps.append)
    except TimeoutError:
        _fail(answer, "timeout", f"no whole answer in {client.timeout.total:g} s")
    except aiohttp.ClientConnectorError as error:
        _fail(answer, "connect", unconnected(error))
    except (aiohttp.ClientError, OSError) as error:
        _fail(answer, "broken off" if answer.first else "no answer", str(error) or type(error).__name__)
    except (msgspec.DecodeError, HttpProcessingError, ValueError) as error:
        _fail(answer, "unreadable", str(error))
    answer.total = answer.total or clock() - began
    if not answer.error:
        for seconds in gaps:
            gap(seconds)
    return answer


async def _read(answer: Answer, lines: aiohttp.StreamReader, began: float, gap: Callable[[float], None]) -> None:
    last = 0.0
    finished = False
    async for line in lines:
        if not line.startswith(b"data:"):
            continue  # an empty line, a comment, a name of an event
        data = line[5:].strip()
        if data == b"[DONE]":
            answer.total = clock() - began
            finished = True
            # The connection can be used again only when its last byte is read; an endpoint may leave it open.
            with contextlib.suppress(TimeoutError, aiohttp.ClientError):
                await asyncio.wait_for(_to_the_end(lines), END_SECONDS)
            break
        chunk = _decoder.decode(data)
        if chunk.error is not None:
            _fail(answer, "error event", meant(data))
            return
        for choice in chunk.choices:
            finished = finished or choice.finish_reason is not None
            if not _says(choice):
                continue
            now = clock()
            if last:
                gap(now - last)
            else:
                answer.first = now - began
            last = now
            answer.last = now - began
            answer.tokens_seen += 1
        if chunk.usage is not None:
            _note_usage(answer, chunk.usage)
    if not finished:
        _fail(answer, "broken off", "the stream ended before the answer did")
    elif not answer.first:
        answer.first = answer.last = clock() - began  # an answer without text


async def _to_the_end(lines: aiohttp.StreamReader) -> None:
    while await lines.readany():
        pass


def _says(choice: Choice) -> bool:
    delta = choice.delta
    return delta is not None and bool(delta.content or delta.reasoning_content or delta.reasoning)


def _note_usage(answer: Answer, usage: Usage) -> None:
    answer.prompt, answer.completion = usage.prompt_tokens, usage.completion_tokens
    answer.cached = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else None


def _note_routing(answer: Answer, headers: Mapping[str, str]) -> None:
    """Keep what an mmrouter says of its decision; all but the id needs the control token."""
    answer.routed = "x-mmrouter-request-id" in headers
    answer.exactness = headers.get("x-mmrouter-exactness", "")
    answer.worker = headers.get("x-mmrouter-worker", "")
    blocks, size = headers.get("x-mmrouter-overlap-blocks", ""), headers.get("x-mmrouter-block-size", "")
    if blocks.isdigit() and size.isdigit():
        answer.overlap = int(blocks) * int(size)


def _fail(answer: Answer, kind: str, message: str) -> None:
    answer.error, answer.message = kind, " ".join(message.split())[:SAID]


def meant(raw: bytes) -> str:
    """Return what an error says: its message, or all of it where it has none."""
    try:
        value = msgspec.json.decode(raw)
    except msgspec.DecodeError:
        value = None
    if isinstance(value, dict):
        error = value.get("error", value)
        message = error.get("message") if isinstance(error, dict) else error
        if isinstance(message, str) and message:
            return message
    return raw.decode(errors="replace")


def unconnected(error: aiohttp.ClientConnectorError) -> str:
    """Return why there is no connection, as the system says it."""
    number = error.os_error.errno
    # Names that are not found have negative numbers, which are no number of the system's.
    return os.strerror(number) if number is not None and number > 0 else error.os_error.strerror or str(error)


async def whole(client: aiohttp.ClientSession, method: str, url: str, **options: Any) -> tuple[int, Any, str, str]:
    """Return status, JSON (``None`` where it is none), what an error says, and mmrouter's request id."""
    async with client.request(method, url, **options) as reply:
        raw = await reply.content.read(2**20)
        try:
            value = msgspec.json.decode(raw)
        except msgspec.DecodeError:
            value = None
        return reply.status, value, meant(raw)[:SAID], reply.headers.get("x-mmrouter-request-id", "")


async def lag(note: Callable[[float], None], every: float = 0.05) -> None:
    """Tell how late the event loop's own timers are, until cancelled."""
    while True:
        due = clock() + every
        await asyncio.sleep(every)
        note(max(0.0, clock() - due))
