"""The plugin as vLLM sees it: routes, and what they need of a server that has started.

Whatever goes wrong here is an answer with a sentence. Nothing is raised into the server: a plugin that cannot work is
disabled, and the engine is what it was.
"""

import asyncio
import atexit
import logging
import os
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import msgspec

from mmrouter_handover.plugin import supported_versions as known
from mmrouter_handover.plugin import vllm_items, wire
from mmrouter_handover.plugin.engine_side import Taking
from mmrouter_handover.plugin.pending_items import Kept
from mmrouter_handover.plugin.processor_cache import HandedOverCache, Processed
from mmrouter_handover.plugin.renderer_side import Lending, from_cache
from mmrouter_handover.plugin.ways import Ways, read_settings

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

log = logging.getLogger("vllm.mmrouter_plugin")  # below vLLM's own logger, which alone is set up there

JSON = "application/json"
NOT_FOUND, BAD_REQUEST, UNAVAILABLE = 404, 400, 503


class Handover:
    """What the entry point names. One for each server process."""

    name = "mmrouter"
    required_tasks: tuple[str, ...] | None = ("generate", "render")

    def __init__(self) -> None:
        self.role = "engine"
        self.disabled = "the server is starting"
        self._version = ""
        self._settings = ""
        self._node = ""
        self._missing: dict[str, str] = {}
        self._ways: Ways | None = None
        self._lending: Lending | None = None
        self._taking: Taking | None = None
        self._kept: Kept[Processed] | None = None
        self._state: Any = None

    def attach_router(self, app: Any) -> None:
        """Add the routes; they answer 503 with the reason for as long as the plugin is disabled."""
        # Plain routes of Starlette: nothing of a request is read before the plugin reads it.
        app.router.add_route(wire.STATUS_PATH, self._status, methods=["GET"])
        app.router.add_route(wire.RENDER_PATH, self._guarded(self._render), methods=["POST"])
        app.router.add_route(wire.ITEMS_PATH, self._guarded(self._items), methods=["POST"])
        app.router.add_route(wire.RELEASE_PATH, self._guarded(self._release), methods=["POST"])

    async def init_state(self, engine_client: Any, state: Any, _: Any) -> None:
        """Enable the plugin where vLLM and the environment allow it. Never raises."""
        self.role = "renderer" if engine_client is None else "engine"
        try:
            self.disabled = self._enable(state)
        except Exception as error:  # what is raised here would keep the engine from starting
            log.exception("the plugin of mmrouter failed to start")
            self.disabled = f"it failed to start: {type(error).__name__}: {str(error)[:200]}"
        if self.disabled:
            log.warning("hand-over of processed images is disabled: %s", self.disabled)
        else:
            said = ", ".join(f"{way} {'no: ' + why if why else 'yes'}" for way, why in self._missing.items())
            log.info("hand-over of processed images is enabled as %s: %s", self.role, said)

    def _enable(self, state: Any) -> str:
        """Take hold of what the routes need; return why that cannot be, or empty. Changes nothing of vLLM before."""
        import vllm  # noqa: PLC0415

        self._version = str(vllm.__version__)
        if why := known.why_unknown(self._version):
            return why
        renderer: Any = getattr(getattr(state, "online_renderer", None), "renderer", None)
        cache = "_mm_processor_only_cache" if self.role == "renderer" else "_mm_processor_cache"
        if why := known.why_other(renderer, cache):
            return why
        if renderer.config.parallel_config._api_process_count > 1:
            return "the engine has several API servers, each with images of its own, and a chat meets any"
        settings = read_settings(os.environ)
        self._node = settings.node
        self._settings = vllm_items.settings_of(self._version, renderer)
        self._ways = Ways(settings, self.role)
        atexit.register(self._ways.close)  # vLLM tells a plugin nothing of its end
        self._missing = self._ways.missing
        self._state = state
        if self.role == "renderer":
            self._lending = Lending(self._ways, self._settings)
            return ""
        self._kept = Kept(settings.limit_bytes, time.monotonic)
        before = HandedOverCache(renderer._mm_processor_cache, self._kept)
        self._taking = Taking(self._ways, self._settings, before, self._kept)
        renderer._mm_processor_cache = before  # last: from here on chats meet it
        return ""

    async def _status(self, _: "Request") -> "Response":
        counts: Counter[str] = Counter()
        if self._lending is not None:
            self._lending.expire()
            counts += self._lending.counts
            counts["leases"] = len(self._lending)
        if self._taking is not None and self._kept is not None:
            self._kept.expire()
            counts += self._taking.counts
            counts["used"] = self._taking.used
            counts["kept"] = len(self._kept)
            counts["kept bytes"] = self._kept.bytes
        if self._ways is not None and self._ways.nixl is not None:
            self._ways.nixl.arena.expire()
            counts["nixl stuck"] = await asyncio.to_thread(self._ways.nixl.stuck)
            counts["nixl leased bytes"] = self._ways.nixl.arena.leased_bytes
        ways: dict[str, str] = {way: "disabled" if self.disabled else self._missing[way] for way in wire.WAYS}
        return _json(
            wire.Status(
                role=self.role,
                enabled=not self.disabled,
                reason=self.disabled,
                engine=self._version,
                settings=self._settings,
                node=self._node,
                ways=ways,
                counts=dict(counts),
            )
        )

    async def _render(self, request: "Request") -> "Response":
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest  # noqa: PLC0415

        if self._lending is None:
            return _said(NOT_FOUND, "this server is an engine: it renders for itself")
        asked = wire.read(await request.body(), wire.RenderRequest)
        chat = ChatCompletionRequest.model_validate_json(bytes(asked.chat))
        chat.mm_payload = "none"
        made = await self._state.serving_render.render_chat_request(chat, request)
        if hasattr(made, "error"):
            return _answer(made.model_dump_json().encode(), made.error.code)
        features = None if made.features is None else made.features.model_dump()
        names = [] if features is None else list(dict.fromkeys(features["mm_hashes"].get(vllm_items.MODALITY, ())))
        wanted = names if asked.images is None else [name for name in names if name in asked.images]
        loop, renderer = asyncio.get_running_loop(), self._state.online_renderer.renderer
        found = await loop.run_in_executor(renderer._mm_executor, from_cache, renderer._mm_processor_only_cache, wanted)
        lease, offers, withheld, fell = await asyncio.to_thread(
            self._lending.offer, found, asked.ways, asked.seconds, asked.inline_bytes
        )
        withheld |= dict.fromkeys(set(asked.images or ()) - set(names), "unnamed")
        return _json(wire.Rendered(list(made.token_ids), features, lease, offers, withheld, fell))

    async def _items(self, request: "Request") -> "Response":
        if self._taking is None or self._kept is None:
            return _said(NOT_FOUND, "this server is a renderer: it takes no items")
        asked = wire.read(await request.body(), wire.ItemsRequest)
        held, refused = await asyncio.to_thread(self._taking.take, asked.items, asked.seconds)
        asyncio.get_running_loop().call_later(asked.seconds + 1, self._kept.expire)
        return _json(wire.Taken(held, refused))

    async def _release(self, request: "Request") -> "Response":
        if self._lending is None:
            return _said(NOT_FOUND, "this server is an engine: it lends nothing")
        asked = wire.read(await request.body(), wire.ReleaseRequest)
        return _json(wire.Released(await asyncio.to_thread(self._lending.release, asked.lease)))

    def _guarded(self, act: "Callable[[Request], Awaitable[Response]]") -> "Callable[[Request], Awaitable[Response]]":
        async def guarded(request: "Request") -> "Response":
            if self.disabled:
                return _said(UNAVAILABLE, f"hand-over is disabled: {self.disabled}")
            try:
                return await act(request)
            # Also what pydantic says of a chat. What vLLM itself refuses is answered by the server's own handlers.
            except ValueError as error:
                return _said(BAD_REQUEST, str(error)[:2000])

        return guarded


def _json(value: msgspec.Struct) -> "Response":
    return _answer(msgspec.json.encode(value), 200)


def _said(status: int, message: str) -> "Response":
    return _answer(wire.error(status, message), status)


def _answer(body: bytes, status: int) -> "Response":
    from starlette.responses import Response  # noqa: PLC0415

    return Response(body, status_code=status, media_type=JSON)
