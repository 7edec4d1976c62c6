"""The apps of the ports for clients (8000) and for metrics and health (9090). Module ``control`` has the third."""

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from mmrouter_router.api.chat import FORWARDED, Chat
from mmrouter_router.core.errors import RequestError
from mmrouter_router.http.client_channel import Message, Receive, Scope, Send
from mmrouter_router.http.hot_request import HotRequest
from mmrouter_router.http.server import Shutdown
from mmrouter_router.intake.tenant_keys import Tenants
from mmrouter_router.request.engine_request import CHAT
from mmrouter_router.telemetry.metrics import Metrics

CLIENT_PORT, METRICS_PORT = 8000, 9090
MODELS, HEALTH = "/v1/models", "/health"


def client_app(
    chat: Chat, metrics: Metrics, shutdown: Shutdown, ready: Callable[[], bool], model: dict[str, Any]
) -> Any:
    """Return the ASGI app for clients; ``model``: the entry of the model list.

    The hot routes bypass the framework, whose overhead exceeds that of a routing decision.
    """
    fallback = _public_app(chat.tenants, ready, model)
    hot = frozenset((CHAT, *FORWARDED))

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if shutdown.draining:
            send = shutdown.closing(send)
        if scope["type"] == "http" and scope["path"] in hot:
            await chat(scope, receive, send)
        else:
            await fallback(scope, receive, _counting(metrics, scope, send))

    async def serve_hot(client: HotRequest) -> None:
        if shutdown.draining:
            client.keep_alive = False
        await chat.answer(client)

    app.hot = {path.encode(): serve_hot for path in hot}  # type: ignore[attr-defined] # read by ClientConnection
    return app


def metrics_app(metrics: Metrics, ready: Callable[[], bool]) -> FastAPI:
    """Return the app for the kubelet and for Prometheus."""
    app = FastAPI(title="mmrouter metrics", openapi_url=None)

    @app.get("/healthz")
    async def alive() -> Response:
        return Response("ok")

    @app.get("/readyz")
    async def is_ready() -> Response:
        state = ready()
        return JSONResponse({"ready": state}, 200 if state else 503)

    @app.get("/metrics")
    async def exposition() -> Response:
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    return app


def _public_app(tenants: Tenants, ready: Callable[[], bool], model: dict[str, Any]) -> FastAPI:
    app = FastAPI(title="mmrouter", openapi_url=None)

    @app.exception_handler(RequestError)
    async def refused(_: Request, error: RequestError) -> Response:
        return Response(error.to_body(), error.status, headers=error.headers, media_type="application/json")

    @app.exception_handler(404)
    async def unknown_path(request: Request, _: Exception) -> Response:
        return await refused(request, RequestError.not_found(request.method, request.url.path))

    @app.exception_handler(405)
    async def wrong_method(request: Request, _: Exception) -> Response:
        return await refused(request, RequestError.method_not_allowed(request.method, request.url.path))

    @app.get(MODELS)
    async def models(request: Request) -> dict[str, Any]:
        tenants.authenticate(request.scope["headers"])
        return {"object": "list", "data": [model]}

    @app.get(HEALTH)
    async def health() -> Response:
        return Response(status_code=200 if ready() else 503)

    return app


def _counting(metrics: Metrics, scope: Scope, send: Send) -> Send:
    """Return ``send`` that counts the answer. Unknown paths count as ``other``, to bound the label."""
    path = scope.get("path", "")
    if path == HEALTH:
        return send  # polled by load balancers

    async def send_counted(message: Message) -> None:
        if message["type"] == "http.response.start":
            label = path if path == MODELS else "other"
            metrics.requests.labels(label, str(message["status"])).inc()
        await send(message)

    return send_counted
