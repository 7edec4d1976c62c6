"""vLLM's entry point to the plugin: add the routes, and enable them once the server has started.

Errors become responses with a message and are never raised into the server: a plugin that cannot work is disabled, and
the engine behaves as without it.
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

from mmrouter_handover.plugin import vllm_items, wire
from mmrouter_handover.plugin.item_exchange import ItemLender, ItemReceiver, Transports, from_cache, read_settings
from mmrouter_handover.plugin.processor_cache import HandedOverCache, PendingItems, Processed

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

log = logging.getLogger("vllm.mmrouter_plugin")  # a child of vLLM's logger, the only one configured

NOT_FOUND, BAD_REQUEST, UNAVAILABLE = 404, 400, 503


class Handover:
    """The object that the entry point names, one per server process."""

    name = "mmrouter"
    required_tasks: tuple[str, ...] | None = ("generate", "render")

    def __init__(self) -> None:
        self.role, self.disabled = "engine", "the server is starting"
        self._version = self._settings = self._node = ""
        self._missing: dict[str, str] = {}
        self._transports: Transports | None = None
        self._lender: ItemLender | None = None
        self._receiver: ItemReceiver | None = None
        self._state: Any = None

    def attach_router(self, app: Any) -> None:
        """Add the routes; they answer 503 with the reason while the plugin is disabled."""
        # Plain Starlette routes, so that FastAPI does not parse the request body.
        app.router.add_route(wire.STATUS_PATH, self._status, methods=["GET"])
        posts = {wire.RENDER_PATH: self._render, wire.ITEMS_PATH: self._items, wire.RELEASE_PATH: self._release}
        for path, act in posts.items():
            app.router.add_route(path, self._guarded(act), methods=["POST"])

    async def init_state(self, engine_client: Any, state: Any, _: Any) -> None:
        """Enable the plugin if vLLM and the environment allow it. Never raises."""
        self.role = "renderer" if engine_client is None else "engine"
        try:
            self.disabled = self._enable(state)
        except Exception as error:  # an exception here would keep the engine from starting
            log.exception("the plugin of mmrouter failed to start")
            self.disabled = f"it failed to start: {type(error).__name__}: {str(error)[:200]}"
        if self.disabled:
            log.warning("hand-over of processed images is disabled: %s", self.disabled)
        else:
            summary = ", ".join(f"{way} {'no: ' + why if why else 'yes'}" for way, why in self._missing.items())
            log.info("hand-over of processed images is enabled as %s: %s", self.role, summary)

    def _enable(self, state: Any) -> str:
        """Set up what the routes need; return why that is impossible, or empty. vLLM is changed as the last step."""
        import vllm  # noqa: PLC0415

        self._version = str(vllm.__version__)
        if why := vllm_items.why_unsupported(self._version):
            return why
        renderer: Any = getattr(getattr(state, "online_renderer", None), "renderer", None)
        attribute = "_mm_processor_only_cache" if self.role == "renderer" else "_mm_processor_cache"
        if why := vllm_items.why_incompatible(renderer, attribute):
            return why
        if renderer.config.parallel_config._api_process_count > 1:
            return "the engine has several API servers, each with its own images, and a chat may reach any of them"
        settings = read_settings(os.environ)
        self._node = settings.node
        self._settings = vllm_items.settings_digest(self._version, renderer)
        self._transports, self._state = Transports(settings, self.role), state
        atexit.register(self._transports.close)  # vLLM has no shutdown hook for plugins
        self._missing = self._transports.missing
        if self.role == "renderer":
            self._lender = ItemLender(self._transports, self._settings)
            return ""
        pending: PendingItems[Processed] = PendingItems(settings.limit_bytes, time.monotonic)
        cache = HandedOverCache(renderer._mm_processor_cache, pending)
        self._receiver = ItemReceiver(self._transports, self._settings, cache, pending)
        renderer._mm_processor_cache = cache
        return ""

    async def _status(self, _: "Request") -> "Response":
        counts: Counter[str] = Counter()
        if self._lender is not None:
            self._lender.expire()
            counts += self._lender.counts
            counts["leases"] = len(self._lender)
        if self._receiver is not None:
            pending = self._receiver.pending
            pending.expire()
            counts += self._receiver.counts
            counts["used"], counts["kept"] = self._receiver.cache.used, len(pending)
            counts["kept bytes"] = pending.bytes
        if self._transports is not None and self._transports.nixl is not None:
            self._transports.nixl.arena.expire()
            counts["nixl stuck"] = await asyncio.to_thread(self._transports.nixl.stuck)
            counts["nixl leased bytes"] = self._transports.nixl.arena.leased_bytes
        ways: dict[str, str] = {way: "disabled" if self.disabled else self._missing[way] for way in wire.WAYS}
        server = (self._version, self._settings, self._node)
        return _answer(wire.Status(self.role, not self.disabled, self.disabled, *server, ways, dict(counts)))

    async def _render(self, request: "Request") -> "Response":
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest  # noqa: PLC0415

        if self._lender is None:
            return _error(NOT_FOUND, "this server is an engine, not a renderer")
        body = wire.read(await request.body(), wire.RenderRequest)
        chat = ChatCompletionRequest.model_validate_json(bytes(body.chat))
        chat.mm_payload = "none"
        rendered = await self._state.serving_render.render_chat_request(chat, request)
        if hasattr(rendered, "error"):
            return _answer(rendered.model_dump_json().encode(), rendered.error.code)
        features = None if rendered.features is None else rendered.features.model_dump()
        names = [] if features is None else list(dict.fromkeys(features["mm_hashes"].get(vllm_items.MODALITY, ())))
        wanted = names if body.images is None else [name for name in names if name in body.images]
        loop, renderer = asyncio.get_running_loop(), self._state.online_renderer.renderer
        cache = renderer._mm_processor_only_cache
        cached = await loop.run_in_executor(renderer._mm_executor, from_cache, cache, wanted)
        lease, offers, withheld, fell = await asyncio.to_thread(
            self._lender.offer, cached, body.ways, body.seconds, body.inline_bytes
        )
        withheld |= dict.fromkeys(set(body.images or ()) - set(names), "unnamed")
        return _answer(wire.Rendered(list(rendered.token_ids), features, lease, offers, withheld, fell))

    async def _items(self, request: "Request") -> "Response":
        if self._receiver is None:
            return _error(NOT_FOUND, "this server is a renderer, not an engine")
        body = wire.read(await request.body(), wire.ItemsRequest)
        held, refused = await asyncio.to_thread(self._receiver.take, body.items, body.seconds)
        asyncio.get_running_loop().call_later(body.seconds + 1, self._receiver.pending.expire)
        return _answer(wire.Taken(held, refused))

    async def _release(self, request: "Request") -> "Response":
        if self._lender is None:
            return _error(NOT_FOUND, "this server is an engine, not a renderer")
        body = wire.read(await request.body(), wire.ReleaseRequest)
        return _answer(wire.Released(await asyncio.to_thread(self._lender.release, body.lease)))

    def _guarded(self, act: "Callable[[Request], Awaitable[Response]]") -> "Callable[[Request], Awaitable[Response]]":
        async def guarded(request: "Request") -> "Response":
            if self.disabled:
                return _error(UNAVAILABLE, f"hand-over is disabled: {self.disabled}")
            try:
                return await act(request)
            # Includes pydantic's errors about the chat. The server's own handlers answer vLLM's errors.
            except ValueError as error:
                return _error(BAD_REQUEST, str(error)[:2000])

        return guarded


def _error(status: int, message: str) -> "Response":
    return _answer(wire.error(status, message), status)


def _answer(body: msgspec.Struct | bytes, status: int = 200) -> "Response":
    from starlette.responses import Response  # noqa: PLC0415

    raw = body if isinstance(body, bytes) else msgspec.json.encode(body)
    return Response(raw, status_code=status, media_type="application/json")
