"""Requests of the router's own: an image under a text that nobody else has, and what the engine made of it.

The canary asks them to prove a worker, the learner to see what an engine makes of an image.
"""

import asyncio
import base64
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import orjson

from mmrouter_lib import feed
from mmrouter_lib.block_keys import Span
from mmrouter_lib.engines import adapter
from mmrouter_lib.engines.base.events import EventError, Stored
from mmrouter_lib.engines.base.launch import HTTP_PORT
from mmrouter_lib.engines.base.request import ImageRewrite
from mmrouter_lib.engines.sglang.disaggregation import decode_headers, new_meeting, prefill_headers
from mmrouter_lib.media_identity import media_identity, to_wire
from mmrouter_lib.prompt import PromptImage, TemplateError
from mmrouter_router.core.probe_images import SIDE
from mmrouter_router.fleet.feed_client import Feed
from mmrouter_router.fleet.workers import Target, Worker
from mmrouter_router.http.upstream import Upstream, UpstreamError
from mmrouter_router.request.prepare import Preparer
from mmrouter_router.request.renderer_client import RendererError
from mmrouter_router.scheduling.placer import PARTNERS

PAIR_SECONDS = 25.0
"""How long two engines may take to answer together: each waits for the other one, for minutes if that one hangs. Less
than the lease of a canary."""


class OwnRequestError(Exception):
    """A request of our own could not be carried out; nothing is known. The message says why."""


@dataclass(frozen=True, slots=True)
class Picture:
    """An image to ask about: what it is to us, and the encoded bytes that the engine gets."""

    identity: bytes
    data: bytes
    mime: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Question:
    """One request: its body for the engine, the prompt that it becomes, and where the image stands there."""

    body: bytes
    ids: "array[int]"
    span: Span


class _Usage(msgspec.Struct):
    prompt_tokens: int


class _Answer(msgspec.Struct):
    usage: _Usage


class OwnRequests:
    """Makes, sends and watches them."""

    def __init__(
        self,
        engine: str,
        preparer: Preparer,
        upstream: Upstream,
        engine_key: str,
        served_model: str,
        key: bytes,
        partner: Callable[[Worker], Target | None] = lambda worker: None,
        pair_seconds: float = PAIR_SECONDS,
    ) -> None:
        """``partner``: the engine that answers together with a prefill or decode engine, where none answers alone;
        ``pair_seconds``: how long the two may take.
        """
        self._adapter, self._engine, self._partner = adapter(engine), engine, partner
        self._pair_seconds = pair_seconds
        # Where a run starts is told apart by the blocks before it, so the nonce has to fill a whole one of them.
        self._fills_a_block = self._adapter.learns_image_identity
        self._preparer, self._upstream = preparer, upstream
        self._engine_key, self._model, self._key = engine_key, served_model, key

    @property
    def engine(self) -> str:
        """Type of the deployment's engines."""
        return self._engine

    @property
    def possible(self) -> bool:
        """Whether anybody can say what the engine should make of such a request."""
        return self._preparer.prompter is not None or self._preparer.renderer is not None

    def picture(self, data: bytes, side: int = SIDE) -> Picture:
        """Return one of :func:`small_pictures` as this deployment sees it; its tokens are 0 where a renderer counts."""
        family = self._preparer.family
        if family is None:
            return Picture(media_identity(data, {}, key=self._key), data, "image/png", 0)
        identity = media_identity(data, family.pixel_options, key=self._key)
        return Picture(identity, data, "image/png", family.count(side, side))

    async def question(self, nonce: str, picture: Picture, block_size: int) -> Question:
        """Return a request for a picture, its prompt predicted by the library or, for a family that is not modelled, by
        a renderer. Raises :class:`OwnRequestError` where there is neither.
        """
        # The nonce stands first, so no block of it is in a cache from an earlier one. The tail makes at least one
        # complete block follow the image, whatever the block size.
        head = " ".join([nonce] * (1 + block_size // 4)) if self._fills_a_block else nonce
        tail = " ".join(nonce for _ in range(2 + block_size // 4))
        for system in (True, False):
            messages = _messages(nonce, head, tail, system=system)
            uri = f"data:{picture.mime};base64," + base64.b64encode(picture.data).decode()
            body = {"model": self._model, "messages": messages, "max_tokens": 1, "temperature": 0}
            image = ImageRewrite(message=len(messages) - 1, part=1, url=uri, uuid=to_wire(picture.identity))
            rewritten = self._adapter.rewrite_chat(body, [image], model=self._model, cache_salt=None).body
            try:
                ids, spans = await self._prompt(messages, rewritten, picture)
                break
            except (TemplateError, RendererError) as error:  # a template that takes no system message
                if not system:
                    raise OwnRequestError(str(error)) from error
        if len(spans) != 1:
            raise OwnRequestError(f"one image became {len(spans)} in the prompt")
        return Question(orjson.dumps(rewritten), ids, spans[0])

    async def _prompt(
        self, messages: list[dict[str, Any]], rewritten: dict[str, Any], picture: Picture
    ) -> tuple["array[int]", tuple[Span, ...]]:
        prompter, renderer = self._preparer.prompter, self._preparer.renderer
        if prompter is not None:
            text = prompter.render(messages)
            expanded = prompter.expand(text, [PromptImage(picture.identity, picture.tokens)])
            return expanded.ids, expanded.spans
        if renderer is None:
            raise OwnRequestError(f"family {self._preparer.unknown_family} is not modelled")
        return await renderer.render(rewritten)

    async def send(self, worker: Worker, rank: int, question: Question) -> bytes:
        """Let the engine answer, where it takes two to answer with another one. Returns the answer's body.

        Raises :class:`OwnRequestError`.
        """
        if not self._adapter.pairs_prefill_and_decode or worker.member.role not in PARTNERS:
            return await self._send(worker, rank, question, {})
        other = self._partner(worker)
        if other is None:
            raise OwnRequestError(f"no {PARTNERS[worker.member.role]} engine can answer together with it")
        one = Target(worker, rank, other.block_size)
        computes, answers = (one, other) if worker.member.role == "prefill" else (other, one)
        meeting = new_meeting(computes.worker.member.ip, computes.rank, computes.worker.ranks)
        told = (prefill_headers(meeting), decode_headers(meeting, answers.rank, answers.worker.ranks))
        halves = [
            asyncio.create_task(self._send(half.worker, half.rank, question, headers))
            for half, headers in zip((computes, answers), told, strict=True)
        ]
        try:
            async with asyncio.timeout(self._pair_seconds):
                _, said = await asyncio.gather(*halves)
            return said
        except TimeoutError as error:
            pair = f"{computes.worker.member.name} and {answers.worker.member.name}"
            raise OwnRequestError(f"{pair} gave no answer within {self._pair_seconds:g} s") from error
        finally:
            for half in halves:
                half.cancel()  # whoever is left waits for nobody
            await asyncio.gather(*halves, return_exceptions=True)

    async def _send(self, worker: Worker, rank: int, question: Question, more: Mapping[str, str]) -> bytes:
        headers = {"content-type": "application/json", "authorization": f"Bearer {self._engine_key}", **more}
        if worker.ranks > 1:
            headers["x-data-parallel-rank"] = str(rank)
        try:
            answer = await self._upstream.request(
                worker.member.ip, HTTP_PORT, "POST", "/v1/chat/completions", headers, question.body
            )
            try:
                body = await answer.read(64 * 1024)
            finally:
                answer.close()
        except UpstreamError as error:
            raise OwnRequestError(str(error)) from error
        if answer.status != 200:
            raise OwnRequestError(f"the engine answered {answer.status}: {body[:200].decode(errors='replace')}")
        return body

    async def published(self, worker: Worker, rank: int, feeder: Feed, before: int) -> Sequence[Stored]:
        """Return what the engine stored since delta ``before``, decoded from its raw batches."""
        end = worker.follower.seq
        if end <= before:
            return ()
        epoch = worker.follower.epoch
        stored: list[Stored] = []
        for part in await feeder.question(lambda n: feed.DetailRequest(n, epoch, before + 1, end)):
            if isinstance(part, feed.DetailPart):
                for raw in part.batches:
                    try:
                        batch = self._adapter.decode_batch(raw.payload)
                    except EventError:
                        continue  # counted by the sidecar, which has seen the same bytes
                    if raw.rank == rank:
                        stored += [event for event in batch.events if isinstance(event, Stored)]
        return stored


def prompt_tokens(answer: bytes) -> int:
    """Return how many tokens the prompt of an answer had. Raises :class:`OwnRequestError` where it does not say."""
    try:
        return msgspec.json.decode(answer, type=_Answer).usage.prompt_tokens
    except msgspec.DecodeError as error:
        raise OwnRequestError(f"an answer does not say how long its prompt was: {error}") from error


def _messages(nonce: str, head: str, tail: str, *, system: bool) -> list[dict[str, Any]]:
    content = [
        {"type": "text", "text": f"{head} look"},
        {"type": "image_url", "image_url": {"url": ""}},
        {"type": "text", "text": tail},
    ]
    first = [{"role": "system", "content": f"{nonce} canary"}] if system else []
    return [*first, {"role": "user", "content": content}]
