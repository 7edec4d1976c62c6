"""Probe requests: an image under a unique text, sent by the router itself to see what an engine makes of it.

The canary verifies workers with them, sentinel learning identifies images. Where no image has a place, they are text.
"""

import asyncio
import base64
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import orjson

from mmrouter_lib.block_keys import Span
from mmrouter_lib.engines import adapter
from mmrouter_lib.engines.base.adapter import ImageRewrite
from mmrouter_lib.engines.sglang.hidden_groups import STATE_STEP, STATES
from mmrouter_lib.engines.sglang.stage_requests import decode_fields, new_meeting, override_headers, prefill_fields
from mmrouter_lib.media_identity import media_identity, to_wire
from mmrouter_lib.prompt import NotModelledError, PromptImage, TemplateError
from mmrouter_router.core.settings import Settings
from mmrouter_router.fleet.workers import Target, Worker
from mmrouter_router.http.engine_requests import EngineRequestError, EngineRequests
from mmrouter_router.http.upstream import Upstream
from mmrouter_router.request.prepare import Preparer
from mmrouter_router.request.prepared import CHAT
from mmrouter_router.request.renderer_client import SIDE, picture, small_pictures
from mmrouter_router.scheduling.placer import PARTNERS

MAX_ANSWER = 64 * 1024
PAIR_SECONDS = 25.0  # below the lease of a canary: each engine of a pair waits for the other for minutes


class ProbeRequestError(Exception):
    """A probe request could not be carried out, which proves nothing. The message says why."""


@dataclass(frozen=True, slots=True)
class ProbeImage:
    """An image of a probe request: its identity for the router, and the encoded bytes for the engine.

    ``size``: (width, height) in pixels; ``padding``: to which the engine pads it beside an image of that size.
    """

    identity: bytes
    data: bytes
    mime: str
    tokens: int
    size: tuple[int, int]
    padding: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class ProbeRequest:
    """One request: its body, the predicted prompt, and the span of the image that it is about, if there is one."""

    body: bytes
    ids: "array[int]"
    span: Span | None


class _Usage(msgspec.Struct):
    prompt_tokens: int


class _Answer(msgspec.Struct):
    usage: _Usage


class ProbeRequests:
    """Builds and sends probe requests."""

    def __init__(
        self,
        settings: Settings,
        preparer: Preparer,
        upstream: Upstream,
        partner: Callable[[Worker], Target | None],
        pair_seconds: float = PAIR_SECONDS,
    ) -> None:
        """``partner`` finds the other engine of a pair for a prefill or decode engine that does not answer alone."""
        self._adapter = adapter(settings.deployment.spec.engine.type)
        self.publishing_roles = self._adapter.publishing_roles  # others, as SGLang's decode engines, keep no cache
        self._partner, self._pair_seconds = partner, pair_seconds
        # The place of an image's run is identified by the block before it, so the nonce has to fill a whole block.
        self._fills_a_block = self._adapter.learns_image_identity
        self._preparer, self._ask = preparer, EngineRequests(upstream, settings.engine_key).ask
        self._model, self._key = settings.served_model, settings.identity_key

    @property
    def unkept(self) -> int:
        """Tokens at the end of a prompt that may be in no event."""
        return STATE_STEP if STATES in self._preparer.hidden else 0

    def possible_at(self, worker: Worker) -> bool:
        """Whether a worker's engine makes the prompt of a probe request that is predicted."""
        return self.possible and not worker.is_older(self._preparer.first_release)

    @property
    def possible(self) -> bool:
        """Whether a probe request's prompt can be predicted, by the library or a renderer."""
        return self._preparer.prompter is not None or self._preparer.renderer is not None

    def image(self, data: bytes) -> ProbeImage:
        """Return one of :func:`small_pictures` for this deployment's family; 0 tokens where a renderer counts them."""
        family = self._preparer.family
        options, tokens = (family.pixel_options, family.count(SIDE, SIDE)) if family is not None else ({}, 0)
        return ProbeImage(media_identity(data, options, key=self._key), data, "image/png", tokens, (SIDE, SIDE))

    def canary_images(self) -> list[ProbeImage | None]:
        """Return the images that a canary shows, one after the other; ``None`` is a request of text alone."""
        family = self._preparer.family
        return [None] if family is not None and not family.places_images else [*map(self.image, small_pictures())]

    async def build(self, nonce: str, image: ProbeImage | None, block_size: int) -> ProbeRequest:
        """Build a request for an image, its prompt predicted by the library or, for an unknown family, by a renderer.

        Raises :class:`ProbeRequestError` where the prompt cannot be predicted.
        """
        # The nonce comes first, so that no cache holds a block of it, also where images stand before a message's texts.
        # The tail makes at least one complete block, which is kept, follow the image.
        head = " ".join([nonce] * (1 + block_size // 4)) if self._fills_a_block else nonce
        tail = " ".join([nonce] * (2 + (block_size + self.unkept) // 4))
        images = await self._together(image)
        for system in (True, False):
            messages = _messages(head, tail, system=system, images=len(images))
            body = {"model": self._model, "messages": messages, "max_tokens": 1, "temperature": 0}
            shown = [_shown(each, len(messages) - 1, 1 + 2 * number) for number, each in enumerate(images)]
            rewritten = self._adapter.rewrite_chat(body, shown, model=self._model, cache_salt=None).body
            try:
                ids, spans = await self._prompt(messages, rewritten, images)
                break
            except (TemplateError, EngineRequestError) as error:  # a template that takes no system message
                if not system:
                    raise ProbeRequestError(str(error)) from error
            except NotModelledError as error:  # gpt-oss around midnight
                raise ProbeRequestError(str(error)) from error
        if len(spans) != len(shown):
            raise ProbeRequestError(f"the prompt has {len(spans)} images instead of {len(shown)}")
        return ProbeRequest(orjson.dumps(rewritten), ids, spans[0] if spans else None)

    async def _together(self, image: ProbeImage | None) -> list[ProbeImage]:
        """Return the images of a request for an image: the second one is as large as the first is padded to."""
        family = self._preparer.family
        if image is None or image.padding is None or family is None:
            return [] if image is None else [image]
        tokens, data = family.count(*image.padding), await asyncio.to_thread(picture, image.padding)
        return [image, ProbeImage(media_identity(data, {}, key=self._key), data, "image/png", tokens, image.padding)]

    async def _prompt(
        self, messages: list[dict[str, Any]], rewritten: dict[str, Any], shown: Sequence[ProbeImage]
    ) -> tuple["array[int]", tuple[Span, ...]]:
        prompter, renderer = self._preparer.prompter, self._preparer.renderer
        if prompter is not None:
            images = [PromptImage(image.identity, image.tokens, image.size) for image in shown]
            expanded = prompter.prompt({"messages": messages}, images)
            return expanded.ids, expanded.spans
        if renderer is None:
            raise ProbeRequestError(f"no prompt is predicted: {self._preparer.unpredicted}")
        return await renderer.render(rewritten)

    async def send(self, target: Target, request: ProbeRequest) -> bytes:
        """Send a request to the engine or its pair; returns the answer's body. Raises :class:`ProbeRequestError`."""
        role = target.worker.member.role
        if not self._adapter.pairs_prefill_and_decode or role not in PARTNERS:
            return await self._send(target, request, {})
        other = self._partner(target.worker)
        if other is None:
            raise ProbeRequestError(f"no {PARTNERS[role]} engine is available for a pair")
        computes, answers = (target, other) if role == "prefill" else (other, target)
        meeting = new_meeting(computes.worker.member.ip, computes.rank, computes.worker.ranks)
        both = (prefill_fields(meeting), decode_fields(meeting, answers.rank, answers.worker.ranks))
        halves = [
            asyncio.create_task(self._send(half, request, override_headers(fields)))
            for half, fields in zip((computes, answers), both, strict=True)
        ]
        try:
            async with asyncio.timeout(self._pair_seconds):
                _, body = await asyncio.gather(*halves)
            return body
        except TimeoutError as error:
            pair = f"{computes.worker.member.name} and {answers.worker.member.name}"
            raise ProbeRequestError(f"{pair} gave no answer within {self._pair_seconds:g} s") from error
        finally:
            for half in halves:
                half.cancel()
            await asyncio.gather(*halves, return_exceptions=True)

    async def _send(self, target: Target, request: ProbeRequest, more: Mapping[str, str]) -> bytes:
        rank = {"x-data-parallel-rank": str(target.rank)} if target.worker.ranks > 1 else {}
        try:
            ip, headers = target.worker.member.ip, {**more, **rank}
            return await self._ask(ip, CHAT, request.body, bytes, None, MAX_ANSWER, headers)
        except EngineRequestError as error:
            raise ProbeRequestError(f"the engine: {error}") from error


def prompt_tokens(answer: bytes) -> int:
    """Return the prompt tokens that an answer reports. Raises :class:`ProbeRequestError` without a report."""
    try:
        return msgspec.json.decode(answer, type=_Answer).usage.prompt_tokens
    except msgspec.DecodeError as error:
        raise ProbeRequestError(f"the answer does not report its prompt tokens: {error}") from error


def _shown(image: ProbeImage, message: int, part: int) -> ImageRewrite:
    uri = f"data:{image.mime};base64," + base64.b64encode(image.data).decode()
    return ImageRewrite(message=message, part=part, url=uri, uuid=to_wire(image.identity))


def _messages(head: str, tail: str, *, system: bool, images: int) -> list[dict[str, Any]]:
    content: Any = f"{head} look {tail}"
    if images:
        content = [{"type": "text", "text": f"{head} look"}]
        for _ in range(images):
            content += [{"type": "image_url", "image_url": {"url": ""}}, {"type": "text", "text": tail}]
    first = [{"role": "system", "content": f"{head} canary"}] if system else []
    return [*first, {"role": "user", "content": content}]
