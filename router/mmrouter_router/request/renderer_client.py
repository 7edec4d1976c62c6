"""Client of renderers (an engine's preprocessing without its model), which predict prompts of families not modelled.

Given the router's image identities a renderer returns the tokens of a request and the positions of its images. Results
are cached by content, bounded by tokens. Where rendering fails, the request is served by affinity.
"""

import asyncio
import base64
import io
import itertools
import logging
import secrets
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import orjson
from blake3 import blake3
from PIL import Image

from mmrouter_lib.block_keys import Span
from mmrouter_lib.engines.vllm.stage_requests import RENDER_PATH, read_rendered, render_request
from mmrouter_lib.media_identity import to_wire
from mmrouter_router.core.single_flight import SingleFlight
from mmrouter_router.fleet.workers import Member
from mmrouter_router.http.engine_requests import EngineRequestError, EngineRequests
from mmrouter_router.http.upstream import Upstream
from mmrouter_router.telemetry.metrics import Metrics

log = logging.getLogger("mmrouter.renderer")

ROLE = "renderer"
CACHED_TOKENS = 4_000_000  # capacity of the cache in tokens, 4 bytes each
MAX_ANSWER = 64 << 20
RENDER_SECONDS = 20.0
PROBE_SECONDS = 1.0
RETRY_TURNS = 10  # turns of probing after which a renderer that failed to render the probe image is probed again
PROBE_IDENTITY = bytes(32)  # identity of the probe image, which no other image has

Rendered = tuple["array[int]", tuple[Span, ...]]


class Renderer:
    """Sends requests to the ready renderers in turn."""

    def __init__(
        self, upstream: Upstream, engine_key: str, served_model: str, metrics: Metrics, *, tokens: int = CACHED_TOKENS
    ) -> None:
        self._ask = EngineRequests(upstream, engine_key).ask
        self._model, self._metrics = served_model, metrics
        self._members: dict[str, Member] = {}
        self._answered, self._verified = set[str](), set[str]()
        self._problems: dict[str, str] = {}  # uid -> problem of its last answer to a probe
        self._turn = itertools.count()
        self._cache: OrderedDict[bytes, Rendered] = OrderedDict()
        self._free_tokens = tokens
        self._renderings = SingleFlight[bytes, Rendered]()

    def roster(self, members: Iterable[Member]) -> None:
        self._members = {member.uid: member for member in members}
        self._answered &= self._members.keys()
        self._verified &= self._members.keys()
        self._problems = {uid: problem for uid, problem in self._problems.items() if uid in self._members}

    @property
    def usable(self) -> list[Member]:
        """The ready renderers that have answered this router; only admitted ones, where there are any."""
        ready = [m for m in self._members.values() if m.ready and not m.draining and m.uid in self._answered]
        return [member for member in ready if member.admitted] or ready

    def state(self) -> list[dict[str, Any]]:
        return [
            {name: getattr(m, name) for name in ("uid", "name", "ip", "pool", "ready", "draining")}
            | {"answered": m.ready and not m.draining and m.uid in self._answered}
            | {"verified": m.uid in self._verified, "message": self._problems.get(m.uid, "")}
            for m in self._members.values()
        ]

    async def run(self) -> None:
        """Probe every renderer with a text until it answers, then with an image; ends only by cancellation."""
        url = "data:image/png;base64," + base64.b64encode(small_pictures()[0]).decode()
        image = {"type": "image_url", "image_url": {"url": url}, "uuid": to_wire(PROBE_IDENTITY)}
        contents = "Are you there?", [{"type": "text", "text": "Are you there, and what is this?"}, image]
        chats = [{"model": self._model, "messages": [{"role": "user", "content": content}]} for content in contents]
        text, picture = (orjson.dumps(render_request(chat)) for chat in chats)
        for turn in itertools.count():
            for member in list(self._members.values()):
                if not member.ready:
                    continue
                if member.uid not in self._answered:
                    if await self._probe(member, text) is not None:
                        self._answered.add(member.uid)
                elif member.uid not in self._verified and (member.uid not in self._problems or turn % RETRY_TURNS == 0):
                    await self._verify(member, picture)
            await asyncio.sleep(PROBE_SECONDS)

    async def _probe(self, member: Member, body: bytes) -> Rendered | None:
        try:
            rendered = await self._render_at(member, body)
        except EngineRequestError as error:
            log.info("%s: %s", member.name, error)
            self._problems[member.uid] = str(error)
            return None
        self._problems.pop(member.uid, None)
        return rendered

    async def _verify(self, member: Member, picture: bytes) -> None:
        rendered = await self._probe(member, picture)
        if rendered is None:
            return
        if [span.identity for span in rendered[1]] == [PROBE_IDENTITY]:
            self._verified.add(member.uid)
        else:
            self._problems[member.uid] = f"one image became {len(rendered[1])} in the prompt"

    async def render(self, body: Mapping[str, Any], tenant: str = "") -> Rendered:
        """Return ids and spans of a chat whose images have identities as uuids. Raises :class:`EngineRequestError`.

        Tenants share no answer, because the time of a hit would tell what another one sent.
        """
        request = render_request(body)
        # The identity of an image replaces its bytes.
        content = {**request, "messages": [_with_identities(message) for message in request["messages"]]}
        key = blake3(tenant.encode() + b"\0" + orjson.dumps(content)).digest()
        cached = self._cache.get(key)
        if cached is not None:
            self._cache.move_to_end(key)
            self._metrics.rendered.labels("cache").inc()
            return cached
        joins = key in self._renderings
        try:
            rendered = await self._renderings.run(key, lambda: self._render(key, request))
        except EngineRequestError as error:
            self._metrics.rendered.labels(error.cause).inc()
            raise
        self._metrics.rendered.labels("joined" if joins else "renderer").inc()
        return rendered

    async def _render(self, key: bytes, request: Mapping[str, Any]) -> Rendered:
        usable = self.usable
        if not usable:
            raise EngineRequestError("unavailable", "no renderer is ready")
        rendered = await self._render_at(usable[next(self._turn) % len(usable)], orjson.dumps(request))
        self._cache[key] = rendered
        self._free_tokens -= len(rendered[0])
        while self._free_tokens < 0:
            _, (ids, _) = self._cache.popitem(last=False)
            self._free_tokens += len(ids)
        return rendered

    async def _render_at(self, member: Member, body: bytes) -> Rendered:
        try:
            return await self._ask(member.ip, RENDER_PATH, body, read_rendered, RENDER_SECONDS, MAX_ANSWER)
        except EngineRequestError as error:
            if error.cause in ("lost", "timeout"):
                self._answered.discard(member.uid)
            raise EngineRequestError(error.cause, f"{member.name}: {error}") from error


def _with_identities(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, Sequence) or isinstance(content, str):
        return dict(message)
    parts = [
        {"uuid": part["uuid"]}
        if isinstance(part, Mapping) and part.get("type") in ("image_url", "video_url") and part.get("uuid")
        else part
        for part in content
    ]
    return {**message, "content": parts}


SIDE = 64  # width and height in pixels: a handful of tokens in every family
COLOURS = ("#c02030", "#2030c0")


def small_pictures() -> tuple[bytes, ...]:
    """Return the images as PNG files: the same on every router."""
    return tuple(picture((SIDE, SIDE), colour) for colour in COLOURS)


def picture(size: tuple[int, int], colour: str = "black") -> bytes:
    """Return a PNG file of (width, height) pixels of one colour."""
    file = io.BytesIO()
    Image.new("RGB", size, colour).save(file, "PNG")
    return file.getvalue()


def new_nonce() -> str:
    return secrets.token_hex(8)
