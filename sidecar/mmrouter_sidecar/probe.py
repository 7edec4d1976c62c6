"""What the engine says of itself over HTTP: health, version, load, block size; and what its model folder holds."""

import asyncio
import logging

import aiohttp

from mmrouter import metadata
from mmrouter.engines import vllm
from mmrouter_sidecar.metrics import Metrics
from mmrouter_sidecar.relay import Relay
from mmrouter_sidecar.settings import Settings

log = logging.getLogger("mmrouter.sidecar")

PERIOD = 0.5
"""Seconds between looks at an engine that is not up yet; one that is up is asked for its load every second."""
LOAD_PERIOD = 1.0
TIMEOUT = aiohttp.ClientTimeout(total=2.0)
PATIENCE = 3
"""Failed looks in a row at an engine that was up before it counts as down: a busy one may miss one."""


class Probe:
    """Polls one engine and tells the relay what changed."""

    def __init__(self, settings: Settings, relay: Relay, metrics: Metrics) -> None:
        self._settings, self._relay, self._metrics = settings, relay, metrics
        self._base = f"http://{settings.pod_ip}:{settings.ports.engine}"
        self._failures = 0

    async def run(self) -> None:
        """Poll until cancelled."""
        key = self._settings.engine_key
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        async with aiohttp.ClientSession(self._base, headers=headers, timeout=TIMEOUT) as session:
            await self._learn_model()
            while True:
                await self._look(session)
                up = self._relay.facts.state == "up"
                self._metrics.up.set(up)
                if up:
                    await self._load(session)
                await asyncio.sleep(LOAD_PERIOD if up else PERIOD)

    async def _look(self, session: aiohttp.ClientSession) -> None:
        epoch = self._relay.epoch
        healthy = await self._healthy(session)
        if self._relay.epoch != epoch or (healthy and self._relay.facts.cut_off):
            return  # the engine ended, and the answer is not about the next one
        state = self._relay.facts.state
        if healthy:
            self._failures = 0
            if state != "up":
                version = await self._version(session)
                await self._learn_model()
                self._relay.learned(state="up", version=version)
            return
        self._failures += 1
        if state == "up" and (healthy is False or self._failures >= PATIENCE):
            self._relay.learned(state="down")

    async def _healthy(self, session: aiohttp.ClientSession) -> bool | None:
        """True: it serves. False: it says that it does not. None: no answer."""
        try:
            async with session.get("/health") as answer:
                if answer.status == 200:
                    return True
        except (aiohttp.ClientError, TimeoutError, OSError):
            self._metrics.probes.labels("/health").inc()
            return None
        self._metrics.probes.labels("/health").inc()
        return False

    async def _version(self, session: aiohttp.ClientSession) -> str:
        try:
            async with session.get("/version") as answer:
                said = await answer.json(content_type=None)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
            self._metrics.probes.labels("/version").inc()
            return ""
        version = said.get("version") if isinstance(said, dict) else None
        return version if isinstance(version, str) else ""

    async def _load(self, session: aiohttp.ClientSession) -> None:
        try:
            async with session.get("/metrics") as answer:
                answer.raise_for_status()
                text = await answer.text(errors="replace")
        except (aiohttp.ClientError, TimeoutError, OSError):
            self._metrics.probes.labels("/metrics").inc()
            return
        for rank, load in vllm.parse_load(text).items():
            self._relay.load(rank, load.running, load.waiting, load.kv_usage)
        size = vllm.parse_block_size(text)
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
