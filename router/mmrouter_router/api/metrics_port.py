"""The app of the port for metrics and health (9090)."""

from collections.abc import Callable
from typing import Final

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

PORT: Final = 9090


def metrics_app(registry: CollectorRegistry, ready: Callable[[], bool]) -> Starlette:
    async def alive(_: Request) -> Response:
        return Response("ok")

    async def is_ready(_: Request) -> Response:
        state = ready()
        return JSONResponse({"ready": state}, 200 if state else 503)

    async def exposition(_: Request) -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    return Starlette(routes=[Route("/healthz", alive), Route("/readyz", is_ready), Route("/metrics", exposition)])
