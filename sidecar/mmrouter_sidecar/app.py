"""Wire the parts of the sidecar together, serve their HTTP side, run them until SIGTERM, and stop them in order."""

import asyncio
import contextlib
import gc
import logging
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager

import uvloop
import zmq.asyncio
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CONTENT_TYPE_PLAIN_0_0_4, generate_latest

from mmrouter_lib import feed
from mmrouter_lib.engines.sglang.stage_requests import PATH, Encoder
from mmrouter_lib.feed import SharedDirectory
from mmrouter_lib.feed_keys import CHECK_SECONDS, ROUTER_PUBLIC, SIDECAR_SECRET, KeyWatch
from mmrouter_lib.settings_errors import SettingsError
from mmrouter_lib.tls_context import CertificateError
from mmrouter_sidecar.engine.encoder_proxy import MAX_REQUEST_BYTES, EncoderProxy
from mmrouter_sidecar.engine.engine_probe import UNSEEN, EngineProbe, watch_listener
from mmrouter_sidecar.engine.sockets import EngineSockets
from mmrouter_sidecar.feed.publisher import Publisher
from mmrouter_sidecar.feed.relay import EventRelay
from mmrouter_sidecar.metrics import HotPathCounts, Metrics
from mmrouter_sidecar.settings import Settings, curve_keys, from_json
from mmrouter_sidecar.shared_memory.embedding_files import keep_clean
from mmrouter_sidecar.shared_memory.janitor import Janitor

log = logging.getLogger("mmrouter.sidecar")

FLUSH_SECONDS = 0.005  # changes within this time are published together; a change after a pause is published at once
BEAT_SECONDS = 0.5
LINGER_MS = 200
CONFIGURATION_ERROR = 2  # exit status
GC_THRESHOLD = 10_000  # young objects before a garbage collection: the objects of engine events form no cycles


class Sidecar:
    """All parts of one sidecar process. ``run`` serves until ``stop`` is called."""

    def __init__(self, settings: Settings) -> None:
        self.metrics = Metrics()
        self._context = zmq.asyncio.Context()
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self.publisher = Publisher(settings, self._context, self.metrics)
        self.relay = EventRelay(settings, self.metrics, self.publisher.publish)
        self.metrics.watch(self._hot_path_counts)
        self.engine = EngineSockets(settings, self.relay, self._context, self.metrics, self._flush_soon)
        self._probe = EngineProbe(settings, self.relay, self.metrics)
        self._janitor = Janitor(settings, self.metrics, self._set_shared) if settings.shared_dir is not None else None
        self.encoders = EncoderProxy(self.metrics) if settings.encodes_elsewhere else None
        self._settings = settings
        self._flushed = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self.ready = asyncio.Event()

    def stop(self) -> None:
        self._stop.set()

    async def run(self) -> None:
        """Serve. Raises ``OSError`` or ``zmq.ZMQError`` when an address cannot be bound."""
        encoding = self.encoders.open() if self.encoders is not None else contextlib.nullcontext()
        if self._janitor is not None:
            # Before readiness, so before the kubelet starts the engine: files of dead writers do not take its memory.
            await self._janitor.begin()
        try:
            async with encoding, self._http(), asyncio.TaskGroup() as tasks:
                working = [
                    tasks.create_task(self.publisher.run(self._answer)),
                    tasks.create_task(self.engine.run()),
                    tasks.create_task(self._probe.run()),
                    tasks.create_task(self._beats()),
                    tasks.create_task(self._watch_keys()),
                    tasks.create_task(self._boot()),
                ]
                if not self._settings.publishes:
                    watching = watch_listener(self._settings.pod_ip, self._settings.ports.engine, self._engine_gone)
                    working.append(tasks.create_task(watching))
                if self._janitor is not None:
                    working.append(tasks.create_task(self._janitor.run()))
                if (volume := self._settings.embeddings_dir) is not None:
                    working.append(tasks.create_task(keep_clean(volume, self._settings.embeddings_bytes)))
                await self._stop.wait()
                log.info("stopping")
                self.ready.clear()
                for task in working:
                    task.cancel()
            if self._janitor is not None:
                await self._janitor.end()
        finally:
            if self._timer is not None:
                self._timer.cancel()
            self.relay.close()
            self._context.destroy(linger=LINGER_MS)
            log.info("stopped at seq %d of epoch %d", self.relay.seq, self.relay.epoch)

    @asynccontextmanager
    async def _http(self) -> AsyncIterator[None]:
        """Run both HTTP servers. Raises ``OSError`` if an address is in use."""

        async def healthz(_: web.Request) -> web.Response:
            return web.json_response({"status": "ok"})

        async def readyz(_: web.Request) -> web.Response:
            is_ready = self.ready.is_set()
            return web.json_response({"ready": is_ready}, status=200 if is_ready else 503)

        async def exposition(_: web.Request) -> web.Response:
            body = generate_latest(self.metrics.registry)
            return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})

        async def engine_exposition(_: web.Request) -> web.Response:
            # Served here, because the engine's own port is open to routers only.
            return web.Response(text=self.metrics.load.text, headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})

        async def drained(_: web.Request) -> web.Response:
            self.relay.update_facts(draining=True)
            return web.json_response({"draining": True})

        settings, public, hook = self._settings, web.Application(), web.Application(client_max_size=MAX_REQUEST_BYTES)
        public.add_routes([web.get("/healthz", healthz), web.get("/readyz", readyz), web.get("/metrics", exposition)])
        public.add_routes([web.get("/engine/metrics", engine_exposition)])
        # A preStop hook sends GET; POST is for people.
        hook.add_routes([web.get("/drain", drained), web.post("/drain", drained)])
        if self.encoders is not None:
            hook.add_routes([web.post(PATH, self.encoders.encode)])
        servers = ((public, settings.pod_ip, settings.ports.health), (hook, settings.loopback, settings.ports.hook))
        async with AsyncExitStack() as stack:
            for app, host, port in servers:
                # Cancel the handler when the engine gives a request up, to free its image.
                runner = web.AppRunner(app, access_log=None, handle_signals=False, handler_cancellation=True)
                stack.push_async_callback(runner.cleanup)
                await runner.setup()
                await web.TCPSite(runner, host, port).start()
            yield

    async def _boot(self) -> None:
        """Become ready once both sides listen; the engine starts only afterwards."""
        await self.publisher.bound.wait()
        await self.engine.bound()
        self.ready.set()
        log.info("ready: worker %s, epoch %d", self.relay.worker, self.relay.epoch)

    def _engine_gone(self) -> None:
        """Notice the end of an engine that publishes no events."""
        if self.relay.facts.state == "up":
            self.relay.engine_ended(UNSEEN)
            self.relay.update_facts(state="down")

    def _set_shared(self, shared: SharedDirectory) -> None:
        self.relay.shared = shared

    def _answer(self, request: feed.Request) -> Iterator[feed.Reply]:
        if not isinstance(request, feed.EncoderAddresses):
            yield from self.relay.answer(request)
        elif self.encoders is None:
            yield feed.Refused(request.id, "this engine uses no encoders")
        else:
            self.encoders.update(request.router, (Encoder(name, ip) for name, ip in request.encoders))
            yield feed.Accepted(request.id)

    def _hot_path_counts(self) -> HotPathCounts:
        ledger = self.relay.ledger
        return HotPathCounts(self.relay.batches, ledger.counts, ledger.held, ledger.aside)

    async def _beats(self) -> None:
        while True:
            self.relay.beat()
            await asyncio.sleep(BEAT_SECONDS)

    async def _watch_keys(self) -> None:
        settings = self._settings
        files = KeyWatch(settings.secrets_dir, settings.identity_key, SIDECAR_SECRET, ROUTER_PUBLIC)
        while True:
            if (changed := files.changed()) is not None:
                try:
                    keys = curve_keys(changed)
                except SettingsError as error:
                    log.error("the feed keeps its present keys: %s", error)
                else:
                    self.relay.feed_keys = keys.fingerprints
                    self.relay.beat()  # before a new key closes the connections
                    self.publisher.use_keys(keys)
            await asyncio.sleep(CHECK_SECONDS)

    def _flush_soon(self) -> None:
        """Flush pending changes now, or once the last flush is FLUSH_SECONDS ago."""
        if self._timer is not None or not self.relay.dirty:
            return
        wait = self._flushed + FLUSH_SECONDS - self._loop.time()
        if wait <= 0:
            self._flush()
        else:
            self._timer = self._loop.call_later(wait, self._flush)

    def _flush(self) -> None:
        self._timer = None
        self._flushed = self._loop.time()
        self.relay.flush()


async def _serve(settings: Settings) -> None:
    sidecar = Sidecar(settings)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, sidecar.stop)
    gc.freeze()  # everything allocated so far lives until the end
    gc.set_threshold(GC_THRESHOLD, *gc.get_threshold()[1:])
    await sidecar.run()


def serve(settings: bytes) -> int:
    """Run with the settings that :mod:`mmrouter_sidecar.settings_loader` printed. Returns the exit status."""
    try:
        uvloop.run(_serve(from_json(settings)))
    except (SettingsError, CertificateError) as error:
        log.error("configuration: %s", error)
        return CONFIGURATION_ERROR
    return 0
