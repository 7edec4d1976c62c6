"""Run a simulated engine as a process: load the model, serve HTTP, and drain on SIGTERM."""

import asyncio
import contextlib
import hmac
import logging
import re
import sys
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from http import HTTPStatus
from importlib import import_module
from pathlib import Path
from types import FrameType

import uvicorn
import uvloop
import zmq
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mmrouter_sim import model
from mmrouter_sim.engine import SimulatedEngine, simulated
from mmrouter_sim.errors import RequestError, json_response
from mmrouter_sim.settings import Settings

REFRESH_SECONDS = 0.2
MAX_BODY = 96 << 20
"""Bytes of a request, above the 64 MiB that routers forward by default. The engines themselves have no limit."""
MAX_VALUES = 2 << 20
"""JSON values of a request: an empty list of three characters takes 64 bytes."""
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
log, access = logging.getLogger("mmrouter_sim"), logging.getLogger("mmrouter_sim.access")


class _Server(uvicorn.Server):
    """Drains the engine before it stops; meanwhile the port stays open and ``/health`` answers 200. See
    docs/engine-facts/vllm.md#drain.
    """

    def __init__(self, config: uvicorn.Config, engine: SimulatedEngine) -> None:
        super().__init__(config)
        self._engine = engine
        self._draining: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._draining is not None:  # a second signal: stop at once
            self.should_exit = self.force_exit = True
            return
        self._draining = asyncio.get_running_loop().create_task(self._drain())

    async def _drain(self) -> None:
        log.info("draining for up to %g s", self._engine.settings.shutdown_seconds)
        await self._engine.drain()
        self.should_exit = True


async def serve(engine: SimulatedEngine) -> None:
    """Serve until a signal ends it. Raises ``zmq.ZMQError`` if an event address is in use."""
    settings = engine.settings
    config = uvicorn.Config(
        import_module(f"mmrouter_sim.{settings.engine}.app").build(engine),  # only the engine that is simulated
        host=settings.host,
        port=settings.port,
        log_config=None,
        access_log=False,
        server_header=False,
        headers=[("server", "mmrouter-sim")],
        timeout_graceful_shutdown=2,
        timeout_keep_alive=75,
        ssl_certfile=settings.ssl_certfile,
        ssl_keyfile=settings.ssl_keyfile,
    )
    config.load()
    server = _Server(config, engine)
    stepping = asyncio.create_task(engine.run())
    serving = asyncio.create_task(server.serve())
    refreshing = asyncio.create_task(_refresh(config, enabled=settings.enable_ssl_refresh))
    try:
        # The ranks run for ever: if they end, they failed, and the process must end too.
        await asyncio.wait((stepping, serving), return_when=asyncio.FIRST_COMPLETED)
        if stepping.done():
            stepping.result()
        await serving
    finally:
        for task in (stepping, serving, refreshing):
            task.cancel()
        await asyncio.gather(stepping, serving, refreshing, return_exceptions=True)


async def _refresh(config: uvicorn.Config, *, enabled: bool) -> None:
    """Load certificate and key when one of their files changes, as the engines do.

    They watch inodes: after a file was replaced they see no further change (docs/engine-facts/vllm.md#tls).
    """
    if not enabled or config.ssl is None or config.ssl_certfile is None or config.ssl_keyfile is None:
        return
    files = [Path(config.ssl_certfile), Path(config.ssl_keyfile)]
    seen = [file.stat() for file in files]
    while True:
        await asyncio.sleep(REFRESH_SECONDS)
        with contextlib.suppress(OSError):
            now = [file.stat() for file in files]
            if [each.st_mtime_ns for each in now] == [each.st_mtime_ns for each in seen]:
                continue
            log.info("Reloading SSL certificate chain")
            config.ssl.load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
            if [each.st_ino for each in now] != [each.st_ino for each in seen]:
                return
            seen = now


def run(settings: Settings) -> int:
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s", stream=sys.stdout)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    try:
        folder = model.find_folder(settings.model, settings.revision)
        template, processor = settings.chat_template, settings.processor
        loaded = model.load(settings.model, folder, chat_template=template, processor=processor, engine=settings.engine)
        engine = simulated(settings, loaded)
    except (ValueError, OSError) as error:
        log.error("cannot start: %s", error)
        return 1
    where = f"on {settings.host}:{settings.port}"
    if engine.runners:
        limits = engine.runners[0].scheduler.limits
        what = f"{settings.ranks} rank(s) of {limits.blocks} blocks of {limits.block_size} tokens"
    else:
        what = "encodes only"
    log.info("simulated %s: %s, context %d, %s, %s", settings.engine, settings.model, engine.context, what, where)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            uvloop.run(serve(engine))
    except (zmq.ZMQError, ValueError) as error:
        log.error("event sockets: %s", error)
        return 1
    return 0


Handler = Callable[[SimulatedEngine, Request], Awaitable[Response]]
RouteRow = tuple[str, list[str], Handler]
"""Path, methods, handler."""


def build_app(
    engine: SimulatedEngine,
    routes: Sequence[RouteRow],
    *,
    keys: Sequence[str],
    is_guarded: Callable[[str], bool],
    error_response: Callable[[RequestError], Response],
    http_error_response: Callable[[HTTPException], Response],
) -> Starlette:
    """Return the application. Paths that are guarded need one of ``keys`` as a bearer token, if there are any."""

    async def request_error(_request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestError)
        return error_response(error)

    async def http_error(_request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return http_error_response(error)

    async def failure(_request: Request, error: Exception) -> Response:
        """Answer a bug of the simulator; the framework logs it."""
        status = HTTPStatus.INTERNAL_SERVER_ERROR
        return error_response(RequestError(f"{type(error).__name__}: {error}", status=status))

    async def openapi(_engine: SimulatedEngine, _request: Request) -> Response:
        return json_response(
            {"paths": {path: {method.lower(): {} for method in methods} for path, methods, _ in routes}}
        )

    listed = [*routes, ("/openapi.json", ["GET"], openapi)]
    return Starlette(
        routes=[Route(path, partial(handler, engine), methods=methods) for path, methods, handler in listed],
        middleware=[
            *([Middleware(_ApiKey, keys=keys, is_guarded=is_guarded)] if keys else []),
            Middleware(_BoundedBody, error_response=error_response),
        ],
        exception_handlers={RequestError: request_error, HTTPException: http_error, Exception: failure},
    )


class _ApiKey:
    """Middleware that requires an API key as a bearer token on guarded paths."""

    def __init__(self, app: ASGIApp, keys: Sequence[str], is_guarded: Callable[[str], bool]) -> None:
        self._app, self._is_guarded = app, is_guarded
        self._expected = [f"Bearer {key}".encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] != "OPTIONS" and self._is_guarded(scope["path"]):
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not any(hmac.compare_digest(given, expected) for expected in self._expected):
                # The engine's server writes this line; vLLM keeps no other trace, because its own count of requests is
                # taken behind the check of the key. Other requests have no line here.
                host, port = scope.get("client") or ("", 0)
                access.info('%s:%d - "%s %s HTTP/1.1" 401 Unauthorized', host, port, scope["method"], scope["path"])
                await json_response({"error": "Unauthorized"}, HTTPStatus.UNAUTHORIZED)(scope, receive, send)
                return
        await self._app(scope, receive, send)


class _BoundedBody:
    """Middleware that answers 413 to a body of more bytes or values than memory is planned for."""

    def __init__(self, app: ASGIApp, error_response: Callable[[RequestError], Response]) -> None:
        self._app, self._error_response = app, error_response

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length, body, more = int(dict(scope["headers"]).get(b"content-length", 0)), bytearray(), True
        while more and max(length, len(body)) <= MAX_BODY:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            more = message.get("more_body", False)
        if max(length, len(body)) > MAX_BODY or _values(body) > MAX_VALUES:
            why = f"The simulator takes requests of at most {MAX_BODY} bytes and {MAX_VALUES} JSON values."
            error = RequestError(why, status=413, kind=HTTPStatus.REQUEST_ENTITY_TOO_LARGE.phrase)
            await self._error_response(error)(scope, receive, send)
            return
        whole: list[Message] = [{"type": "http.request", "body": bytes(body), "more_body": False}]
        del body

        async def again() -> Message:
            return whole.pop() if whole else await receive()

        await self._app(scope, again, send)


def _values(body: bytearray) -> int:
    """Return at least the number of a body's JSON values, without those marks that are part of a text."""

    def marks(text: bytes | bytearray) -> int:
        return sum(text.count(mark) for mark in (b",", b"[", b"{"))

    rough = marks(body)
    return rough if rough <= MAX_VALUES else marks(_STRING.sub(b"", body))


async def metrics(engine: SimulatedEngine, _request: Request) -> Response:
    return Response(generate_latest(engine.metrics.registry), headers={"content-type": CONTENT_TYPE_LATEST})


async def cache(engine: SimulatedEngine, _request: Request) -> Response:
    """``/sim/cache``: the blocks that each rank holds."""
    return json_response(engine.held())


def models(engine: SimulatedEngine, owner: str, names: Sequence[str], root: str) -> Response:
    """Return the body of ``/v1/models``: the model, then its LoRA adapters."""
    served = [(name, root, None, engine.context) for name in names]
    loaded = [(adapter.name, adapter.path, names[0], None) for adapter in engine.settings.adapters]
    rows = [
        {
            "id": name,
            "object": "model",
            "created": engine.started,
            "owned_by": owner,
            "root": where,
            "parent": parent,
            "max_model_len": context,
        }
        for name, where, parent, context in (*served, *loaded)
    ]
    return json_response({"object": "list", "data": rows})
