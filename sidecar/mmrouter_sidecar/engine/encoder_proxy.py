"""Images of the engine beside us on their way to encoders: the same image to the same one, and past those that fail.

The engine posts to our loopback as if we were its encoders (:mod:`mmrouter_lib.engines.sglang.encoder_requests`);
routers tell us who
they are. A request is passed on as it came, and its answer, which holds no embedding, comes back.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final, NamedTuple

import aiohttp
import msgspec
from aiohttp import web

from mmrouter_lib.engines.base.launch import HTTP_PORT
from mmrouter_lib.engines.sglang.encoder_requests import ENCODE, Encoder, PartError, image_key, order, ranked
from mmrouter_sidecar.metrics import Metrics

log = logging.getLogger("mmrouter.sidecar")

ENCODE_SECONDS = 120.0
"""After so long an encoder is taken to hang. The engine itself gives up 60 s later."""
CONNECT_SECONDS = 2.0
FIRST_SECONDS = 10.0
"""How long an image waits for a first word of who encodes."""
TOLD_SECONDS = 30.0
"""A router that has not spoken for so long has no say beside others; the last word of all holds until the next."""
BACK_SECONDS: Final = (1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
"""After so long an encoder that failed gets an image again, by how often in a row it did."""
DEATHS = 2
"""Encoders that may end under one image: it is not carried to a third."""
BUDGET = 64 << 20
"""Bytes of requests held here at once; a larger one is taken when nothing else is."""
LARGEST = 1 << 30


class _Failed(NamedTuple):
    """``cause`` is one of few words; ``died``: the encoder ended, or hangs, with the image in its hands."""

    cause: str
    died: bool


class _Answer(NamedTuple):
    status: int
    body: bytes


@dataclass(slots=True)
class _Down:
    failures: int
    until: float


class Encoders:
    """Who encodes, who of them fails, and who has which image. ``open`` it before requests come."""

    def __init__(self, metrics: Metrics, clock: Callable[[], float] = time.monotonic) -> None:
        self._metrics, self._clock = metrics, clock
        self._told: dict[str, tuple[float, tuple[Encoder, ...]]] = {}
        self._heard = asyncio.Event()
        self._busy: dict[str, Counter[bytes]] = {}
        self._down: dict[str, _Down] = {}
        self._held = 0
        self._freed = asyncio.Condition()
        self._session: aiohttp.ClientSession | None = None

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Hold the connections to encoders for as long as the context lasts."""
        # No connection is used twice: one that an encoder has closed meanwhile looks like one that died with an image.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        timeout = aiohttp.ClientTimeout(total=ENCODE_SECONDS, sock_connect=CONNECT_SECONDS)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False) as session:
            self._session = session
            yield

    def told(self, router: str, encoders: Iterable[Encoder]) -> None:
        """Take over which encoders a router knows to be up."""
        now = self._clock()
        self._told[router] = (now, tuple(encoders))
        self._told = {name: said for name, said in self._told.items() if now - said[0] <= TOLD_SECONDS}
        here = {encoder.name for encoder in self.known}
        self._down = {name: down for name, down in self._down.items() if name in here}
        self._count()
        self._heard.set()

    @property
    def known(self) -> tuple[Encoder, ...]:
        """Everybody whom a router knows: one that is gone all the same is found out by asking it."""
        return tuple({encoder.name: encoder for _, said in self._told.values() for encoder in said}.values())

    async def encode(self, request: web.Request) -> web.Response:
        """Pass a request on, and its answer back. What nobody could encode is answered 503, as the engine expects."""
        size = request.content_length or 0
        async with self._freed:
            await self._freed.wait_for(lambda: not self._held or self._held + size <= BUDGET)
            self._held += size
        try:
            body = await request.read()
            try:
                key = image_key(body)
            except PartError as error:
                self._metrics.encodes.labels("refused").inc()
                return _error(400, f"not a request to encode: {error}")
            answer = await self._encoded(key, body)
        finally:
            async with self._freed:
                self._held -= size
                self._freed.notify_all()
        return web.Response(status=answer.status, body=answer.body, content_type="application/json")

    async def _encoded(self, key: bytes, body: bytes) -> _Answer:
        if not self._heard.is_set():
            try:
                async with asyncio.timeout(FIRST_SECONDS):
                    await self._heard.wait()
            except TimeoutError:
                log.warning("nobody says which encoders there are")
        tried: set[str] = set()
        deaths = 0
        while deaths < DEATHS and (encoder := self._next(key, tried)) is not None:
            whose = self._whose(key, encoder)
            answer = await self._post(encoder, key, body)
            if isinstance(answer, _Answer):
                fine = answer.status < 400
                outcome = whose if fine else "refused" if answer.status < 500 else "failed"
                self._metrics.encodes.labels(outcome).inc()
                return answer
            tried.add(encoder.name)
            deaths += answer.died
            log.warning("encoder %s failed: %s", encoder.name, answer.cause)
        self._metrics.encodes.labels("unserved").inc()
        return _Answer(503, _error_body(f"no encoder could encode it ({len(tried)} tried)"))

    def _next(self, key: bytes, tried: set[str]) -> Encoder | None:
        able = [encoder for encoder in self.known if encoder.name not in tried]
        return next(iter(order(key, able, self._busy, self._out())), None)

    def _out(self) -> set[str]:
        now = self._clock()
        return {name for name, down in self._down.items() if now < down.until}

    def _whose(self, key: bytes, encoder: Encoder) -> str:
        """Return why an image goes to this encoder: it is its own, the own one is down, or has its share already."""
        own = ranked(key, self.known)[0]
        return "own" if own.name == encoder.name else "moved" if own.name in self._down else "spilled"

    async def _post(self, encoder: Encoder, key: bytes, body: bytes) -> _Answer | _Failed:
        assert self._session is not None, "opened before requests come"
        mine = self._busy.setdefault(encoder.name, Counter())
        mine[key] += 1
        try:
            async with self._session.post(
                f"http://{encoder.ip}:{HTTP_PORT}{ENCODE}", data=body, headers={"content-type": "application/json"}
            ) as answer:
                said = await answer.read()  # no embedding is in it
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError):
            return self._failed(encoder, _Failed("connect", died=False))
        except TimeoutError:
            return self._failed(encoder, _Failed("timeout", died=True))
        except (aiohttp.ClientError, OSError):
            return self._failed(encoder, _Failed("lost", died=True))
        finally:
            mine[key] -= 1
            mine += Counter()  # keys that nobody asks for go
            if not mine:
                self._busy.pop(encoder.name, None)
        if answer.status == 503:  # it is not up yet, or its workers are gone
            return self._failed(encoder, _Failed("busy", died=False))
        if self._down.pop(encoder.name, None) is not None:
            self._count()
        return _Answer(answer.status, said)

    def _failed(self, encoder: Encoder, why: _Failed) -> _Failed:
        before = self._down.get(encoder.name)
        failures = before.failures + 1 if before is not None else 1
        wait = BACK_SECONDS[min(failures, len(BACK_SECONDS)) - 1]
        self._down[encoder.name] = _Down(failures, self._clock() + wait)
        self._metrics.encode_failures.labels(why.cause).inc()
        self._count()
        return why

    def _count(self) -> None:
        down = len(self._down)
        self._metrics.encoders.labels("up").set(len(self.known) - down)
        self._metrics.encoders.labels("down").set(down)


def _error_body(message: str) -> bytes:
    return msgspec.json.encode({"status": "error", "message": message})


def _error(status: int, message: str) -> web.Response:
    return web.Response(status=status, body=_error_body(message), content_type="application/json")
