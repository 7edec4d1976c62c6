"""Reads the control stream of every frontend (docs/architecture.md), keeps its last report, and sends it the status.

Each frontend has one connection, without polling. An idle router sends a comment regularly, so silence means that it is
gone; the connection is then re-established with growing, random pauses. A report stays valid for a while after its
connection ends, because the state that the readiness gates depend on survives a restart of the router.

The status goes the other way, for the live page: a frontend then needs no right to read its resource.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec
from aiohttp.http_exceptions import LineTooLong

from mmrouter_operator.model.snapshot import FrontendReport, Key

log = logging.getLogger("mmrouter.operator.streams")

CONTROL_PORT = 8001
CONNECT_SECONDS = 5.0
SILENT_SECONDS = 45.0
"""Three intervals of the router's comments."""
HOLD_SECONDS = 30.0
"""How long the last report stays valid after the stream has ended."""
FIRST_BACKOFF, LAST_BACKOFF = 0.2, 5.0
SEND_TIMEOUT = aiohttp.ClientTimeout(total=10.0)
MAX_EVENT = 4 << 20
"""Bytes of one event: about 15 000 pods."""

_decoder = msgspec.json.Decoder(FrontendReport)


class StreamError(Exception):
    """The response of a frontend is not a stream of reports; the message says why."""


@dataclass(slots=True)
class _Frontend:
    """One frontend: its address, the task that reads its stream, and its last report."""

    ip: str
    token: str
    task: asyncio.Task[None] | None = None
    report: FrontendReport | None = None
    expiry: asyncio.TimerHandle | None = None
    trouble: str = ""
    published: asyncio.Event = field(default_factory=asyncio.Event)

    def end(self) -> None:
        if self.task is not None:
            self.task.cancel()
        if self.expiry is not None:
            self.expiry.cancel()


class FrontendStreams:
    """The reports of all frontends. All methods belong to one event loop; ``on_change`` is called from it."""

    def __init__(
        self,
        on_change: Callable[[Key], None],
        *,
        port: int = CONTROL_PORT,
        hold_seconds: float = HOLD_SECONDS,
        silent_seconds: float = SILENT_SECONDS,
        last_backoff: float = LAST_BACKOFF,
    ) -> None:
        """``on_change`` is called with a deployment when the result of :meth:`reports` changes; it must not block."""
        self._on_change, self._port, self._hold = on_change, port, hold_seconds
        self._silent, self._last_backoff = silent_seconds, last_backoff
        self._frontends: dict[Key, dict[str, _Frontend]] = {}
        self._statuses: dict[Key, bytes] = {}
        self._session: aiohttp.ClientSession | None = None

    def follow(self, key: Key, frontends: Mapping[str, str], token: str) -> None:
        """Read the streams of exactly these frontends of a deployment: pod uid -> address.

        ``token`` is that of its control API. A frontend with another address or token is connected again; others stay.
        """
        current = self._frontends.setdefault(key, {})
        for uid in current.keys() - frontends.keys():
            current.pop(uid).end()
        for uid, ip in frontends.items():
            before = current.get(uid)
            if before is not None and (before.ip, before.token) == (ip, token):
                continue
            if before is not None:
                before.end()
            frontend = current[uid] = _Frontend(ip, token)
            frontend.task = asyncio.create_task(
                self._run(key, uid, frontend), name=f"stream of {key[0]}/{key[1]} {uid}"
            )

    def publish(self, key: Key, status: Mapping[str, Any]) -> None:
        """Send a deployment's status to the frontends that are followed, now and after each of their restarts."""
        raw = msgspec.json.encode(status)
        if key in self._frontends and raw != self._statuses.get(key):
            self._statuses[key] = raw
            for frontend in self._frontends[key].values():
                frontend.published.set()

    def forget(self, key: Key) -> None:
        self._statuses.pop(key, None)
        for frontend in self._frontends.pop(key, {}).values():
            frontend.end()

    def reports(self, key: Key) -> dict[str, FrontendReport | None]:
        """Return by pod uid the last report; ``None`` if there is none, or none any more."""
        return {uid: frontend.report for uid, frontend in self._frontends.get(key, {}).items()}

    async def close(self) -> None:
        tasks = [
            frontend.task
            for current in self._frontends.values()
            for frontend in current.values()
            if frontend.task is not None
        ]
        for key in list(self._frontends):
            self.forget(key)
        if tasks:
            await asyncio.wait(tasks)
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _run(self, key: Key, uid: str, frontend: _Frontend) -> None:
        failures = 0
        while True:
            received, sending = False, None
            try:
                async with self._request("GET", frontend, "stream") as answer:
                    if answer.status != 200:
                        raise StreamError(f"answered {answer.status}")
                    sending = asyncio.create_task(self._send_statuses(key, frontend))
                    while event := await answer.content.readuntil(b"\n\n", max_size=MAX_EVENT):
                        if event.startswith(b"data:"):  # the others are comments
                            received = True
                            self._take(key, frontend, _decode(event[5:]))
                trouble = "the stream ended"
            except (aiohttp.ClientError, LineTooLong, OSError, TimeoutError, StreamError) as error:
                trouble = str(error) or type(error).__name__
            except Exception as error:
                # A bug here or in a listener must not end the stream of this frontend for good.
                trouble = f"{type(error).__name__}: {error}"
                log.exception("%s/%s: following frontend %s at %s failed", *key, uid, frontend.ip)
            finally:
                if sending is not None:
                    sending.cancel()
            if received or not frontend.trouble:
                # Log once per loss, not once per attempt.
                log.info("%s/%s: frontend %s at %s: %s", *key, uid, frontend.ip, trouble)
            frontend.trouble = trouble
            if frontend.report is not None and frontend.expiry is None:
                frontend.expiry = asyncio.get_running_loop().call_later(self._hold, self._expire, key, frontend)
            failures = 1 if received else failures + 1
            backoff = min(FIRST_BACKOFF * 2 ** min(failures - 1, 10), self._last_backoff)
            await asyncio.sleep(backoff * random.uniform(0.5, 1.0))

    async def _send_statuses(self, key: Key, frontend: _Frontend) -> None:
        """Send the status now and after changes; a frontend of an older release refuses it, which changes nothing."""
        sent: bytes | None = None
        while True:
            frontend.published.clear()
            raw = self._statuses.get(key)
            if raw is not None and raw != sent:
                try:
                    async with self._request("PUT", frontend, "status", data=raw, timeout=SEND_TIMEOUT):
                        sent = raw
                except (aiohttp.ClientError, OSError, TimeoutError):
                    await asyncio.sleep(self._last_backoff)
                    continue
            await frontend.published.wait()

    def _request(
        self, method: str, frontend: _Frontend, path: str, **options: Any
    ) -> "aiohttp.client._RequestContextManager":
        if self._session is None:
            # No limit: every frontend has one long-lived connection.
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, force_close=True),
                timeout=aiohttp.ClientTimeout(total=None, connect=CONNECT_SECONDS, sock_read=self._silent),
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        host = f"[{frontend.ip}]" if ":" in frontend.ip else frontend.ip
        url, headers = f"http://{host}:{self._port}/control/{path}", {"authorization": f"Bearer {frontend.token}"}
        # Redirects would send the token elsewhere.
        return self._session.request(method, url, headers=headers, allow_redirects=False, **options)

    def _take(self, key: Key, frontend: _Frontend, report: FrontendReport) -> None:
        if frontend.expiry is not None:
            frontend.expiry.cancel()
            frontend.expiry = None
        if report != frontend.report:
            frontend.report = report
            self._on_change(key)

    def _expire(self, key: Key, frontend: _Frontend) -> None:
        frontend.report = frontend.expiry = None
        self._on_change(key)


def _decode(data: bytes) -> FrontendReport:
    try:
        return _decoder.decode(data)
    except msgspec.DecodeError as error:
        raise StreamError(f"not a report: {error}") from error
