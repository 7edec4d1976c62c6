"""Send images to encoders as the scheduler decides (docs/engine-facts/vllm.md#encoder-disaggregation).

Each image is sent alone, so an image of many requests is encoded once for all of them. The encoder's answer is opaque:
it is passed unchanged to the engine that needs the embedding.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakValueDictionary

from mmrouter_lib.engines.vllm.stage_requests import StageError, embedding_bytes, read_encoded
from mmrouter_router.encoding.encoder_queue import Encoder, Image, ImagePlacement, Mode, Outcome
from mmrouter_router.encoding.encoding_claims import EncodingClaims, Held
from mmrouter_router.encoding.scheduler import EncoderScheduler
from mmrouter_router.http.engine_connection import UpstreamError
from mmrouter_router.request.prepared import OutgoingImage

log = logging.getLogger("mmrouter.encoding")

REFUSED = range(400, 500)  # statuses for an image that every other encoder would refuse, too
ASK_AGAIN_SECONDS = 0.02  # interval of claims of an image that another frontend has claimed
BUSY = frozenset({408, 429})  # of these, those that are about the encoder and not about the image

Post = Callable[[str, OutgoingImage, Mapping[str, str], list[dict[str, Any]]], Awaitable[tuple[int, bytes]]]
"""Encoder id, image, trace context, and a list that gets the image's transfers -> status and answer.

Raises :class:`UpstreamError`.
"""


class EncodeError(Exception):
    """No encoder encodes a request's images; ``reason`` is a metric label."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class ImageToEncode:
    """One image of a request: its size for the scheduler, and what an encoder is sent."""

    image: Image
    sent: OutgoingImage


@dataclass(frozen=True, slots=True)
class EncodedImages:
    """Encoders' answers by image identity, placements in the order of the images, and the transfers to encoders."""

    params: dict[str, dict[str, Any]]
    placed: Sequence[ImagePlacement]
    seconds: float
    transfers: list[dict[str, Any]]


@dataclass(slots=True)
class _Waiting:
    images: tuple[ImageToEncode, ...]
    headers: Mapping[str, str]
    done: "asyncio.Future[tuple[Any, ...]]" = field(default_factory=asyncio.Future)


class ImageSender:
    """Encodes images of requests at the fleet's encoders. All methods are called from one event loop."""

    def __init__(
        self,
        scheduler: EncoderScheduler,
        post: Post,
        clock: Callable[[], float] = time.monotonic,
        claims: EncodingClaims | None = None,
    ) -> None:
        """``claims``: the claims shared with other frontends; ``None``: claim nothing."""
        self.scheduler, self._claims = scheduler, claims
        self._post, self._clock = post, clock
        self._waiting: dict[str, _Waiting] = {}
        self._sending: dict[int, asyncio.Task[None]] = {}
        self._joined: dict[str, Encoder] = {}  # by the fleet's id
        self._departures: Counter[str] = Counter()
        self._following: WeakValueDictionary[bytes, asyncio.Lock] = WeakValueDictionary()
        self._changed = asyncio.Event()

    @property
    def able(self) -> bool:
        return bool(self._joined)

    def state(self) -> list[dict[str, Any]]:
        """Return each encoder's work for this router since it joined: what runs, what was encoded, and busy seconds."""
        return [
            {
                "id": queue.id,
                "running": len(queue.running),
                "waiting": len(queue.waiting),
                "images": queue.images,
                "tokens": queue.tokens,
                "busy_seconds": round(queue.busy_seconds, 6),
            }
            for queue in self.scheduler.queues.values()
        ]

    def update(self, encoders: Collection[Encoder]) -> None:
        """Set the encoders, of which only weights change. Work of one that is gone goes to the others."""
        wanted = {encoder.id: encoder for encoder in encoders}
        before, self._joined = self._joined, wanted
        for name in before.keys() - wanted.keys():
            self._carry_out(self.scheduler.leave(self._scheduler_id(name), self._clock()))
            self._departures[name] += 1
        for name, encoder in wanted.items():
            if name not in before:
                self._carry_out(self.scheduler.join(replace(encoder, id=self._scheduler_id(name)), self._clock()))
            elif encoder.weight != before[name].weight:
                self.scheduler.set_weight(self._scheduler_id(name), encoder.weight)

    def _scheduler_id(self, name: str) -> str:
        """An encoder that comes back gets a new id, because its cache may be empty."""
        return f"{name}~{self._departures[name]}" if self._departures[name] else name

    async def encode(
        self,
        request_id: str,
        images: Sequence[ImageToEncode],
        headers: Mapping[str, str] | None = None,
        mode: Mode | None = None,
    ) -> EncodedImages:
        """Encode every image; a cancelled call withdraws the images that only it needs.

        ``headers``: the request's trace context. An image of several requests belongs to the trace of the first.
        ``mode``: instead of the deployment's.
        Raises :class:`EncodeError` when the encoders fail.
        """
        if self._claims is None:
            return await self._encode(request_id, images, headers or {}, mode)
        began = self._clock()
        try:
            claimed = await asyncio.gather(*(self._claim(each.image.key) for each in images))
            own = [each for each, ours in zip(images, claimed, strict=True) if ours]
            others = [each for each, ours in zip(images, claimed, strict=True) if not ours]
            parts = [self._encode(request_id, own, headers or {}, mode)] if own else []
            parts += [self._follow(f"{request_id}/{n}", each, headers or {}, mode) for n, each in enumerate(others)]
            done = await _together(parts)
        finally:
            for each in images:
                if each.image.key not in self.scheduler.jobs:
                    self._claims.release(each.image.key)
        placed = dict(
            zip((each.sent.uuid for each in (*own, *others)), (p for d in done for p in d.placed), strict=True)
        )
        params = {uuid: param for part in done for uuid, param in part.params.items()}
        transfers = [entry for part in done for entry in part.transfers]
        return EncodedImages(params, [placed[each.sent.uuid] for each in images], self._clock() - began, transfers)

    async def _claim(self, key: bytes) -> bool:
        """Return whether this frontend can encode or use an image now; false while another frontend has its claim."""
        assert self._claims is not None
        if self.scheduler.knows(key):
            return True
        answer = await self._claims.claim(key, self._joined)
        if isinstance(answer, Held):
            self.scheduler.learn(answer.encoder, key, answer.size, (answer.answer, []))
        return answer != "pending"

    async def _follow(
        self, request_id: str, image: ImageToEncode, headers: Mapping[str, str], mode: Mode | None
    ) -> EncodedImages:
        """Wait for the embedding that another frontend requested; if that one gives up, have the image encoded.

        Of several requests for an image one sends claims, and the others wait for it.
        """
        key = image.image.key
        async with self._following.setdefault(key, asyncio.Lock()):
            while not await self._claim(key):  # noqa: ASYNC110 - another process changes it
                await asyncio.sleep(ASK_AGAIN_SECONDS)
        return await self._encode(request_id, [image], headers, mode)

    async def _encode(
        self, request_id: str, images: Sequence[ImageToEncode], headers: Mapping[str, str], mode: Mode | None
    ) -> EncodedImages:
        began = self._clock()
        waiting = self._waiting[request_id] = _Waiting(tuple(images), headers)
        try:
            outcome = self.scheduler.place(request_id, [each.image for each in images], began, mode)
            if outcome.full:
                raise EncodeError("encoders_full")
            self._carry_out(outcome)
            answers = await waiting.done
        finally:
            del self._waiting[request_id]
            self._carry_out(self.scheduler.cancel(request_id, self._clock()))
        params = {each.sent.uuid: answer[0] for each, answer in zip(images, answers, strict=True)}
        # A held or joined image was transferred for another request.
        fresh = [answer[1] for answer, placed in zip(answers, outcome.placed, strict=True) if placed.how == "queued"]
        transfers = [transfer for each in fresh for transfer in each]
        return EncodedImages(params, outcome.placed, self._clock() - began, transfers)

    async def run(self) -> None:
        renewing = asyncio.create_task(self._claims.run()) if self._claims is not None else None
        try:
            while True:
                now = self._clock()
                due = self.scheduler.next_tick(now)
                self._changed.clear()
                try:
                    async with asyncio.timeout(None if due == float("inf") else max(0.0, due - now)):
                        await self._changed.wait()
                except TimeoutError:
                    self._carry_out(self.scheduler.tick(self._clock()))
        finally:
            for task in (*self._sending.values(), *([renewing] if renewing is not None else [])):
                task.cancel()

    def _carry_out(self, outcome: Outcome) -> None:
        for run in outcome.aborts:
            if task := self._sending.pop(run, None):
                task.cancel()
        for start in outcome.starts:
            task = asyncio.create_task(self._send(start.run, start.encoder, start.image), name=f"encode {start.run}")
            self._sending[start.run] = task
        for request, answers in outcome.ready.items():
            if (waiting := self._waiting.get(request)) and not waiting.done.done():
                waiting.done.set_result(answers)
        for request, reason in outcome.failed.items():
            if (waiting := self._waiting.get(request)) and not waiting.done.done():
                waiting.done.set_exception(EncodeError(reason))
        self._changed.set()

    async def _send(self, run: int, encoder: str, image: Image) -> None:
        sent, headers = self._find(image)
        refused = False
        transfers: list[dict[str, Any]] = []
        try:
            status, raw = await self._post(encoder.partition("~")[0], sent, headers, transfers)
            refused = status in REFUSED and status not in BUSY
            if status != 200:
                raise StageError(f"answered {status}: {raw[:200].decode(errors='replace')}")
            params = read_encoded(raw, [sent.uuid])[sent.uuid]
        except (StageError, UpstreamError) as error:
            log.warning("encoder %s: %s", encoder, error)
            self._sending.pop(run, None)
            self._carry_out(self.scheduler.failed(run, self._clock(), refused=refused))
            return
        self._sending.pop(run, None)
        size = embedding_bytes(params)
        self._carry_out(self.scheduler.finished(run, self._clock(), (params, transfers), size))
        if self._claims is not None:
            self._claims.encoded(image.key, encoder.partition("~")[0], size, params)

    def _find(self, image: Image) -> tuple[OutgoingImage, Mapping[str, str]]:
        """Return the image and trace context of the first request with this key: equal keys are equal bytes."""
        for waiting in self._waiting.values():
            for each in waiting.images:
                if each.image.key == image.key:
                    return each.sent, waiting.headers
        raise AssertionError("the scheduler started an image of no waiting request")


async def _together(parts: Iterable[Coroutine[Any, Any, EncodedImages]]) -> list[EncodedImages]:
    """Return the results of all parts; the first error, or a cancellation, ends the others."""
    tasks = [asyncio.create_task(part) for part in parts]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
