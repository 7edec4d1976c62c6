"""Have a renderer process a chat's images and an engine take them, before the chat names them (docs/transfer.md)."""

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
from mmrouter_router.handover.types import Fall
from mmrouter_router.http.upstream import Upstream, UpstreamError

log = logging.getLogger("mmrouter.handover")

RENDER_SECONDS: Final = 20.0
ITEMS_SECONDS: Final = 4.0
RELEASE_SECONDS: Final = 5.0
OFFER_SECONDS: Final = 4.0
"""How long an offer stands for the engine that is told of it at once; what a killed renderer leaves stands as long."""
HELD_SECONDS: Final = 60.0
"""How long an engine keeps an image for the chat that names it."""
INLINE_BYTES: Final = 1 << 20
"""The largest processed image that travels in the requests: it is there twice, and a third longer."""
MAX_ANSWER: Final = 64 << 20


class _NotAnsweredError(Exception):
    """``reason`` is one of few words."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(slots=True)
class Outcome:
    """What came of it. ``held``: identity -> way of the images that the engine has; ``falls``: of the others."""

    held: dict[str, Processed] = field(default_factory=dict)
    falls: dict[str, list[Fall]] = field(default_factory=dict)
    others: list[Fall] = field(default_factory=list)
    """Ways that a renderer gave up for one image or another without saying which."""
    blamed: str = ""
    """``renderer`` or ``engine`` where one of them did not answer."""


class Processing:
    """Speaks with the plugins of both sides."""

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
        """Return which of these images of a chat an engine has now. Fails only by cancellation.

        ``renderer`` and ``engine`` are addresses, ``chat`` shows its images so that the renderer can read them.
        """
        outcome = Outcome()
        try:
            request = render_request(chat, ways=ways, seconds=OFFER_SECONDS, images=images, inline_bytes=INLINE_BYTES)
            rendered = await self._render(renderer, orjson.dumps(request))
        except _NotAnsweredError as error:
            log.info("renderer %s: %s", renderer, error)
            outcome.blamed = "renderer"
            outcome.falls = {name: [Fall(way, f"renderer_{error.reason}") for way in ways] for name in images}
            return outcome
        outcome.others = [Fall(way, reason) for way, reason in rendered.fell]
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
            raise _NotAnsweredError("unusable", str(error)) from error

    async def _offer(
        self, engine: str, rendered: Rendered, ways: Sequence[Processed], images: Sequence[str], outcome: Outcome
    ) -> None:
        taken = Taken(frozenset(), {})
        failed = ""
        if rendered.offers:
            try:
                body = items_request(rendered.offers, seconds=HELD_SECONDS)
                taken = read_items(await self._ask(engine, ITEMS_PATH, body, ITEMS_SECONDS))
            except _NotAnsweredError as error:
                failed = f"engine_{error.reason}"
            except HandoverError as error:
                failed = "engine_unusable"
                log.info("engine %s: %s", engine, error)
            outcome.blamed = "engine" if failed else ""
        for name in images:
            offer = rendered.offers.get(name)
            if offer is None:
                outcome.falls[name] = [Fall(ways[-1], rendered.withheld.get(name, "other"))]
            elif name in taken.held:
                outcome.held[name] = offer.way
            else:
                outcome.falls[name] = [Fall(offer.way, failed or taken.refused.get(name, "other"))]

    def _release(self, renderer: str, lease: str) -> None:
        """End an offer, beside the request: nobody waits for it, and what is not released ends by itself."""
        task = asyncio.create_task(self._released(renderer, lease), name="release")
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)

    async def _released(self, renderer: str, lease: str) -> None:
        try:
            await self._ask(renderer, RELEASE_PATH, orjson.dumps(release_request(lease)), RELEASE_SECONDS)
        except _NotAnsweredError as error:
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
            raise _NotAnsweredError("timeout", f"no answer within {seconds:g} s") from error
        except UpstreamError as error:
            raise _NotAnsweredError("lost", str(error)) from error
        if answer.status >= 300:
            raise _NotAnsweredError("refused", f"answered {answer.status}: {raw[:200].decode(errors='replace')}")
        return raw
