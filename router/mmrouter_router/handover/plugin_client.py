"""Client of the hand-over plugins of engines and renderers (docs/transfer.md).

Their status is polled when a server is new and at intervals; a renderer processes images, which an engine takes before
the chat names them.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import orjson

from mmrouter_lib.engines.vllm import plugin_api as wire
from mmrouter_lib.engines.vllm.plugin_api import Way as Processed
from mmrouter_router.handover.ways import Fallback
from mmrouter_router.http.engine_requests import EngineRequestError, EngineRequests
from mmrouter_router.http.upstream import Upstream

log = logging.getLogger("mmrouter.handover")

T = TypeVar("T")

STEP_SECONDS = 1.0
REPEAT_SECONDS = 15.0
MAX_STATUS = 64 << 10
ANSWER_SECONDS = 2.0
NO_PLUGIN = wire.Status(0, "engine", enabled=False, reason="absent")  # status of a server without the plugin
RENDER_SECONDS: Final = 20.0
ITEMS_SECONDS: Final = 4.0
RELEASE_SECONDS: Final = 5.0
OFFER_SECONDS = 4.0  # lifetime of an offer, which the engine takes at once; it bounds what a killed renderer leaves
HELD_SECONDS: Final = 60.0  # how long an engine keeps an image until the chat names it
INLINE_BYTES: Final = 1 << 20  # the largest processed image sent inline: it passes twice, and base64 adds a third
MAX_ANSWER: Final = 64 << 20


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
        self._ask, self._servers, self._clock = EngineRequests(upstream, engine_key).ask, servers, clock
        self._polled: dict[str, tuple[float, wire.Status]] = {}

    def status(self, server: str) -> wire.Status | None:
        polled = self._polled.get(server)
        return polled[1] if polled is not None else None

    async def run(self) -> None:
        while True:
            await self.poll()
            await asyncio.sleep(STEP_SECONDS)

    async def poll(self) -> None:
        servers = {server.id: server for server in self._servers()}
        self._polled = {server: polled for server, polled in self._polled.items() if server in servers}
        recent = self._clock() - REPEAT_SECONDS
        fresh = {server for server, (at, _) in self._polled.items() if at > recent}
        await asyncio.gather(*(self._poll(server) for name, server in servers.items() if name not in fresh))

    async def _poll(self, server: PluginServer) -> None:
        before = self.status(server.id)
        try:
            status = await self._ask(server.ip, wire.STATUS_PATH, None, wire.read_status, ANSWER_SECONDS, MAX_STATUS)
        except EngineRequestError as error:
            if error.cause in ("lost", "timeout"):
                return  # down or busy: the last status stays
            if error.cause == "unusable":
                log.warning("%s: %s", server.name, error)
            status = NO_PLUGIN
        self._polled[server.id] = (self._clock(), status)
        if before != status:
            open_ways = [way for way, why in status.ways.items() if not why] if status.enabled else []
            log.info("%s: plugin: %s", server.name, ", ".join(open_ways) or status.reason or "no way is open")


@dataclass(slots=True)
class Outcome:
    """Result of a hand-over. ``held``: identity -> way of the images that the engine has; ``fallbacks``: of the others.

    ``others``: ways that the renderer skipped without naming an image. ``failed``: ``renderer`` or ``engine`` where one
    of them did not answer.
    """

    held: dict[str, Processed] = field(default_factory=dict)
    fallbacks: dict[str, list[Fallback]] = field(default_factory=dict)
    others: list[Fallback] = field(default_factory=list)
    failed: str = ""


class ProcessedImages:
    """Client of the plugins of renderers and engines."""

    def __init__(self, upstream: Upstream, engine_key: str) -> None:
        self._ask = EngineRequests(upstream, engine_key).ask
        self._releases: set[asyncio.Task[None]] = set()

    async def hand_over(
        self, renderer: str, engine: str, chat: Mapping[str, Any], ways: Sequence[Processed], images: Sequence[str]
    ) -> Outcome:
        """Hand these images of a chat over; return which of them the engine has. Fails only by cancellation.

        ``renderer`` and ``engine`` are addresses; ``chat`` contains the images so that the renderer can read them.
        """
        outcome = Outcome()
        try:
            request = wire.render_request(
                chat, ways=ways, seconds=OFFER_SECONDS, images=images, inline_bytes=INLINE_BYTES
            )
            body = orjson.dumps(request)
            rendered = await self._ask(renderer, wire.RENDER_PATH, body, wire.read_render, RENDER_SECONDS, MAX_ANSWER)
        except EngineRequestError as error:
            log.info("renderer %s: %s", renderer, error)
            outcome.failed = "renderer"
            outcome.fallbacks = {name: [Fallback(way, f"renderer_{error.cause}") for way in ways] for name in images}
            return outcome
        outcome.others = [Fallback(way, reason) for way, reason in rendered.fell]
        try:
            await self._offer(engine, rendered, ways, images, outcome)
        finally:
            task = asyncio.create_task(self._release(renderer, rendered.lease), name="release")
            self._releases.add(task)
            task.add_done_callback(self._releases.discard)
        return outcome

    async def _offer(
        self, engine: str, rendered: wire.Rendered, ways: Sequence[Processed], images: Sequence[str], outcome: Outcome
    ) -> None:
        taken = wire.Taken(frozenset(), {})
        failed = ""
        if rendered.offers:
            try:
                body = wire.items_request(rendered.offers, seconds=HELD_SECONDS)
                taken = await self._ask(engine, wire.ITEMS_PATH, body, wire.read_items, ITEMS_SECONDS, MAX_ANSWER)
            except EngineRequestError as error:
                failed = f"engine_{error.cause}"
                log.info("engine %s: %s", engine, error)
            outcome.failed = "engine" if failed else ""
        for name in images:
            offer = rendered.offers.get(name)
            if offer is None:
                outcome.fallbacks[name] = [Fallback(ways[-1], rendered.withheld.get(name, "other"))]
            elif name in taken.held:
                outcome.held[name] = offer.way
            else:
                outcome.fallbacks[name] = [Fallback(offer.way, failed or taken.refused.get(name, "other"))]

    async def _release(self, renderer: str, lease: str) -> None:
        """End an offer; one that is not released expires."""
        try:
            body = orjson.dumps(wire.release_request(lease))
            await self._ask(renderer, wire.RELEASE_PATH, body, bytes, RELEASE_SECONDS, MAX_ANSWER)
        except EngineRequestError as error:
            log.info("renderer %s: not released: %s", renderer, error)
