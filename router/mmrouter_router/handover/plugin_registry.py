"""What the plugins of engines and renderers say of themselves: each is asked when it is new, and again now and then."""

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from mmrouter_lib.engines.base.launch import HTTP_PORT
from mmrouter_lib.engines.vllm.handover import STATUS_PATH, HandoverError, Status, read_status
from mmrouter_router.http.upstream import Upstream, UpstreamError

log = logging.getLogger("mmrouter.handover")

STEP_SECONDS = 1.0
AGAIN_SECONDS = 15.0
ANSWER_SECONDS = 2.0
MAX_ANSWER = 64 << 10
NOBODY = Status(0, "engine", enabled=False, reason="absent")
"""What a server without the plugin would say."""


@dataclass(frozen=True, slots=True)
class Server:
    """One engine or renderer. ``id`` is another one after a restart, where that can be seen."""

    id: str
    name: str
    ip: str


class Plugins:
    """Asks who is there, and knows what they said."""

    def __init__(
        self, upstream: Upstream, engine_key: str, servers: Callable[[], Iterable[Server]], clock: Callable[[], float]
    ) -> None:
        self._upstream, self._servers, self._clock = upstream, servers, clock
        self._headers = {"authorization": f"Bearer {engine_key}", "accept-encoding": "identity"}
        self._said: dict[str, tuple[float, Status]] = {}

    def status(self, server: str) -> Status | None:
        """Return what the plugin of a server said last, ``None`` where it has not answered."""
        said = self._said.get(server)
        return said[1] if said is not None else None

    def forget(self, server: str) -> None:
        """Ask a server anew: what it does is not what it said."""
        self._said.pop(server, None)

    async def run(self) -> None:
        """Ask whoever is due; ends only by cancellation."""
        while True:
            await self.ask_all()
            await asyncio.sleep(STEP_SECONDS)

    async def ask_all(self) -> None:
        """Ask everybody who is due, at once."""
        servers = list(self._servers())
        here = {server.id for server in servers}
        self._said = {server: said for server, said in self._said.items() if server in here}
        due = [server for server in servers if self._due(server)]
        await asyncio.gather(*(self._ask(server) for server in due))

    def _due(self, server: Server) -> bool:
        said = self._said.get(server.id)
        return said is None or self._clock() - said[0] >= AGAIN_SECONDS

    async def _ask(self, server: Server) -> None:
        before = self.status(server.id)
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                answer = await self._upstream.request(server.ip, HTTP_PORT, "GET", STATUS_PATH, self._headers)
                try:
                    raw = await answer.read(MAX_ANSWER)
                finally:
                    answer.close()
            said = read_status(raw) if answer.status == 200 else NOBODY
        except (UpstreamError, TimeoutError):
            return  # it is not up, or busy: what it said stands
        except HandoverError as error:
            log.warning("%s: %s", server.name, error)
            said = NOBODY
        self._said[server.id] = (self._clock(), said)
        if before != said:
            open_ways = [way for way, why in said.ways.items() if not why] if said.enabled else []
            log.info("%s: plugin: %s", server.name, ", ".join(open_ways) or said.reason or "no way is open")
