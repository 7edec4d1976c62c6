"""Run a simulated engine as a process: load the model, serve HTTP, and drain on SIGTERM."""

import asyncio
import contextlib
import logging
import sys
from types import FrameType

import uvicorn
import uvloop
import zmq
from starlette.applications import Starlette

from mmrouter_sim import model
from mmrouter_sim.engine import SimulatedEngine
from mmrouter_sim.settings import Settings

log = logging.getLogger("mmrouter_sim")


class _Server(uvicorn.Server):
    """Drains the engine before it stops; meanwhile the port stays open and ``/health`` answers 200.

    See docs/engine-facts/vllm.md#drain.
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


def _application(engine: SimulatedEngine) -> Starlette:
    # Load only the engine that is simulated.
    if engine.settings.engine == "sglang":
        from mmrouter_sim.sglang import app as sglang  # noqa: PLC0415

        return sglang.build(engine)
    from mmrouter_sim.vllm import app as vllm  # noqa: PLC0415

    return vllm.build(engine)


async def serve(engine: SimulatedEngine) -> None:
    """Serve until a signal ends it. Raises ``zmq.ZMQError`` if an event address is in use."""
    settings = engine.settings
    config = uvicorn.Config(
        _application(engine),
        host=settings.host,
        port=settings.port,
        log_config=None,
        access_log=False,
        server_header=False,
        headers=[("server", "mmrouter-sim")],
        timeout_graceful_shutdown=2,
        timeout_keep_alive=75,
    )
    server = _Server(config, engine)
    stepping = asyncio.create_task(engine.run())
    serving = asyncio.create_task(server.serve())
    try:
        # The ranks run for ever: if they end, they failed, and the process must end too.
        await asyncio.wait((stepping, serving), return_when=asyncio.FIRST_COMPLETED)
        if stepping.done():
            stepping.result()
        await serving
    finally:
        stepping.cancel()
        serving.cancel()
        await asyncio.gather(stepping, serving, return_exceptions=True)


def run(settings: Settings) -> int:
    """Run an engine's ``serve`` and return its exit status."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s", stream=sys.stdout)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    try:
        folder = model.find_folder(settings.model, settings.revision)
        loaded = model.load(settings.model, folder, chat_template=settings.chat_template, processor=settings.processor)
        engine = SimulatedEngine(settings, loaded)
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
