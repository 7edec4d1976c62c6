"""Prompts from a pool of role ``renderer``: the exact fallback for a family that the code does not know.

A renderer is the engine's own preprocessing without its model. It has no cache and no sidecar; asked with our
identities it says which tokens a request becomes and where its images stand. Equal content is asked for once at a time,
and answers are kept by content, bounded by tokens. What cannot be rendered is an error with a reason, and the request
is then served by affinity.
"""

import asyncio
import base64
import io
import itertools
import logging
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import orjson
from blake3 import blake3
from PIL import Image

from mmrouter_lib.block_keys import Span
from mmrouter_lib.engines.base.launch import HTTP_PORT
from mmrouter_lib.engines.vllm.renderer import RENDER_PATH, RenderError, read_rendered, render_request
from mmrouter_lib.media_identity import to_wire
from mmrouter_router.core.single_flight import SingleFlight
from mmrouter_router.fleet.workers import Member
from mmrouter_router.http.upstream import Upstream, UpstreamError
from mmrouter_router.telemetry.metrics import Metrics

log = logging.getLogger("mmrouter.renderer")

ROLE = "renderer"
CACHED_TOKENS = 4_000_000
"""Tokens of rendered prompts that are kept, 4 bytes each."""
MAX_ANSWER = 64 << 20
RENDER_SECONDS = 20.0
PROBE_SECONDS = 1.0
PICTURE_TURNS = 10
"""A renderer that could not render the picture is asked again every so many probes."""
PICTURE_IDENTITY = bytes(32)
"""What our own picture is called: the renderer hands the name back and nobody else uses it."""

Rendered = tuple["array[int]", tuple[Span, ...]]


class RendererError(Exception):
    """No prompt came of it. ``cause`` is one of few words; the message says more."""

    def __init__(self, cause: str, message: str) -> None:
        super().__init__(message)
        self.cause = cause


class Renderer:
    """Asks the renderers that are there, in turn."""

    def __init__(
        self, upstream: Upstream, engine_key: str, served_model: str, metrics: Metrics, *, tokens: int = CACHED_TOKENS
    ) -> None:
        self._upstream, self._key, self._model, self._metrics = upstream, engine_key, served_model, metrics
        self._members: dict[str, Member] = {}
        self._answered: set[str] = set()
        self._proved: set[str] = set()
        self._wrong: dict[str, str] = {}  # uid -> what was wrong with its last answer to our own question
        self._picture = _picture_request(served_model)
        self._turn = itertools.count()
        self._kept: OrderedDict[bytes, Rendered] = OrderedDict()
        self._room = tokens
        self._renderings = SingleFlight[bytes, Rendered]()

    def roster(self, members: Iterable[Member]) -> None:
        """Take over which renderers are there."""
        self._members = {member.uid: member for member in members}
        self._answered &= self._members.keys()
        self._proved &= self._members.keys()
        self._wrong = {uid: said for uid, said in self._wrong.items() if uid in self._members}

    @property
    def usable(self) -> list[Member]:
        """Renderers that are ready and have rendered something for this router; those let in, where there are any."""
        ready = [m for m in self._members.values() if m.ready and not m.draining and m.uid in self._answered]
        return [member for member in ready if member.admitted] or ready

    def state(self) -> list[dict[str, Any]]:
        """Every renderer, for the control API: whether it answers, and whether it has rendered an image of ours."""
        return [
            {
                "uid": m.uid,
                "name": m.name,
                "ip": m.ip,
                "pool": m.pool,
                "ready": m.ready,
                "draining": m.draining,
                "answered": m.ready and not m.draining and m.uid in self._answered,
                "verified": m.uid in self._proved,
                "message": self._wrong.get(m.uid, ""),
            }
            for m in self._members.values()
        ]

    async def run(self) -> None:
        """Ask every new renderer for a text until it answers, then for an image; ends only by cancellation."""
        text = orjson.dumps(render_request(_question(self._model, "Are you there?")))
        for turn in itertools.count():
            for member in list(self._members.values()):
                if not member.ready:
                    continue
                if member.uid not in self._answered:
                    if await self._probe(member, text) is not None:
                        self._answered.add(member.uid)
                elif member.uid not in self._proved and (member.uid not in self._wrong or turn % PICTURE_TURNS == 0):
                    await self._prove(member)
            await asyncio.sleep(PROBE_SECONDS)

    async def _probe(self, member: Member, body: bytes) -> Rendered | None:
        try:
            rendered = await self._ask(member, body)
        except RendererError as error:
            log.info("%s: %s", member.name, error)
            self._wrong[member.uid] = str(error)
            return None
        self._wrong.pop(member.uid, None)
        return rendered

    async def _prove(self, member: Member) -> None:
        rendered = await self._probe(member, self._picture)
        if rendered is None:
            return
        if [span.identity for span in rendered[1]] == [PICTURE_IDENTITY]:
            self._proved.add(member.uid)
        else:
            self._wrong[member.uid] = f"one image became {len(rendered[1])} in the prompt"

    async def render(self, body: Mapping[str, Any]) -> Rendered:
        """Return ids and spans of a chat body for the engine, with our identity beside every image.

        Raises :class:`RendererError`.
        """
        request = render_request(body)
        key = _content_key(request)
        kept = self._kept.get(key)
        if kept is not None:
            self._kept.move_to_end(key)
            self._metrics.rendered.labels("cache").inc()
            return kept
        joins = key in self._renderings
        try:
            rendered = await self._renderings.run(key, lambda: self._render(key, request))
        except RendererError as error:
            self._metrics.rendered.labels(error.cause).inc()
            raise
        self._metrics.rendered.labels("joined" if joins else "renderer").inc()
        return rendered

    async def _render(self, key: bytes, request: Mapping[str, Any]) -> Rendered:
        usable = self.usable
        if not usable:
            raise RendererError("nobody", "no renderer is there")
        rendered = await self._ask(usable[next(self._turn) % len(usable)], orjson.dumps(request))
        self._keep(key, rendered)
        return rendered

    async def _ask(self, member: Member, body: bytes) -> Rendered:
        headers = {"content-type": "application/json", "authorization": f"Bearer {self._key}"}
        try:
            async with asyncio.timeout(RENDER_SECONDS):
                answer = await self._upstream.request(member.ip, HTTP_PORT, "POST", RENDER_PATH, headers, body)
                try:
                    raw = await answer.read(MAX_ANSWER)
                finally:
                    answer.close()
        except TimeoutError as error:
            self._answered.discard(member.uid)
            raise RendererError("timeout", f"{member.name} did not answer in {RENDER_SECONDS:g} s") from error
        except UpstreamError as error:
            self._answered.discard(member.uid)
            raise RendererError("lost", str(error)) from error
        if answer.status != 200:
            said = raw[:200].decode(errors="replace")
            raise RendererError("refused", f"{member.name} answered {answer.status}: {said}")
        try:
            return read_rendered(raw)
        except RenderError as error:
            raise RendererError("unusable", str(error)) from error

    def _keep(self, key: bytes, rendered: Rendered) -> None:
        self._kept[key] = rendered
        self._room -= len(rendered[0])
        while self._room < 0:
            _, (ids, _) = self._kept.popitem(last=False)
            self._room += len(ids)


def _question(model: str, content: object) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": content}]}


def _picture_request(model: str) -> bytes:
    """A request with one small picture, as a worker would get it."""
    file = io.BytesIO()
    Image.new("RGB", (64, 64), "#c02030").save(file, "PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    picture = {"type": "image_url", "image_url": {"url": url}, "uuid": to_wire(PICTURE_IDENTITY)}
    content = [{"type": "text", "text": "Are you there, and what is this?"}, picture]
    return orjson.dumps(render_request(_question(model, content)))


def _content_key(request: Mapping[str, Any]) -> bytes:
    """A hash of a request in which an image is its identity: who sends its bytes again sends the same content."""
    return blake3(orjson.dumps({**request, "messages": [_named(m) for m in request["messages"]]})).digest()


def _named(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, Sequence) or isinstance(content, str):
        return dict(message)
    parts = [
        {"uuid": part["uuid"]}
        if isinstance(part, Mapping) and part.get("type") == "image_url" and part.get("uuid")
        else part
        for part in content
    ]
    return {**message, "content": parts}
