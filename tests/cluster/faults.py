"""What disturbs an operator: a proxy that answers as an API server in trouble does, and kills in a reconcile."""

import asyncio
import json
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web
from anyio.from_thread import start_blocking_portal
from cluster.controlplane import ControlPlane
from cluster.operators import ACCOUNT, NAMESPACE, install
from cluster.resources import Object, bare, children

HOP_BY_HOP = frozenset({"connection", "content-length", "host", "keep-alive", "te", "transfer-encoding", "upgrade"})


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault in the server's place. ``after``: the server carried out the request before, but its answer is lost."""

    status: int
    reason: str
    after: bool = False
    headers: Mapping[str, str] = field(default_factory=dict)

    def response(self) -> web.Response:
        about = {"reason": self.reason, "message": f"injected: {self.reason}", "code": self.status}
        body = {"kind": "Status", "apiVersion": "v1", "status": "Failure", **about}
        return web.json_response(body, status=self.status, headers=self.headers)


CONFLICT = Fault(409, "Conflict")
THROTTLED = Fault(429, "TooManyRequests", headers={"Retry-After": "1"})
BROKEN = Fault(500, "InternalError")
BROKEN_AFTER = Fault(500, "InternalError", after=True)

Decide = Callable[[str, str], Fault | None]


def nothing(method: str, path: str) -> Fault | None:
    return None


class Proxy:
    """Made by :func:`proxy`. ``faults`` and ``watch_seconds`` may be changed at any time, from any thread."""

    def __init__(self, plane: ControlPlane) -> None:
        self.faults: Decide = nothing
        self.watch_seconds: float | None = None
        """How long a watch lives until it receives that its version has expired; ``None``: as long as the server's."""
        self.injected = 0
        self.expired = 0
        self.url = ""
        self._plane = plane

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        context = ssl.create_default_context(cafile=str(self._plane.ca))
        connector = aiohttp.TCPConnector(ssl=context, limit=0)
        timeout = aiohttp.ClientTimeout(total=None, connect=10)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False) as session:
            app = web.Application(client_max_size=2**24)
            app.router.add_route("*", "/{path:.*}", partial(self._handle, session))
            runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
            await runner.setup()
            site = web.TCPSite(runner, self._plane.address, 0)
            await site.start()
            host, port = runner.addresses[0][:2]
            self.url = f"http://{host}:{port}"
            try:
                yield
            finally:
                await runner.cleanup()

    async def _handle(self, session: aiohttp.ClientSession, request: web.Request) -> web.StreamResponse:
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
    made = Proxy(plane)
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(made.serving()):
        yield made


NEVER = 10**6


class Zygote:
    """Starts operators that kill themselves; see ``zygote.py``. One at a time, each for one namespace."""

    def __init__(self, plane: ControlPlane) -> None:
        install(plane)
        self._plane = plane
        self._kubeconfig = plane.kubeconfig_for(NAMESPACE, ACCOUNT)
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("zygote.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=plane.log_file("zygote").open("ab"),
            text=True,
            start_new_session=True,
        )
        plane.guard.send(f"+{self._process.pid}")

    def run(self, namespace: str, calls: int = NEVER) -> tuple[int, int]:
        """Run an operator until its call number ``calls`` was answered, or until it has reconciled to the end. Returns
        its exit status (0 for the latter) and the number of its calls.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        arguments = [
            *(f"--kubeconfig={self._kubeconfig}", f"--namespace={namespace}", "--identity=mortal"),
            *("--bind=127.0.0.1:0", "--log-format=text"),
            *(f"--lease-namespace={NAMESPACE}", "--lease-duration=2", "--renew-deadline=1.5", "--retry-period=0.3"),
        ]
        self._process.stdin.write(json.dumps({"arguments": arguments, "calls": calls}) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        return answer["status"], answer["calls"]

    def log(self) -> str:
        return self._plane.log_file("zygote").read_text()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(10)


def alike(plane: ControlPlane, namespace: str) -> Object:
    """Return the children of a namespace without what differs between two equal deployments."""
    live = children(plane, namespace)
    found = {f"{kind} {name}": bare(child) for (kind, name), child in live.items() if kind != "Secret"}
    text = json.dumps(found, sort_keys=True)
    # Fingerprints of keys that are made anew for every deployment, and what is made of these.
    for annotation in _of_templates(found):
        text = text.replace(json.dumps(annotation), '"annotation"')
    made: Object = json.loads(text.replace(namespace, "namespace"))
    return made


def unlike(one: Object, other: Object) -> list[str]:
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))


def _of_templates(found: Any) -> Iterator[str]:
    """Return the annotations of all pod templates in it, also of those that are kept as renderings."""
    for name, value in found.items() if isinstance(found, dict) else enumerate(found):
        if name == "template":
            yield from (value.get("metadata", {}).get("annotations") or {}).values()
        if isinstance(value, dict | list):
            yield from _of_templates(value)
