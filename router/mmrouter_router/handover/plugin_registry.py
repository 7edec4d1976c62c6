"""Status of the hand-over plugins of engines and renderers, polled when a server is new and at intervals."""

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from mmrouter_lib.engines.base.launch import HTTP_PORT
from mmrouter_lib.engines.vllm.handover import STATUS_PATH, HandoverError, Status, read_status
from mmrouter_router.http.upstream import Upstream, UpstreamError

log = logging.getLogger("mmrouter.handover")

STEP_SECONDS = 1.0
REPEAT_SECONDS = 15.0
ANSWER_SECONDS = 2.0
MAX_ANSWER = 64 << 10
NO_PLUGIN = Status(0, "engine", enabled=False, reason="absent")
"""Status of a server without the plugin."""


@dataclass(frozen=True, slots=True)
class PluginServer:
    """One engine or renderer. ``id`` changes with a restart, where a restart is visible."""

    id: str
    name: str
    ip: str


class PluginRegistry:
    """Polls the plugins and keeps their last status."""

    def __init__(
        self,
        upstream: Upstream,
        engine_key: str,
        servers: Callable[[], Iterable[PluginServer]],
        clock: Callable[[], float],
    ) -> None:
        self._upstream, self._servers, self._clock = upstream, servers, clock
        self._headers = {"authorization": f"Bearer {engine_key}", "accept-encoding": "identity"}
        self._polled: dict[str, tuple[float, Status]] = {}

    def status(self, server: str) -> Status | None:
        """Return the last status of a server's plugin, ``None`` before its first answer."""
        polled = self._polled.get(server)
        return polled[1] if polled is not None else None

    async def run(self) -> None:
        """Poll servers that are due; ends only by cancellation."""
        while True:
            await self.poll()
            await asyncio.sleep(STEP_SECONDS)

    async def poll(self) -> None:
        """Poll all servers that are due, in parallel."""
        servers = {server.id: server for server in self._servers()}
        self._polled = {server: polled for server, polled in self._polled.items() if server in servers}
        await asyncio.gather(*(self._poll(server) for server in servers.values() if self._due(server)))

    def _due(self, server: PluginServer) -> bool:
        polled = self._polled.get(server.id)
        return polled is None or self._clock() - polled[0] >= REPEAT_SECONDS

    async def _poll(self, server: PluginServer) -> None:
        before = self.status(server.id)
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                answer = await self._upstream.request(server.ip, HTTP_PORT, "GET", STATUS_PATH, self._headers)
                try:
                    raw = await answer.read(MAX_ANSWER)
                finally:
                    answer.close()
            status = read_status(raw) if answer.status == 200 else NO_PLUGIN
        except (UpstreamError, TimeoutError):
            return  # down or busy: the last status stays
        except HandoverError as error:
            log.warning("%s: %s", server.name, error)
            status = NO_PLUGIN
        self._polled[server.id] = (self._clock(), status)
        if before != status:
            open_ways = [way for way, why in status.ways.items() if not why] if status.enabled else []
            log.info("%s: plugin: %s", server.name, ", ".join(open_ways) or status.reason or "no way is open")
