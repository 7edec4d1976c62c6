"""One running sidecar: which part starts when, when changes are flushed, and in what order everything stops."""

import asyncio
import contextlib
import logging
from collections.abc import Iterator

import zmq.asyncio

from mmrouter_lib import feed
from mmrouter_lib.engines.sglang.encoder_requests import Encoder
from mmrouter_lib.feed import SharedDirectory
from mmrouter_sidecar import http
from mmrouter_sidecar.engine import presence
from mmrouter_sidecar.engine.encoder_proxy import Encoders
from mmrouter_sidecar.engine.engine_probe import UNSEEN, Probe
from mmrouter_sidecar.engine.sockets import Engine
from mmrouter_sidecar.feed.publisher import Publisher
from mmrouter_sidecar.feed.relay import Relay
from mmrouter_sidecar.metrics import Counted, Metrics
from mmrouter_sidecar.settings import Settings
from mmrouter_sidecar.shared_memory.janitor import Janitor

log = logging.getLogger("mmrouter.sidecar")

FLUSH_SECONDS = 0.005
"""Changes of this long travel together; a change after a silence travels at once."""
BEAT_SECONDS = 0.5
LINGER_MS = 200


class Sidecar:
    """Everything of one process. ``run`` serves until ``stop`` is called."""

    def __init__(self, settings: Settings) -> None:
        self.metrics = Metrics()
        self._context = zmq.asyncio.Context()
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self.publisher = Publisher(settings, self._context, self.metrics)
        self.relay = Relay(settings, self.metrics, self.publisher.publish)
        self.metrics.watch(self._counted)
        self.engine = Engine(settings, self.relay, self._context, self.metrics, self._settle)
        self._probe = Probe(settings, self.relay, self.metrics)
        self._janitor = Janitor(settings, self.metrics, self._filled) if settings.shared_dir is not None else None
        self.encoders = Encoders(self.metrics) if settings.encodes_elsewhere else None
        self._settings = settings
        self._flushed = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self.ready = asyncio.Event()

    def stop(self) -> None:
        """End ``run`` in order."""
        self._stop.set()

    async def run(self) -> None:
        """Serve. Raises ``OSError`` or ``zmq.ZMQError`` when an address cannot be bound."""
        web = http.serving(
            self._settings,
            self.metrics,
            ready=self.ready.is_set,
            drain=lambda: self.relay.learned(draining=True),
            encode=self.encoders.encode if self.encoders is not None else None,
        )
        encoding = self.encoders.open() if self.encoders is not None else contextlib.nullcontext()
        if self._janitor is not None:
            # Before anything answers, so before the kubelet starts the engine: what the dead left is not in its way.
            await self._janitor.begin()
        try:
            async with encoding, web, asyncio.TaskGroup() as tasks:
                working = [
                    tasks.create_task(self.publisher.run(self._answer)),
                    tasks.create_task(self.engine.run()),
                    tasks.create_task(self._probe.run()),
                    tasks.create_task(self._beats()),
                    tasks.create_task(self._boot()),
                    tasks.create_task(self._missing()),
                    *([tasks.create_task(self._janitor.run())] if self._janitor is not None else []),
                ]
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

    async def _boot(self) -> None:
        """Ready means that both ends listen; it does not wait for the engine, which starts only afterwards."""
        await self.publisher.bound.wait()
        await self.engine.bound()
        self.ready.set()
        log.info("ready: worker %s, epoch %d", self.relay.worker, self.relay.epoch)

    async def _missing(self) -> None:
        """Notice the end of an engine whose events do not tell it."""
        if not self._settings.publishes:
            await presence.watch(self._settings.pod_ip, self._settings.ports.engine, self._unseen)

    def _unseen(self) -> None:
        if self.relay.facts.state == "up":
            self.relay.engine_ended(UNSEEN)
            self.relay.learned(state="down")

    def _filled(self, shared: SharedDirectory) -> None:
        self.relay.shared = shared

    def _answer(self, request: feed.Request) -> Iterator[feed.Reply]:
        if not isinstance(request, feed.EncoderAddresses):
            yield from self.relay.answer(request)
        elif self.encoders is None:
            yield feed.Refused(request.id, "this engine asks no encoders")
        else:
            self.encoders.told(request.router, (Encoder(name, ip) for name, ip in request.encoders))
            yield feed.Accepted(request.id)

    def _counted(self) -> Counted:
        ledger = self.relay.ledger
        return Counted(self.relay.batches, ledger.counts, ledger.held, ledger.aside)

    async def _beats(self) -> None:
        while True:
            self.relay.beat()
            await asyncio.sleep(BEAT_SECONDS)

    def _settle(self) -> None:
        """Something may have changed: flush now, or as soon as the last flush is long enough ago."""
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
