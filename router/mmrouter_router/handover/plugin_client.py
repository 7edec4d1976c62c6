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

from mmrouter_lib.engines.base.launch import HTTP_PORT
from mmrouter_lib.engines.vllm import plugin_api as wire
from mmrouter_lib.engines.vllm.plugin_api import Way as Processed
from mmrouter_lib.engines.vllm.stage_requests import RenderError
from mmrouter_router.handover.ways import Fallback
from mmrouter_router.http.upstream import Upstream, UpstreamError

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
        self._upstream, self._servers, self._clock = upstream, servers, clock
        self._headers = {"authorization": f"Bearer {engine_key}", "accept-encoding": "identity"}
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
            async with asyncio.timeout(ANSWER_SECONDS):
                address = (server.ip, HTTP_PORT)
                code, raw = await self._upstream.ask(address, "GET", wire.STATUS_PATH, self._headers, limit=MAX_STATUS)
            status = wire.read_status(raw) if code == 200 else NO_PLUGIN
        except (UpstreamError, TimeoutError):
            return  # down or busy: the last status stays
        except wire.HandoverError as error:
            log.warning("%s: %s", server.name, error)
            status = NO_PLUGIN
        self._polled[server.id] = (self._clock(), status)
        if before != status:
            open_ways = [way for way, why in status.ways.items() if not why] if status.enabled else []
            log.info("%s: plugin: %s", server.name, ", ".join(open_ways) or status.reason or "no way is open")


class _PluginError(Exception):
    """A plugin did not answer as needed; ``reason`` is a metric label."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


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
        self._upstream = upstream
        self._headers = {
            "authorization": f"Bearer {engine_key}",
            "content-type": "application/json",
            "accept-encoding": "identity",
        }
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
            rendered = await self._ask(renderer, wire.RENDER_PATH, body, RENDER_SECONDS, wire.read_render)
        except _PluginError as error:
            log.info("renderer %s: %s", renderer, error)
            outcome.failed = "renderer"
            outcome.fallbacks = {name: [Fallback(way, f"renderer_{error.reason}") for way in ways] for name in images}
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
                taken = await self._ask(engine, wire.ITEMS_PATH, body, ITEMS_SECONDS, wire.read_items)
            except _PluginError as error:
                failed = f"engine_{error.reason}"
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
            await self._ask(renderer, wire.RELEASE_PATH, body, RELEASE_SECONDS, bytes)
        except _PluginError as error:
            log.info("renderer %s: not released: %s", renderer, error)

    async def _ask(self, host: str, path: str, body: bytes, seconds: float, read: Callable[[bytes], T]) -> T:
        try:
            async with asyncio.timeout(seconds):
                address = (host, HTTP_PORT)
                status, raw = await self._upstream.ask(address, "POST", path, self._headers, body, limit=MAX_ANSWER)
        except TimeoutError as error:
            raise _PluginError("timeout", f"no answer within {seconds:g} s") from error
        except UpstreamError as error:
            raise _PluginError("lost", str(error)) from error
        if status >= 300:
            raise _PluginError("refused", f"answered {status}: {raw[:200].decode(errors='replace')}")
        try:
            return read(raw)
        except (wire.HandoverError, RenderError) as error:
            raise _PluginError("unusable", str(error)) from error
