"""Build the Starlette application of a simulated engine: routes, API key, error responses, common handlers.

Starlette instead of FastAPI: msgspec parses the bodies, and FastAPI would double the start time of each engine.
"""

import hmac
from collections.abc import Awaitable, Callable, Sequence
from http import HTTPStatus

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from mmrouter_sim.engine import SimulatedEngine
from mmrouter_sim.errors import RequestError, json_response, note_refusal

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

    return Starlette(
        routes=[Route(path, _endpoint(engine, handler), methods=methods) for path, methods, handler in routes],
        middleware=[Middleware(_ApiKey, keys=keys, is_guarded=is_guarded)] if keys else [],
        exception_handlers={RequestError: request_error, HTTPException: http_error, Exception: failure},
    )


def _endpoint(engine: SimulatedEngine, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        return await handler(engine, request)

    return endpoint


class _ApiKey:
    """Middleware that requires an API key as a bearer token on guarded paths."""

    def __init__(self, app: ASGIApp, keys: Sequence[str], is_guarded: Callable[[str], bool]) -> None:
        self._app, self._is_guarded = app, is_guarded
        self._expected = [f"Bearer {key}".encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] != "OPTIONS" and self._is_guarded(scope["path"]):
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not any(hmac.compare_digest(given, expected) for expected in self._expected):
                note_refusal(scope)
                await json_response({"error": "Unauthorized"}, HTTPStatus.UNAUTHORIZED)(scope, receive, send)
                return
        await self._app(scope, receive, send)


async def metrics(engine: SimulatedEngine, _request: Request) -> Response:
    """``/metrics``."""
    return Response(generate_latest(engine.metrics.registry), headers={"content-type": CONTENT_TYPE_LATEST})


async def cache(engine: SimulatedEngine, _request: Request) -> Response:
    """``/sim/cache``: the blocks that each rank holds."""
    return json_response(engine.held())


def models(engine: SimulatedEngine, owner: str, names: Sequence[str], root: str) -> Response:
    """Return the body of ``/v1/models``."""
    rows = [
        {
            "id": name,
            "object": "model",
            "created": engine.started,
            "owned_by": owner,
            "root": root,
            "parent": None,
            "max_model_len": engine.context,
        }
        for name in names
    ]
    return json_response({"object": "list", "data": rows})
