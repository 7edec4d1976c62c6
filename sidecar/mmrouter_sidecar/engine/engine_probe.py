"""What the engine says of itself over HTTP: health, version, load, block size; and what its model folder holds."""

import asyncio
import logging
from typing import Any

import aiohttp

from mmrouter_lib import metadata_digests as metadata
from mmrouter_lib.engines import adapter
from mmrouter_sidecar.feed.relay import Relay
from mmrouter_sidecar.metrics import Metrics
from mmrouter_sidecar.settings import Settings

log = logging.getLogger("mmrouter.sidecar")

PERIOD = 0.5
"""Seconds between looks at an engine that is not up yet; one that is up is asked for its load every second."""
LOAD_PERIOD = 1.0
TIMEOUT = aiohttp.ClientTimeout(total=2.0)
SLOW = aiohttp.ClientTimeout(total=10.0)
"""For what an engine is asked once."""
HEAVY_SECONDS = 5.0
"""From so long an answer on, a question counts as work for the engine..."""
HEAVY_PERIOD = 10.0
"""... and is asked only so often while it is up: an SGLang encoder encodes an image for it.

See docs/engine-facts/sglang.md#encoder-disaggregation.
"""
UNSEEN = "down"
"""Reason of the epoch that begins when an engine goes down whose end no connection tells."""
PATIENCE = 3
"""Failed looks in a row at an engine that was up before it counts as down: a busy one may miss one."""


class Probe:
    """Polls one engine and tells the relay what changed."""

    def __init__(self, settings: Settings, relay: Relay, metrics: Metrics) -> None:
        self._settings, self._relay, self._metrics = settings, relay, metrics
        self._base = f"http://{settings.pod_ip}:{settings.ports.engine}"
        self._failures = 0
        self._adapter = adapter(settings.engine)
        self._path = settings.health_path or self._adapter.health_path
        heavy = settings.health_seconds > HEAVY_SECONDS
        self._period = HEAVY_PERIOD if heavy else 0.0
        self._patience = aiohttp.ClientTimeout(total=settings.health_seconds) if heavy else TIMEOUT

    async def run(self) -> None:
        """Poll until cancelled."""
        loop, looked = asyncio.get_running_loop(), 0.0
        key = self._settings.engine_key
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        async with aiohttp.ClientSession(self._base, headers=headers, timeout=TIMEOUT) as session:
            await self._learn_model()
            while True:
                if self._relay.facts.state != "up" or loop.time() - looked >= self._period:
                    await self._look(session)
                    looked = loop.time()
                up = self._relay.facts.state == "up"
                self._metrics.up.set(up)
                if up:
                    await self._load(session)
                else:
                    self._metrics.load.lost()
                await asyncio.sleep(LOAD_PERIOD if up else PERIOD)

    async def _look(self, session: aiohttp.ClientSession) -> None:
        epoch = self._relay.epoch
        healthy = await self._healthy(session)
        if self._relay.epoch != epoch or (healthy and self._relay.facts.cut_off):
            return  # the engine ended, and the answer is not about the next one
        state = self._relay.facts.state
        if healthy:
            self._failures = 0
            if state != "up" or not self._relay.facts.version:  # it may have been too busy to say
                said = await self._ask(session)
                await self._learn_model()
                if self._relay.epoch == epoch:
                    self._relay.learned(state="up", **said)
            return
        self._failures += 1
        if state == "up" and (healthy is False or self._failures >= PATIENCE):
            if not self._settings.publishes:
                self._relay.engine_ended(UNSEEN)  # what was proved of it was perhaps another engine
            self._relay.learned(state="down")

    async def _healthy(self, session: aiohttp.ClientSession) -> bool | None:
        """True: it serves. False: it says that it does not. None: no answer."""
        path = self._path
        try:
            async with session.get(path, timeout=self._patience) as answer:
                if answer.status == 200:
                    return True
        except (aiohttp.ClientError, TimeoutError, OSError):
            self._metrics.probes.labels(path).inc()
            return None
        self._metrics.probes.labels(path).inc()
        return False

    async def _ask(self, session: aiohttp.ClientSession) -> dict[str, Any]:
        """Return what an engine that came up says of itself, once: its answers may be heavy.

        See docs/engine-facts/sglang.md#http-endpoints.
        """
        paths = self._adapter.info_paths
        info = self._adapter.parse_info([await self._json(session, path) for path in paths])
        if info is None:
            return {}
        if info.version and not info.publishes:
            log.error("the engine publishes no KV events according to %s", paths[0])
        block_size = {} if info.block_size is None else {"block_size": info.block_size}
        return {"version": info.version, "identity": info.facts, **block_size}

    async def _json(self, session: aiohttp.ClientSession, path: str) -> dict[str, Any]:
        try:
            async with session.get(path, timeout=SLOW) as answer:
                answer.raise_for_status()
                said = await answer.json(content_type=None)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
            self._metrics.probes.labels(path).inc()
            return {}
        return said if isinstance(said, dict) else {}

    async def _load(self, session: aiohttp.ClientSession) -> None:
        try:
            async with session.get("/metrics") as answer:
                answer.raise_for_status()
                text = await answer.text(errors="replace")
        except (aiohttp.ClientError, TimeoutError, OSError):
            self._metrics.probes.labels("/metrics").inc()
            return
        ranks = self._adapter.parse_load(text)
        self._metrics.load.saw(text, ranks)
        for rank, load in ranks.items():
            self._relay.load(rank, load.running, load.waiting, load.kv_usage)
        size = self._adapter.parse_block_size(text)
        if size is not None:
            self._relay.learned(block_size=size)

    async def _learn_model(self) -> None:
        """Read the metadata files: those of the mounted volume, else those that the engine downloaded."""
        settings = self._settings
        folder, revision = settings.model_dir, settings.revision
        try:
            if not folder.is_dir():
                found = metadata.hub_folder(settings.hub_dir, settings.model, settings.revision)
                if found is None:
                    return
                folder, revision = found
            digests = await asyncio.to_thread(metadata.digests, folder)
        except OSError as error:
            log.warning("the model's metadata files cannot be read: %s", error)
            return
        self._relay.learned(digests=digests, revision=revision)
