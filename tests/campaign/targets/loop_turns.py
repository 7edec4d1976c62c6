"""Bodies of any allowed size against a router: no single turn of its event loop takes long.

A turn is what the loop runs between two looks at its sockets; all other clients wait for it. It is measured as CPU time
of the loop's thread, so other threads and processes do not count.
"""

import asyncio
import http.client
import random
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self, TypeVar
from unittest.mock import patch

import orjson
import uvloop
from campaign.target import BrokenPropertyError, Target
from unit.router.rig import HTTP_PORT, PORT, LoopbackServer, loopback
from unit.router.router_rig import heard, member, router
from unit.router.test_hostile_bodies import BODIES

from mmrouter_router.__main__ import shorten_collections
from mmrouter_router.api import chat
from mmrouter_router.core.worker_threads import INLINE_BYTES
from mmrouter_router.explain.decisions import DecisionLog
from mmrouter_router.fleet.membership import Membership

T = TypeVar("T")
LARGEST = 64 << 20  # `frontend.maxRequestBytes` by default
CHUNK = 1 << 16
TRACED_TOKENS = 500_000  # of all decisions in the router's log
TURN_S = 0.02
STEPS = 1_000_000
"""Steps of an empty loop; a turn may take as long as they do where that is longer than :data:`TURN_S`."""
ATTEMPTS = 3
"""How often a body is sent until no turn is too long: what a body causes comes again, what the machine causes does not.
"""


class Engine(BaseHTTPRequestHandler):
    """Reads a request and answers it with an empty object."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_: object) -> None:
        pass


class LoopTurns(Target):
    """An input: a kind of body and its size, and ``chunked`` for one whose length is not announced."""

    name = "loop_turns"
    short = 5

    def seeds(self) -> list[bytes]:
        sizes = (INLINE_BYTES // 2, 1 << 20)
        return [f"{kind}:{size}{how}".encode() for kind in BODIES for size in sizes for how in ("", ":chunked")]

    def draw(self, source: random.Random, kept: Sequence[bytes]) -> bytes:
        how = source.choice(("", ":chunked"))
        return f"{source.choice(sorted(BODIES))}:{int(2 ** source.uniform(10, 26))}{how}".encode()

    def __enter__(self) -> Self:
        warnings.filterwarnings("ignore", module=r"PIL\.")  # as a router does
        self._engine = ThreadingHTTPServer((loopback(), HTTP_PORT), Engine)
        threading.Thread(target=self._engine.serve_forever, daemon=True).start()
        started: Future[None] = Future()
        self._thread = threading.Thread(target=lambda: uvloop.run(self._serve(started)))
        self._thread.start()
        started.result()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join()
        self._engine.shutdown()
        self._engine.server_close()

    async def _serve(self, started: "Future[None]") -> None:
        self._loop, self._ended, self._measured = asyncio.get_running_loop(), asyncio.Event(), False
        try:
            async with AsyncExitStack() as stack:
                # A log that is full early, so that growth of the process is not the log that fills.
                stack.enter_context(patch.object(chat, "DecisionLog", partial(DecisionLog, tokens=TRACED_TOKENS)))
                made = await stack.enter_async_context(router())
                made.apply_membership(Membership((member(ip=str(self._engine.server_address[0])),)))
                heard(made, "uid-w0")
                shorten_collections()
                self.ip = (await stack.enter_async_context(LoopbackServer(made.client_app()))).ip
                started.set_result(None)
                await self._ended.wait()
        except BaseException as error:
            if not started.done():
                started.set_exception(error)
            raise

    def check(self, data: bytes) -> str:
        self.spent_s = 0.0  # the longest turn, not what it takes to write the body
        kind, _, rest = data.decode(errors="replace").partition(":")
        size, _, how = rest.partition(":")
        if kind not in BODIES or not size.isdigit() or how not in ("", "chunked"):
            return "no body"
        path, body = BODIES[kind]
        raw = orjson.dumps(body(min(int(size), LARGEST)))
        if len(raw) > LARGEST:
            return "too large"
        for _ in range(ATTEMPTS):
            status, longest, floor = self._send(path, raw, chunked=bool(how))
            self.spent_s = longest
            if longest <= max(TURN_S, floor):
                return f"{kind} {status}"
        raise BrokenPropertyError(f"a turn of the loop took {1e3 * longest:.0f} ms of CPU time for {data.decode()}")

    def _send(self, path: str, raw: bytes, *, chunked: bool) -> tuple[int, float, float]:
        """Send a body; return the status of its answer, the longest turn, and the time of :data:`STEPS`."""
        self._on_loop(self._begin)
        client = http.client.HTTPConnection(self.ip, PORT, timeout=300)
        if chunked:
            pieces = (raw[at : at + CHUNK] for at in range(0, len(raw), CHUNK))
            client.request("POST", path, pieces, {"transfer-encoding": "chunked"}, encode_chunked=True)
        else:
            client.request("POST", path, raw)
        status = client.getresponse().status
        client.close()
        return status, *self._on_loop(self._end)

    def _on_loop(self, function: Callable[[], T]) -> T:
        """Call a function in the loop's thread and return its result."""
        result: Future[T] = Future()
        self._loop.call_soon_threadsafe(lambda: result.set_result(function()))
        return result.result()

    def _begin(self) -> None:
        self._longest, self._measured, self._before = 0.0, True, time.thread_time()
        self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        if not self._measured:
            return
        now = time.thread_time()
        self._longest, self._before = max(self._longest, now - self._before), now
        self._loop.call_soon(self._turn)

    def _end(self) -> tuple[float, float]:
        """Return the longest turn, and the time of :data:`STEPS`, in seconds."""
        self._measured, began = False, time.thread_time()
        for _ in range(STEPS):
            pass
        return self._longest, time.thread_time() - began
