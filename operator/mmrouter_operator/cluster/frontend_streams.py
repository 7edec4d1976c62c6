"""Follows the control stream of every frontend (docs/architecture.md): one connection each, reports in, changes out.

Nothing is polled. A router that is quiet sends a comment now and then, so silence means that it is gone; the connection
is then made again with growing, random pauses. A report outlives its connection for a while, because a router that
restarts has forgotten nothing that the gates depend on.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import aiohttp
import msgspec

from mmrouter_operator.model.snapshot import FrontendReport, Key

log = logging.getLogger("mmrouter.operator.streams")

CONTROL_PORT = 8001
CONNECT_SECONDS = 5.0
SILENT_SECONDS = 45.0
"""Three of the router's comments."""
HOLD_SECONDS = 30.0
"""How long the last report stands after the stream has ended."""
FIRST_BACKOFF, LAST_BACKOFF = 0.2, 5.0
MAX_EVENT = 4 << 20
"""Bytes of one event: about 15 000 pods."""

OnChange = Callable[[Key], None]
_decoder = msgspec.json.Decoder(FrontendReport)


class StreamError(Exception):
    """What a frontend sent is no stream of reports; the message says why."""


@dataclass(slots=True)
class _Followed:
    """One frontend: where it is, the task that follows it, and what it said last."""

    ip: str
    token: str
    task: asyncio.Task[None] | None = None
    report: FrontendReport | None = None
    expiry: asyncio.TimerHandle | None = None
    trouble: str = ""

    def end(self) -> None:
        if self.task is not None:
            self.task.cancel()
        if self.expiry is not None:
            self.expiry.cancel()


class Streams:
    """Everything that frontends say. All methods belong to one event loop; ``on_change`` is called from it."""

    def __init__(
        self,
        on_change: OnChange,
        *,
        port: int = CONTROL_PORT,
        hold_seconds: float = HOLD_SECONDS,
        silent_seconds: float = SILENT_SECONDS,
        last_backoff: float = LAST_BACKOFF,
    ) -> None:
        """``on_change``: told of a deployment when what :meth:`reports` returns has changed; it must not wait."""
        self._on_change, self._port, self._hold = on_change, port, hold_seconds
        self._silent, self._last_backoff = silent_seconds, last_backoff
        self._followed: dict[Key, dict[str, _Followed]] = {}
        self._session: aiohttp.ClientSession | None = None

    def follow(self, key: Key, frontends: Mapping[str, str], token: str) -> None:
        """Follow exactly these frontends of a deployment: pod uid -> address. ``token``: of its control API.

        With the same values it does nothing. A frontend with another address or token is connected anew.
        """
        known = self._followed.setdefault(key, {})
        for uid in known.keys() - frontends.keys():
            known.pop(uid).end()
        for uid, ip in frontends.items():
            before = known.get(uid)
            if before is not None and (before.ip, before.token) == (ip, token):
                continue
            if before is not None:
                before.end()
            one = known[uid] = _Followed(ip, token)
            one.task = asyncio.create_task(self._run(key, uid, one), name=f"stream of {key[0]}/{key[1]} {uid}")

    def forget(self, key: Key) -> None:
        """Follow nothing of a deployment any more."""
        for one in self._followed.pop(key, {}).values():
            one.end()

    def reports(self, key: Key) -> dict[str, FrontendReport | None]:
        """Pod uid -> its last report; ``None`` while it has not been heard, or not for a while."""
        return {uid: one.report for uid, one in self._followed.get(key, {}).items()}

    async def close(self) -> None:
        """End all connections."""
        tasks = [one.task for known in self._followed.values() for one in known.values() if one.task is not None]
        for key in list(self._followed):
            self.forget(key)
        if tasks:
            await asyncio.wait(tasks)
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _run(self, key: Key, uid: str, one: _Followed) -> None:
        failures = 0
        while True:
            heard = False
            try:
                async with self._connect(one) as answer:
                    if answer.status != 200:
                        raise StreamError(f"answered {answer.status}")
                    events = Events()
                    async for piece in answer.content.iter_any():
                        for data in events.feed(piece):
                            heard = True
                            self._heard(key, one, _decode(data))
                trouble = "the stream ended"
            except (aiohttp.ClientError, OSError, TimeoutError, StreamError) as error:
                trouble = str(error) or type(error).__name__
            except Exception as error:
                # A fault of our own, or of a listener, is no reason to be deaf to this frontend for ever.
                trouble = f"{type(error).__name__}: {error}"
                log.exception("%s/%s: following frontend %s at %s failed", *key, uid, one.ip)
            if heard or not one.trouble:
                # Once per loss: an hour of attempts is one line.
                log.info("%s/%s: frontend %s at %s: %s", *key, uid, one.ip, trouble)
            one.trouble = trouble
            if one.report is not None and one.expiry is None:
                one.expiry = asyncio.get_running_loop().call_later(self._hold, self._expire, key, one)
            failures = 1 if heard else failures + 1
            backoff = min(FIRST_BACKOFF * 2 ** min(failures - 1, 10), self._last_backoff)
            await asyncio.sleep(backoff * random.uniform(0.5, 1.0))

    def _connect(self, one: _Followed) -> "aiohttp.client._RequestContextManager":
        if self._session is None:
            # No limit: every frontend has one connection, which lasts.
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, force_close=True),
                timeout=aiohttp.ClientTimeout(total=None, connect=CONNECT_SECONDS, sock_read=self._silent),
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        host = f"[{one.ip}]" if ":" in one.ip else one.ip
        url = f"http://{host}:{self._port}/control/stream"
        # The token goes nowhere but to the pod.
        return self._session.get(url, headers={"authorization": f"Bearer {one.token}"}, allow_redirects=False)

    def _heard(self, key: Key, one: _Followed, report: FrontendReport) -> None:
        if one.expiry is not None:
            one.expiry.cancel()
            one.expiry = None
        if report != one.report:
            one.report = report
            self._on_change(key)

    def _expire(self, key: Key, one: _Followed) -> None:
        one.report = one.expiry = None
        self._on_change(key)


class Events:
    """Reads server-sent events out of a byte stream, at most :data:`MAX_EVENT` bytes each; comments are dropped."""

    def __init__(self, limit: int = MAX_EVENT) -> None:
        self._limit = limit
        self._buffer = bytearray()

    def feed(self, piece: bytes) -> list[bytes]:
        """Return the data of every event that ``piece`` completes. Raises :class:`StreamError` for a too long one."""
        self._buffer += piece
        *whole, rest = self._buffer.split(b"\n\n")
        self._buffer = rest
        if any(len(part) > self._limit for part in (*whole, rest)):
            raise StreamError(f"an event of more than {self._limit} bytes")
        found = (b"\n".join(_data(line) for line in part.split(b"\n") if line.startswith(b"data:")) for part in whole)
        return [data for data in found if data]


def _data(line: bytes | bytearray) -> bytes:
    return bytes(line[5:].removeprefix(b" "))


def _decode(data: bytes) -> FrontendReport:
    try:
        return _decoder.decode(data)
    except msgspec.DecodeError as error:
        raise StreamError(f"no report: {error}") from error
