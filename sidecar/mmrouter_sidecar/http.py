"""HTTP servers: health, readiness and metrics on the pod's address; drain hook and encoder proxy on its loopback."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CONTENT_TYPE_PLAIN_0_0_4, generate_latest

from mmrouter_lib.engines.sglang.encoder_requests import PATH
from mmrouter_sidecar.engine.encoder_proxy import MAX_REQUEST_BYTES
from mmrouter_sidecar.metrics import Metrics
from mmrouter_sidecar.settings import Settings


@asynccontextmanager
async def serving(
    settings: Settings,
    metrics: Metrics,
    *,
    ready: Callable[[], bool],
    drain: Callable[[], None],
    encode: Callable[[web.Request], Awaitable[web.Response]] | None = None,
) -> AsyncIterator[None]:
    """Run both servers for the duration of the context. Raises ``OSError`` if an address is in use.

    ``encode`` handles the engine's encode requests, if it has encoders.
    """

    async def healthz(_: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def readyz(_: web.Request) -> web.Response:
        is_ready = ready()
        return web.json_response({"ready": is_ready}, status=200 if is_ready else 503)

    async def exposition(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(metrics.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def engine_exposition(_: web.Request) -> web.Response:
        # Served here, because the engine's own port is open to routers only.
        return web.Response(text=metrics.load.text, headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})

    async def drained(_: web.Request) -> web.Response:
        drain()
        return web.json_response({"draining": True})

    public, hook = web.Application(), web.Application(client_max_size=MAX_REQUEST_BYTES)
    public.add_routes([web.get("/healthz", healthz), web.get("/readyz", readyz), web.get("/metrics", exposition)])
    public.add_routes([web.get("/engine/metrics", engine_exposition)])
    # A preStop hook sends GET; POST is for people.
    hook.add_routes([web.get("/drain", drained), web.post("/drain", drained)])
    if encode is not None:
        hook.add_routes([web.post(PATH, encode)])
    servers = ((public, settings.pod_ip, settings.ports.health), (hook, settings.loopback, settings.ports.hook))
    async with AsyncExitStack() as stack:
        for app, host, port in servers:
            # Cancel the handler when the engine gives a request up, to free its image.
            runner = web.AppRunner(app, access_log=None, handle_signals=False, handler_cancellation=True)
            stack.push_async_callback(runner.cleanup)
            await runner.setup()
            await web.TCPSite(runner, host, port).start()
        yield
