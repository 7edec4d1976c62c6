"""Images that a renderer processes and an engine takes before the chat names them (docs/transfer.md)."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import orjson

from mmrouter_lib.engines.base.launch import HTTP_PORT
from mmrouter_lib.engines.vllm.handover import (
    ITEMS_PATH,
    RELEASE_PATH,
    RENDER_PATH,
    HandoverError,
    Rendered,
    Taken,
    items_request,
    read_items,
    read_render,
    release_request,
    render_request,
)
from mmrouter_lib.engines.vllm.handover import Way as Processed
from mmrouter_lib.engines.vllm.renderer import RenderError
from mmrouter_router.handover.ways import Fallback
from mmrouter_router.http.upstream import Upstream, UpstreamError

log = logging.getLogger("mmrouter.handover")

RENDER_SECONDS: Final = 20.0
ITEMS_SECONDS: Final = 4.0
RELEASE_SECONDS: Final = 5.0
OFFER_SECONDS: Final = 4.0
"""Lifetime of an offer, which the engine takes at once; it also bounds what a killed renderer leaves."""
HELD_SECONDS: Final = 60.0
"""How long an engine keeps an image until the chat names it."""
INLINE_BYTES: Final = 1 << 20
"""The largest processed image sent inline: it passes twice, and base64 adds a third."""
MAX_ANSWER: Final = 64 << 20


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
            request = render_request(chat, ways=ways, seconds=OFFER_SECONDS, images=images, inline_bytes=INLINE_BYTES)
            rendered = await self._render(renderer, orjson.dumps(request))
        except _PluginError as error:
            log.info("renderer %s: %s", renderer, error)
            outcome.failed = "renderer"
            outcome.fallbacks = {name: [Fallback(way, f"renderer_{error.reason}") for way in ways] for name in images}
            return outcome
        outcome.others = [Fallback(way, reason) for way, reason in rendered.fell]
        try:
            await self._offer(engine, rendered, ways, images, outcome)
        finally:
            self._release(renderer, rendered.lease)
        return outcome

    async def _render(self, renderer: str, body: bytes) -> Rendered:
        raw = await self._ask(renderer, RENDER_PATH, body, RENDER_SECONDS)
        try:
            return read_render(raw)
        except (HandoverError, RenderError) as error:
            raise _PluginError("unusable", str(error)) from error

    async def _offer(
        self, engine: str, rendered: Rendered, ways: Sequence[Processed], images: Sequence[str], outcome: Outcome
    ) -> None:
        taken = Taken(frozenset(), {})
        failed = ""
        if rendered.offers:
            try:
                body = items_request(rendered.offers, seconds=HELD_SECONDS)
                taken = read_items(await self._ask(engine, ITEMS_PATH, body, ITEMS_SECONDS))
            except _PluginError as error:
                failed = f"engine_{error.reason}"
            except HandoverError as error:
                failed = "engine_unusable"
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

    def _release(self, renderer: str, lease: str) -> None:
        """End an offer in the background; an offer that is not released expires."""
        task = asyncio.create_task(self._released(renderer, lease), name="release")
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)

    async def _released(self, renderer: str, lease: str) -> None:
        try:
            await self._ask(renderer, RELEASE_PATH, orjson.dumps(release_request(lease)), RELEASE_SECONDS)
        except _PluginError as error:
            log.info("renderer %s: not released: %s", renderer, error)

    async def _ask(self, host: str, path: str, body: bytes, seconds: float) -> bytes:
        try:
            async with asyncio.timeout(seconds):
                answer = await self._upstream.request(host, HTTP_PORT, "POST", path, self._headers, body)
                try:
                    raw = await answer.read(MAX_ANSWER)
                finally:
                    answer.close()
        except TimeoutError as error:
            raise _PluginError("timeout", f"no answer within {seconds:g} s") from error
        except UpstreamError as error:
            raise _PluginError("lost", str(error)) from error
        if answer.status >= 300:
            raise _PluginError("refused", f"answered {answer.status}: {raw[:200].decode(errors='replace')}")
        return raw
