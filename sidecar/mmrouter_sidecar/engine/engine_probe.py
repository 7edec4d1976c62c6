"""Poll the engine over HTTP for health, version, load and block size, and read the metadata of its model folder."""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any

import aiohttp

from mmrouter_lib import model_folder as metadata
from mmrouter_lib.engines import adapter
from mmrouter_lib.engines.base.adapter import MODELS_PATH, context_length, lora_adapters
from mmrouter_lib.engines.base.passed_routes import ROUTES_PATH, served_routes
from mmrouter_lib.tls_context import EngineTrust
from mmrouter_sidecar.feed.relay import EventRelay
from mmrouter_sidecar.metrics import Metrics
from mmrouter_sidecar.settings import Settings

log = logging.getLogger("mmrouter.sidecar")

PERIOD = 0.5  # seconds between health checks of an engine that is not up
LOAD_PERIOD = 1.0
TIMEOUT = aiohttp.ClientTimeout(total=2.0)
SLOW = aiohttp.ClientTimeout(total=10.0)  # timeout of requests that are sent once per engine start
HEAVY_SECONDS = 5.0
"""A health check with a longer timeout is work for the engine: an SGLang encoder encodes an image for it.

See docs/engine-facts/sglang.md#encoder-disaggregation.
"""
HEAVY_PERIOD = 10.0  # seconds between such health checks while the engine is up
UNSEEN = "down"  # reason of the epoch that begins when an engine without events goes down
MAX_FAILURES = 3  # unanswered health checks in a row before an engine counts as down: a busy one may miss one
RECONNECT_SECONDS = 0.5
CONNECT_SECONDS = 2.0


class EngineProbe:
    """Polls one engine and reports changes to the relay."""

    def __init__(self, settings: Settings, relay: EventRelay, metrics: Metrics) -> None:
        self._settings, self._relay, self._metrics = settings, relay, metrics
        folder = settings.engine_ca_dir
        self._trust = None if folder is None else EngineTrust(folder, settings.engine_name)
        scheme = "http" if self._trust is None else "https"
        self._base = f"{scheme}://{settings.pod_ip}:{settings.ports.engine}"
        self._refused = ""
        self._failures = 0
        self._adapter = adapter(settings.engine)
        self._path = settings.health_path or self._adapter.health_path
        heavy = settings.health_seconds > HEAVY_SECONDS
        self._period = HEAVY_PERIOD if heavy else 0.0
        self._timeout = aiohttp.ClientTimeout(total=settings.health_seconds) if heavy else TIMEOUT

    async def run(self) -> None:
        loop, checked = asyncio.get_running_loop(), 0.0
        key = self._settings.engine_key
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        async with aiohttp.ClientSession(self._base, headers=headers, timeout=TIMEOUT) as session:
            await self._learn_model()
            while True:
                if self._relay.facts.state != "up" or loop.time() - checked >= self._period:
                    await self._check_health(session)
                    checked = loop.time()
                up = self._relay.facts.state == "up"
                self._metrics.up.set(up)
                if up:
                    await self._load(session)
                else:
                    self._metrics.load.clear()
                await asyncio.sleep(LOAD_PERIOD if up else PERIOD)

    async def _check_health(self, session: aiohttp.ClientSession) -> None:
        epoch = self._relay.epoch
        healthy = await self._healthy(session)
        if self._relay.epoch != epoch or (healthy and self._relay.facts.cut_off):
            return  # the engine ended meanwhile: the answer is the old one's
        state = self._relay.facts.state
        if healthy:
            self._failures = 0
            if state != "up" or not self._relay.facts.version:  # it may have been too busy to answer
                facts = await self._get_info(session)
                await self._learn_model()
                if self._relay.epoch == epoch:
                    self._relay.update_facts(state="up", **facts)
            return
        self._failures += 1
        if state == "up" and (healthy is False or self._failures >= MAX_FAILURES):
            if not self._settings.publishes:
                self._relay.engine_ended(UNSEEN)  # a restart in between would go unnoticed
            self._relay.update_facts(state="down")

    async def _healthy(self, session: aiohttp.ClientSession) -> bool | None:
        """Return true: it serves; false: it reports that it does not; ``None``: no answer."""
        healthy = None
        if self._trust is not None:
            self._trust.reload()
        try:
            async with session.get(self._path, timeout=self._timeout, **self._tls()) as answer:
                healthy, self._refused = answer.status == 200, ""
        except aiohttp.ClientSSLError as error:
            if str(error) != self._refused:
                self._refused = str(error)
                log.error("the sidecar refuses the engine's certificate: %s", error)
        except (aiohttp.ClientError, TimeoutError, OSError):
            pass
        if not healthy:
            self._metrics.probes.labels(self._path).inc()
        return healthy

    def _tls(self) -> dict[str, Any]:
        return {} if self._trust is None else {"ssl": self._trust.context, "server_hostname": self._trust.name}

    async def _get_info(self, session: aiohttp.ClientSession) -> dict[str, Any]:
        """Return what an engine that came up says; may be heavy (docs/engine-facts/sglang.md#http-endpoints)."""
        paths = self._adapter.info_paths
        info = self._adapter.parse_info([await self._json(session, path) for path in paths])
        if info is None:
            return {}
        if info.version and not info.publishes:
            log.error("the engine publishes no KV events according to %s", paths[0])
        block_size = {} if info.block_size is None else {"block_size": info.block_size}
        self._compare_device(info.device)
        described = {"version": info.version, "identity": info.facts, "device": info.device, "devices": info.devices}
        openapi, models = [await self._json(session, path) for path in (ROUTES_PATH, MODELS_PATH)]
        described |= {"routes": served_routes(openapi), "context_length": context_length(models)}
        if self._adapter.names_adapters(info.version):
            described["adapters"] = lora_adapters(models)
        return {**described, **block_size}

    async def _json(self, session: aiohttp.ClientSession, path: str) -> dict[str, Any]:
        try:
            async with session.get(path, timeout=SLOW, **self._tls()) as answer:
                answer.raise_for_status()
                value = await answer.json(content_type=None)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
            self._metrics.probes.labels(path).inc()
            return {}
        return value if isinstance(value, dict) else {}

    async def _load(self, session: aiohttp.ClientSession) -> None:
        try:
            async with session.get("/metrics", **self._tls()) as answer:
                answer.raise_for_status()
                text = await answer.text(errors="replace")
        except (aiohttp.ClientError, TimeoutError, OSError):
            self._metrics.probes.labels("/metrics").inc()
            return
        ranks = self._adapter.parse_load(text)
        self._metrics.load.update(text, ranks, self._adapter.parse_tokens(text))
        for rank, load in ranks.items():
            self._relay.load(rank, load.running, load.waiting, load.kv_usage)
        if (size := self._adapter.parse_block_size(text)) is not None:
            self._relay.update_facts(block_size=size)
        if self._settings.metrics_show_cpu and self._relay.facts.device != "cpu" and self._adapter.shows_cpu(text):
            self._compare_device("cpu")
            self._relay.update_facts(device="cpu")

    def _compare_device(self, device: str) -> None:
        if device and self._settings.device not in ("", device):
            log.error("the engine computes on %s, and its pool asks for %s", device, self._settings.device)

    async def _learn_model(self) -> None:
        """Read the metadata files of the mounted volume, or else those that the engine downloaded."""
        settings = self._settings
        folder, revision = settings.model_dir, settings.revision
        try:
            if not folder.is_dir():
                downloaded = metadata.hub_folder(settings.hub_dir, settings.model, settings.revision)
                if downloaded is None:
                    return
                folder, revision = downloaded
            digests = await asyncio.to_thread(metadata.digests, folder)
        except OSError as error:
            log.warning("the model's metadata files cannot be read: %s", error)
            return
        self._relay.update_facts(digests=digests, revision=revision)


async def watch_listener(ip: str, port: int, ended: Callable[[], None]) -> None:
    """Call ``ended`` whenever the server that listens at an address has gone; runs until cancelled.

    For an engine that publishes no events, such as an encoder: nothing else shows a restart within a poll period, and
    what it held would still count as present. The connection is idle. A server may close it, or one of several server
    processes may end, so ``ended`` is called only if a new connection is refused. On a port with
    TLS the connection makes no handshake, so the server closes it after a minute.
    """
    connection: asyncio.StreamWriter | None = None
    try:
        while True:
            try:
                async with asyncio.timeout(CONNECT_SECONDS):
                    reader, writer = await asyncio.open_connection(ip, port)
            except OSError:  # a timeout is one
                if connection is not None:
                    connection = None
                    ended()
                await asyncio.sleep(RECONNECT_SECONDS)
                continue
            if connection is not None:
                await asyncio.sleep(RECONNECT_SECONDS)  # do not reconnect in a tight loop
            connection = writer
            with contextlib.suppress(OSError):
                while await reader.read(1024):
                    pass
            connection.close()
    finally:
        if connection is not None:
            connection.close()
