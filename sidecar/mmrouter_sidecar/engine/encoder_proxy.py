"""Proxy the engine's encode requests to encoders: the same image goes to the same one, and failing ones are skipped.

The engine posts to the sidecar's loopback address as to an encoder
(:mod:`mmrouter_lib.engines.sglang.stage_requests`); routers tell the sidecar which encoders are up. A request and its
answer, which contains no embedding, are forwarded unchanged.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Final, NamedTuple

import aiohttp
from aiohttp import web

from mmrouter_lib.engines.base.launch import HTTP_PORT
from mmrouter_lib.engines.sglang.stage_requests import ENCODE, Encoder, PartError, image_key, order, ranked
from mmrouter_sidecar.metrics import Metrics

log = logging.getLogger("mmrouter.sidecar")

ENCODE_SECONDS = 120.0  # timeout after which an encoder counts as hanging. The engine itself gives up 60 s later.
CONNECT_SECONDS = 2.0
FIRST_SECONDS = 10.0  # how long an image waits for the first list of encoders
REPORT_SECONDS = 30.0  # a router's list of encoders expires after this time, once there is a newer one
BACK_SECONDS: Final = (1.0, 2.0, 4.0, 8.0, 16.0, 30.0)  # pause of an encoder after each failure in a row
MAX_DEATHS = 2  # encoders that one image may kill: it is not sent to a third
BUDGET_BYTES = 64 << 20  # bytes of request bodies held at once; a larger one is accepted when there is no other
MAX_REQUEST_BYTES = 1 << 30


class _Failed(NamedTuple):
    """``cause``: a metric label; ``died``: the encoder ended or hung while it had the image."""

    cause: str
    died: bool


class EncoderProxy:
    """The known encoders, their failures, and the images in progress. Call ``open`` before the first request."""

    def __init__(self, metrics: Metrics, clock: Callable[[], float] = time.monotonic) -> None:
        self._metrics, self._clock = metrics, clock
        self._reports: dict[str, tuple[float, tuple[Encoder, ...]]] = {}
        self._reported = asyncio.Event()
        self._busy: dict[str, Counter[bytes]] = {}
        self._down: dict[str, tuple[int, float]] = {}  # name -> failures in a row, end of its pause
        self.held_bytes = 0
        self._freed = asyncio.Condition()
        self._session: aiohttp.ClientSession | None = None

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        # Connections are not reused, because one closed by the encoder looks like an encoder that died with an image.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        timeout = aiohttp.ClientTimeout(total=ENCODE_SECONDS, sock_connect=CONNECT_SECONDS)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False) as session:
            self._session = session
            yield

    def update(self, router: str, encoders: Iterable[Encoder]) -> None:
        now = self._clock()
        self._reports[router] = (now, tuple(encoders))
        self._reports = {name: report for name, report in self._reports.items() if now - report[0] <= REPORT_SECONDS}
        names = {encoder.name for encoder in self.encoders}
        self._down = {name: down for name, down in self._down.items() if name in names}
        self._count()
        self._reported.set()

    @property
    def idle(self) -> bool:
        return not self._busy

    @property
    def encoders(self) -> tuple[Encoder, ...]:
        """All encoders that a router reports; one that is gone is found by a failed request."""
        return tuple({encoder.name: encoder for _, report in self._reports.values() for encoder in report}.values())

    async def encode(self, request: web.Request) -> web.Response:
        """Forward a request and its answer. Answers 503, as the engine expects, if no encoder could encode it."""
        size = request.content_length or 0
        async with self._freed:
            await self._freed.wait_for(lambda: not self.held_bytes or self.held_bytes + size <= BUDGET_BYTES)
            self.held_bytes += size
        try:
            body = await request.read()
            try:
                key = image_key(body)
            except PartError as error:
                self._metrics.encodes.labels("refused").inc()
                return _error(400, f"not an encode request: {error}")
            return await self._encoded(key, body)
        finally:
            async with self._freed:
                self.held_bytes -= size
                self._freed.notify_all()

    async def _encoded(self, key: bytes, body: bytes) -> web.Response:
        if not self._reported.is_set():
            try:
                async with asyncio.timeout(FIRST_SECONDS):
                    await self._reported.wait()
            except TimeoutError:
                log.warning("no router has reported the encoders")
        tried: set[str] = set()
        deaths = 0
        while deaths < MAX_DEATHS and (encoder := self._next(key, tried)) is not None:
            assignment = self._assignment(key, encoder)
            answer = await self._post(encoder, key, body)
            if isinstance(answer, web.Response):
                succeeded = answer.status < 400
                outcome = assignment if succeeded else "refused" if answer.status < 500 else "failed"
                self._metrics.encodes.labels(outcome).inc()
                return answer
            tried.add(encoder.name)
            deaths += answer.died
            log.warning("encoder %s failed: %s", encoder.name, answer.cause)
        self._metrics.encodes.labels("unserved").inc()
        return _error(503, f"no encoder could encode it ({len(tried)} tried)")

    def _next(self, key: bytes, tried: set[str]) -> Encoder | None:
        now = self._clock()
        candidates = [encoder for encoder in self.encoders if encoder.name not in tried]
        paused = {name for name, (_, until) in self._down.items() if now < until}
        return next(iter(order(key, candidates, self._busy, paused)), None)

    def _assignment(self, key: bytes, encoder: Encoder) -> str:
        """Return why an encoder was chosen: ``own``, ``moved`` (its own is down) or ``spilled`` (its own is busy)."""
        own = ranked(key, self.encoders)[0]
        return "own" if own.name == encoder.name else "moved" if own.name in self._down else "spilled"

    async def _post(self, encoder: Encoder, key: bytes, body: bytes) -> web.Response | _Failed:
        assert self._session is not None, "open() was not called"
        busy = self._busy.setdefault(encoder.name, Counter())
        busy[key] += 1
        try:
            async with self._session.post(
                f"http://{encoder.ip}:{HTTP_PORT}{ENCODE}", data=body, headers={"content-type": "application/json"}
            ) as answer:
                content = await answer.read()
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError):
            return self._failed(encoder, _Failed("connect", died=False))
        except TimeoutError:
            return self._failed(encoder, _Failed("timeout", died=True))
        except (aiohttp.ClientError, OSError):
            return self._failed(encoder, _Failed("lost", died=True))
        finally:
            busy[key] -= 1
            busy += Counter()  # drop zero counts
            if not busy:
                self._busy.pop(encoder.name, None)
        if answer.status == 503:  # not up yet, or without workers
            return self._failed(encoder, _Failed("busy", died=False))
        if answer.status >= 500:
            # The encoder has reported the failure to the engine: another one's embedding would come too late.
            self._failed(encoder, _Failed("error", died=False))
        elif self._down.pop(encoder.name, None) is not None:
            self._count()
        return web.Response(status=answer.status, body=content, content_type="application/json")

    def _failed(self, encoder: Encoder, why: _Failed) -> _Failed:
        failures = self._down.get(encoder.name, (0, 0.0))[0] + 1
        wait = BACK_SECONDS[min(failures, len(BACK_SECONDS)) - 1]
        self._down[encoder.name] = (failures, self._clock() + wait)
        self._metrics.encode_failures.labels(why.cause).inc()
        self._count()
        return why

    def _count(self) -> None:
        down = len(self._down)
        self._metrics.encoders.labels("up").set(len(self.encoders) - down)
        self._metrics.encoders.labels("down").set(down)


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"status": "error", "message": message}, status=status)
