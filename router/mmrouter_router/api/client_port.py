"""The app of the port for clients (8000). The routes of requests for engines bypass the framework."""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from mmrouter_lib.engines.base.request_fields import RESPONSES
from mmrouter_router.core.errors import RequestError
from mmrouter_router.core.request_ids import NAME_HEADER, answered_name
from mmrouter_router.http.client_channel import Client, Message, Receive, Scope, Send
from mmrouter_router.http.hot_request import HotRequest
from mmrouter_router.http.server import Shutdown
from mmrouter_router.intake.api_key_auth import Tenants

PORT: Final = 8000
MODELS, HEALTH, READY, PING = "/v1/models", "/health", "/ready", "/ping"
READ: Final = ["GET", "HEAD"]  # methods of a route that reads


class Answering(Protocol):
    """The handler of the hot routes, by ASGI or with a client's own connection."""

    tenants: Tenants

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None: ...

    async def answer(self, client: Client) -> None: ...


@dataclass(frozen=True)
class About:
    """What the cold routes tell: the model list, releases, and whether an engine can take a request."""

    models: Callable[[], list[dict[str, Any]]]
    versions: Callable[[], dict[str, str]]
    serves: Callable[[], bool]


def client_app(
    handler: Answering,
    hot: Iterable[str],
    count: Callable[[str, str], None],
    shutdown: Shutdown,
    ready: Callable[[], bool],
    about: About,
    responses: Sequence[Route] = (),
) -> Any:
    """Return the ASGI app for clients; ``hot``: the handler's paths. ``count``: gets path and status of other answers.
    ``responses``: the routes of stored responses.

    The hot routes bypass the framework, whose overhead exceeds that of a routing decision.
    """
    hot = frozenset(hot)
    fallback = _public_app(handler.tenants, ready, about, hot, responses)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if shutdown.draining:
            send = shutdown.closing(send)
        if scope["type"] == "http":
            scope = {**scope, "path": _without_slash(scope["path"])}
        if scope["type"] == "http" and scope["path"] in hot:
            await handler(scope, receive, send)
        else:
            await fallback(scope, receive, _counting(count, scope, _naming(scope, send)))

    async def serve_hot(client: HotRequest) -> None:
        if shutdown.draining:
            client.keep_alive = False
        client.path = _without_slash(client.path)
        await handler.answer(client)

    raw_paths = [each for path in hot for each in (path.encode(), f"{path}/".encode())]
    app.hot = dict.fromkeys(raw_paths, serve_hot)  # type: ignore[attr-defined] # read by ClientConnection
    return app


def _without_slash(path: str) -> str:
    """Return a path without the slash at its end: a redirect would make some clients send no body."""
    return path.removesuffix("/") or path


def _public_app(
    tenants: Tenants, ready: Callable[[], bool], about: About, hot: Collection[str], responses: Sequence[Route]
) -> Starlette:
    async def no_route(request: Request, error: Exception) -> Response:
        method, path = request.method, request.url.path
        if getattr(error, "status_code", 404) != 405:
            # A client's base URL often lacks /v1, or has it twice.
            near = path.removeprefix("/v1") if path.startswith("/v1/v1/") else f"/v1{path}"
            return await error_response(
                request, RequestError.not_found(method, path, near if near in hot or near == MODELS else "")
            )
        allowed = getattr(error, "headers", None) or {}
        methods = sorted(allowed.get("Allow", ", ".join(READ)).split(", "))
        return await error_response(request, RequestError.method_not_allowed(method, path, methods))

    async def models(request: Request) -> Response:
        tenants.authenticate(request.scope["headers"])
        return JSONResponse({"object": "list", "data": about.models()})

    async def one_model(request: Request) -> Response:
        tenants.authenticate(request.scope["headers"])
        name: str = request.path_params["name"]
        served = next((model for model in about.models() if model["id"] == name), None)
        if served is None:
            raise RequestError.unknown_model(name)
        return JSONResponse(served)

    async def version(request: Request) -> Response:
        tenants.authenticate(request.scope["headers"])
        return JSONResponse(about.versions())

    async def health(_: Request) -> Response:
        return Response(status_code=200 if ready() else 503)

    async def can_serve(_: Request) -> Response:
        return Response(status_code=200 if ready() and about.serves() else 503)

    routes = [
        Route(MODELS, models, methods=READ),
        Route(f"{MODELS}/{{name:path}}", one_model, methods=READ),
        Route("/version", version, methods=READ),
        Route(PING, health, methods=[*READ, "POST"]),
        Route(HEALTH, health, methods=READ),
        Route(READY, can_serve, methods=READ),
        *responses,
    ]
    handlers: Any = {RequestError: error_response, 404: no_route, 405: no_route}
    return Starlette(routes=routes, exception_handlers=handlers)


async def error_response(_: Request, error: Exception) -> Response:
    """Return a :class:`RequestError` in OpenAI's shape."""
    assert isinstance(error, RequestError)
    return Response(error.to_body(), error.status, headers=error.headers, media_type="application/json")


def _counting(count: Callable[[str, str], None], scope: Scope, send: Send) -> Send:
    """Return ``send`` that counts the answer. Unknown paths count as ``other``, to bound the label."""
    path = scope.get("path", "")
    if path in (HEALTH, READY, PING):
        return send  # polled by load balancers

    async def send_counted(message: Message) -> None:
        if message["type"] == "http.response.start":
            stored = f"{RESPONSES}/ID" if path.startswith(f"{RESPONSES}/") else "other"
            label = MODELS if path == MODELS or path.startswith(f"{MODELS}/") else stored
            count(label, str(message["status"]))
        await send(message)

    return send_counted


def _naming(scope: Scope, send: Send) -> Send:
    """Return ``send`` that adds the request's name to the answer."""

    async def send_named(message: Message) -> None:
        if message["type"] == "http.response.start":
            name = (NAME_HEADER, answered_name(scope.get("headers", ())))
            message = {**message, "headers": [*message.get("headers", ()), name]}
        await send(message)

    return send_named
