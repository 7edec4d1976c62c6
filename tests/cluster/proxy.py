"""A proxy before the API server that answers as a server in trouble does."""

import asyncio
import json
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import aiohttp
from aiohttp import web
from cluster.controlplane import ControlPlane

HOP_BY_HOP = frozenset({"connection", "content-length", "host", "keep-alive", "te", "transfer-encoding", "upgrade"})


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault in the server's place. ``after``: the server carried out the request before, but its answer is lost."""

    status: int
    reason: str
    after: bool = False
    headers: Mapping[str, str] = field(default_factory=dict)

    def response(self) -> web.Response:
        body = {
            "kind": "Status",
            "apiVersion": "v1",
            "status": "Failure",
            "reason": self.reason,
            "message": f"injected: {self.reason}",
            "code": self.status,
        }
        return web.json_response(body, status=self.status, headers=self.headers)


CONFLICT = Fault(409, "Conflict")
THROTTLED = Fault(429, "TooManyRequests", headers={"Retry-After": "1"})
BROKEN = Fault(500, "InternalError")
BROKEN_AFTER = Fault(500, "InternalError", after=True)

Decide = Callable[[str, str], Fault | None]
"""Method and path -> what goes wrong."""


def nothing(method: str, path: str) -> Fault | None:
    """Let every request through."""
    return None


class Proxy:
    """Made by :func:`proxy`. ``faults`` and ``watch_seconds`` may be changed at any time, from any thread."""

    def __init__(self, plane: ControlPlane) -> None:
        self.faults: Decide = nothing
        self.watch_seconds: float | None = None
        """How long a watch lives until it receives that its version has expired; ``None``: as long as the server's."""
        self.injected = 0
        """Answers that were not the server's."""
        self.expired = 0
        """Watches that received it."""
        self.url = ""
        self._plane = plane
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(self._serve()), name="proxy")

    def start(self) -> None:
        """Listen on a free port."""
        self._thread.start()
        self._started.wait(10)

    def close(self) -> None:
        """Break every connection and end."""
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        self._loop.close()

    async def _serve(self) -> None:
        context = ssl.create_default_context(cafile=str(self._plane.ca))
        connector = aiohttp.TCPConnector(ssl=context, limit=0)
        timeout = aiohttp.ClientTimeout(total=None, connect=10)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False) as session:

            async def handle(request: web.Request) -> web.StreamResponse:
                return await self._handle(request, session)

            app = web.Application(client_max_size=2**24)
            app.router.add_route("*", "/{path:.*}", handle)
            runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
            await runner.setup()
            site = web.TCPSite(runner, self._plane.address, 0)
            await site.start()
            host, port = runner.addresses[0][:2]
            self.url = f"http://{host}:{port}"
            self._started.set()
            await self._stop.wait()
            await runner.cleanup()

    async def _handle(self, request: web.Request, session: aiohttp.ClientSession) -> web.StreamResponse:
        fault = self.faults(request.method, request.path)
        if fault is not None:
            self.injected += 1
            if not fault.after:
                return fault.response()
        headers = {name: value for name, value in request.headers.items() if name.lower() not in HOP_BY_HOP}
        url = f"{self._plane.url}{request.raw_path}"
        try:
            async with session.request(
                request.method, url, headers=headers, data=await request.read() or None
            ) as answer:
                if fault is not None:
                    await answer.read()
                    return fault.response()
                return await self._relay(request, answer)
        except (aiohttp.ClientError, OSError):
            return BROKEN.response()  # the server is away

    async def _relay(self, request: web.Request, answer: aiohttp.ClientResponse) -> web.StreamResponse:
        headers = {name: value for name, value in answer.headers.items() if name.lower() not in HOP_BY_HOP}
        response = web.StreamResponse(status=answer.status, headers=headers)
        watch = "watch" in request.query
        await response.prepare(request)
        rest = b""
        with suppress(ConnectionResetError):
            try:
                async with asyncio.timeout(self.watch_seconds if watch else None):
                    async for chunk in answer.content.iter_any():
                        # Whole lines only: no server tells that a watch expired in the middle of an event.
                        lines, end, rest = (rest + chunk).rpartition(b"\n") if watch else (b"", chunk, b"")
                        await response.write(lines + end)
                    await response.write(rest)
            except TimeoutError:
                self.expired += 1
                gone = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "Expired", "code": 410}
                event = {"type": "ERROR", "object": {**gone, "message": "too old resource version"}}
                await response.write(json.dumps(event).encode() + b"\n")
            await response.write_eof()
        return response


@contextmanager
def proxy(plane: ControlPlane) -> Iterator[Proxy]:
    """Run a proxy until the block ends."""
    made = Proxy(plane)
    made.start()
    try:
        yield made
    finally:
        made.close()
